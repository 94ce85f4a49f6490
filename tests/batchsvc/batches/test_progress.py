"""Shares never fall, never reach the whole before the end, and rates survive thinning and undone work."""

from __future__ import annotations

import math
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from batchsvc.batches import estimate, progress
from batchsvc.batches.estimate import AnyTime, Habits, Hands, Neighbour
from batchsvc.batches.progress import Sample, Work

TOKENS = st.integers(0, 10**12)
LINES = st.integers(0, 10**6)
HABITS = Habits(flush_ms=500, death_ms=4_000, tick_ms=500)


@st.composite
def works(draw: st.DrawFn) -> Work:
    """Whatever rows may say, also what no plan predicted."""
    est = draw(TOKENS)
    return Work(
        est_tokens=est,
        lines=draw(LINES),
        finished_tokens=draw(st.integers(0, est + 10)),
        took_tokens=draw(TOKENS),
        running_tokens=draw(TOKENS),
        running_lines=draw(LINES),
        sure_tokens=draw(TOKENS),
    )


@st.composite
def histories(draw: st.DrawFn) -> list[Sample]:
    steps = st.tuples(st.integers(0, 10**7), st.integers(-(10**6), 10**9))
    at_ms = tokens = 10**12
    samples: list[Sample] = []
    for later, more in draw(st.lists(steps, max_size=60)):
        at_ms, tokens = at_ms + later, tokens + more
        samples = progress.with_sample(samples, Sample(at_ms, tokens))
    return samples


@given(works())
def test_a_share_is_between_nothing_and_less_than_the_whole(work: Work) -> None:
    ppm = progress.running_ppm(work)
    assert 0 <= ppm <= progress.WHOLE_PPM - progress.MERGING_PPM
    assert 0.0 <= progress.shown_share(ppm) < 1.0
    assert 0.0 <= work.left_tokens(0.0) <= work.left_tokens(0.5) <= work.left_tokens(1.0) < math.inf


@given(st.integers(0, 10**7), st.integers(0, 10**7))
def test_merging_never_shows_the_whole(merged: int, total: int) -> None:
    ppm = progress.merging_ppm(merged_lines=merged, total=total)
    assert progress.WHOLE_PPM - progress.MERGING_PPM <= ppm < progress.WHOLE_PPM
    assert progress.shown_share(ppm) < 1.0
    assert progress.merging_ppm(merged_lines=merged + 1, total=total) >= ppm


@given(st.integers(1, 1000), st.integers(1, 5000), st.data())
def test_where_lengths_are_certain_the_share_is_exact(lines: int, each: int, data: st.DataObject) -> None:
    done = data.draw(st.integers(0, lines))
    under_way = data.draw(st.integers(0, lines - done))
    whole = lines * each
    running = under_way * data.draw(st.integers(0, each // 2))
    work = Work(
        est_tokens=whole,
        lines=lines,
        finished_tokens=done * each,
        took_tokens=done * each,
        running_tokens=running,
        running_lines=under_way,
        sure_tokens=whole,
    )
    assert math.isclose(work.left_tokens(), whole - done * each - running, abs_tol=0.05 * whole)


def test_short_answers_that_end_first_dont_make_the_batch_short() -> None:
    work = Work(
        est_tokens=200 * 256,
        lines=200,
        finished_tokens=145 * 256,
        took_tokens=145 * 16,
        running_tokens=55 * 100,
        running_lines=55,
    )
    assert work.left_tokens(0.0) < 1_000, "the finished ones alone say that nothing is left"
    assert progress.running_ppm(work) < 600_000, "but those that run are longer already"


@given(histories())
def test_few_samples_are_kept_and_they_rise_in_time(samples: list[Sample]) -> None:
    assert len(samples) <= 24
    for before, after in pairwise(samples):
        assert before.at_ms < after.at_ms and before.tokens <= after.tokens


def test_undone_work_lowers_the_past_and_leaves_the_rate() -> None:
    samples = [Sample(0, 0), Sample(10_000, 1_000), Sample(20_000, 2_000)]
    undone = progress.with_sample(samples, Sample(20_000, 1_500))
    assert undone[-1] == (20_000, 1_500)
    for history in (samples, undone):
        assert math.isclose(estimate.rate(history, 20_000, HABITS, AnyTime()), 0.1)


@given(
    works(),
    histories(),
    st.integers(0, 10**8),
    st.builds(Hands, st.integers(0, 50), st.floats(0, 1e12)),
    st.lists(st.builds(Neighbour, left_tokens=st.floats(0, 1e12), rate=st.floats(0, 1e6), is_ahead=st.booleans())),
)
def test_an_interval_lies_ahead_and_exists_only_with_a_rate(
    work: Work, samples: list[Sample], later: int, hands: Hands, neighbours: list[Neighbour]
) -> None:
    now = (samples[-1].at_ms if samples else 0) + later
    found = estimate.lines_end(work, samples, HABITS, AnyTime(), now, hands=hands, neighbours=neighbours)
    if work.finished_tokens >= work.est_tokens:
        assert found == (now, now)
    elif estimate.rate(samples, now, HABITS, AnyTime()) > 0:
        assert found is not None and now <= found.low_ms <= found.high_ms < math.inf
        cut = found.until(now)
        assert cut == (now, now), "a deadline cuts both ends"
    elif len(samples) < 2 or samples[-1].tokens == samples[0].tokens:
        assert found is None


@given(st.integers(0, 10**6), st.integers(0, 10**6), st.integers(0, 10**8))
def test_merging_ends_ahead(merged: int, total: int, took_ms: int) -> None:
    whole = estimate.merge_ms(total, 700.0 * total, HABITS)
    ends = estimate.merge_left(merged_lines=merged, total=total, since_ms=0, now_ms=took_ms, whole=whole)
    assert took_ms <= ends.low_ms <= ends.high_ms
