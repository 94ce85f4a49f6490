"""Two lanes in one scheduler: interactive first in every step, batch work fills the rest and gives way."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from engine.cache.sequence import SequenceState
from engine.request import FinishReason, Lane, Request
from engine.sched.plan import StepPlan
from tests.engine.oracle import answer, request
from tests.engine.sched.harness import Harness

STEMS = ([], [1, 2, 3, 4, 5, 6], [1, 2, 3, 4, 9, 9, 9, 9], [7] * 11)

made_requests = st.lists(
    st.tuples(
        st.integers(0, 6),  # steps after the one before it
        st.sampled_from(STEMS),
        st.lists(st.integers(1, 3), min_size=1, max_size=4),
        st.integers(1, 12),
        st.booleans(),
        st.sampled_from([Lane.INTERACTIVE, Lane.BATCH, Lane.BATCH]),
    ),
    min_size=1,
    max_size=25,
)


def play(
    harness: Harness, made: list[tuple], *, depth: int, lane: int | None = None, on_plan=lambda plan: None
) -> None:
    """Adds the requests at their times and runs to the end, with up to `depth` steps in flight."""
    at, queue = 0, []
    for number, (after, stem, tail, max_tokens, is_exact, own_lane) in enumerate(made):
        at += after
        own = own_lane if lane is None else lane
        queue.append((at, request(f"r{number}", [*stem, *tail], max_tokens, lane=own, ignore_eos=is_exact)))
    now = 0
    while queue or harness.scheduler.has_work() or harness.in_flight:
        while queue and queue[0][0] <= now:
            harness.add(queue.pop(0)[1])
        plan = harness.launch()
        harness._collect(harness.scheduler.take_finished())
        if plan is not None:
            on_plan(plan)
        while harness.in_flight and (plan is None or len(harness.in_flight) >= depth):
            harness.commit()
        now += 1
        assert now < 5_000, "it doesn't end"


def lane_of(harness: Harness, seq_id: str) -> int:
    return harness.requests[seq_id].lane


@settings(max_examples=120, deadline=None)
@given(
    made=made_requests,
    num_blocks=st.integers(8, 40),
    block_tokens=st.integers(1, 5),
    step_tokens=st.sampled_from([1, 3, 7, 100]),
    max_running=st.integers(1, 6),
    depth=st.integers(1, 2),
)
def test_no_step_has_batch_work_while_an_interactive_sequence_that_could_run_is_left_out(
    made: list[tuple], num_blocks: int, block_tokens: int, step_tokens: int, max_running: int, depth: int
) -> None:
    """An interactive sequence outside of a step with batch work waits for a token in flight, for one of its own lane
    that computes its prefix or stands before it, or for places and blocks that only its own lane holds; and one that
    didn't fit among those is looked at again when any of them ends. All end with their answers."""
    harness = Harness(
        num_blocks=num_blocks, block_tokens=block_tokens, step_tokens=step_tokens, max_running=max_running
    )
    scheduler = harness.scheduler

    def audit(plan: StepPlan) -> None:
        lanes = [lane_of(harness, chunk.seq_id) for chunk in plan.chunks]
        assert lanes == sorted(lanes), "interactive work comes first"
        if Lane.BATCH not in lanes:
            return
        inside = {chunk.seq_id for chunk in plan.chunks}
        running = scheduler.running()
        batch = [seq for seq in running if not seq.is_interactive]
        slots = max_running - sum(seq.decodes for seq in running if seq.is_interactive)
        out = [seq for seq in scheduler._sequences.values() if seq.is_interactive and seq.id not in inside]
        for seq in out:
            if seq.state is SequenceState.RUNNING and not seq.num_unread and seq.num_pending:
                assert not scheduler._tables.room(seq), f"{seq.id} could have gone on"
                assert not batch, "batch work holds blocks that an interactive sequence needs"
        leaders = scheduler._leaders.leaders()
        for key, ranks in scheduler._waiting._parked.items():
            if any(seq.rank in ranks for seq in out):
                assert leaders[key].is_interactive, "an interactive sequence waits for batch work"
        line = [seq for seq in out if seq.rank in scheduler._waiting._lines[True]]
        first = min(line, key=lambda seq: seq.rank, default=None)
        if first is not None and not first.num_preemptions and True not in scheduler._refused:
            chain = scheduler._tables.match(first)
            neighbours = scheduler._peak.beside(running, is_interactive=True)
            fits = scheduler._peak.fits(neighbours, scheduler._peak.new_load(first, chain))
            assert slots < first.decodes or not fits, f"{first.id} could have begun"

    play(harness, made, depth=depth, on_plan=audit)
    assert harness.finished.keys() == harness.requests.keys()
    for name, seq in harness.finished.items():
        if seq.finish_reason is FinishReason.ERROR:
            assert seq.error_code == "kv_capacity_exceeded"
        else:
            assert (seq.output_ids, seq.finish_reason) == answer(harness.requests[name])
    assert scheduler.num_used_blocks == 0


@settings(max_examples=40, deadline=None)
@given(
    made=made_requests,
    num_blocks=st.integers(8, 40),
    step_tokens=st.sampled_from([1, 3, 7, 100]),
    max_running=st.integers(1, 6),
    depth=st.integers(1, 2),
)
def test_requests_of_one_lane_are_planned_alike_whichever_it_is(
    made: list[tuple], num_blocks: int, step_tokens: int, max_running: int, depth: int
) -> None:
    plans = []
    for lane in (Lane.INTERACTIVE, Lane.BATCH, 7):
        harness = Harness(num_blocks=num_blocks, step_tokens=step_tokens, max_running=max_running)
        play(harness, made, depth=depth, lane=lane)
        plans.append(harness.plans)
    assert plans[0] == plans[1] == plans[2]


def launch_all(harness: Harness, *requests: Request) -> list[str]:
    harness.add(*requests)
    plan = harness.launch()
    assert plan is not None
    harness.commit()
    return [chunk.seq_id for chunk in plan.chunks]


def test_batch_work_fills_what_interactive_work_leaves_of_a_step() -> None:
    harness = Harness(step_tokens=10)
    assert launch_all(harness, request("old", [1] * 4, 8, ignore_eos=True)) == ["old"]
    urgent = request("urgent", [2] * 6, 8, lane=Lane.INTERACTIVE, ignore_eos=True)
    assert launch_all(harness, request("new", [3] * 30, 2), urgent) == ["urgent", "old", "new"]
    assert [len(chunk.token_ids) for chunk in harness.plans[-1].chunks] == [6, 1, 3]
    long = request("long", [4] * 40, 2, lane=Lane.INTERACTIVE)
    assert launch_all(harness, long) == ["urgent", "long"], "a long prompt takes whole steps, but for decodes before it"
    harness.run()
    harness.assert_answers()


def test_a_place_is_given_up_by_the_last_batch_sequence_and_its_progress_stays_cached() -> None:
    harness = Harness(max_running=2)
    launch_all(harness, *(request(f"b{i}", [1 + i] * 8, 9, ignore_eos=True) for i in range(2)))
    launch_all(harness)
    launch_all(harness)
    assert launch_all(harness, request("urgent", [5] * 4, 3, lane=Lane.INTERACTIVE)) == ["urgent", "b0"]
    harness.run()
    harness.assert_answers()
    assert [harness.finished[name].num_preemptions for name in ("urgent", "b0", "b1")] == [0, 0, 1]
    again = [chunk for plan in harness.plans for chunk in plan.chunks if chunk.seq_id == "b1"]
    assert [chunk.start for chunk in again if len(chunk.token_ids) > 1] == [0, 8], "two blocks of its KV were kept"


def test_blocks_are_given_up_by_the_last_batch_sequences_as_far_as_they_are_needed() -> None:
    harness = Harness(num_blocks=12, block_tokens=4, max_running=8)
    launch_all(harness, *(request(f"b{i}", [1 + i] * 11, 2, ignore_eos=True) for i in range(4)))
    urgent = request("urgent", [9] * 19, 2, lane=Lane.INTERACTIVE, ignore_eos=True)
    assert launch_all(harness, urgent) == ["urgent", "b0", "b1"], "five blocks of two that hold three each"
    harness.run()
    harness.assert_answers()
    assert harness.scheduler._forecast.reserve == 0.0, "no guess was wrong"


def test_expected_growth_of_batch_work_keeps_no_interactive_request_out() -> None:
    harness = Harness(num_blocks=20, block_tokens=4, max_running=8)
    launch_all(harness, *(request(f"b{i}", [1 + i] * 4, 30, ignore_eos=True) for i in range(2)))
    large = {"max_tokens": 40, "ignore_eos": True}
    assert launch_all(harness, request("late", [7] * 8, **large)) == ["b0", "b1"], "its peak doesn't fit beside theirs"
    assert launch_all(harness, request("urgent", [8] * 8, lane=0, **large)) == ["urgent", "b0", "b1"]
    harness.run()
    harness.assert_answers()
    assert harness.finished["urgent"].num_preemptions == 0


def test_a_shared_prefix_of_batch_work_doesnt_count_against_interactive_requests() -> None:
    harness = Harness(num_blocks=24, block_tokens=4, max_running=8)
    stem = [6] * 40
    launch_all(harness, request("b0", [*stem, 1], 30, ignore_eos=True))
    launch_all(harness, *(request(f"b{i}", [*stem, i], 2, ignore_eos=True) for i in range(2, 4)))
    assert harness.scheduler._pool.num_shared == 10
    urgent = [request(f"u{i}", [i] * 24, 16, lane=0, ignore_eos=True) for i in (7, 8)]
    inside = launch_all(harness, *urgent)
    assert {"u7", "u8"} <= set(inside), "twenty blocks in all, as if there were no batch work"
    harness.run()
    harness.assert_answers()


def test_an_interactive_request_doesnt_wait_for_a_prefix_that_batch_work_computes() -> None:
    harness = Harness(num_blocks=60, step_tokens=8)
    stem = [5] * 32
    launch_all(harness, request("b0", [*stem, 1], 4))
    assert launch_all(harness, request("urgent", [*stem, 2], 4, lane=0)) == ["urgent"]
    assert launch_all(harness, request("after", [*stem, 3], 4, lane=0)) == ["urgent"], "it follows one of its own lane"
    harness.run()
    harness.assert_answers()
    assert harness.finished["after"].hit_tokens == 32


def test_an_interactive_request_that_doesnt_fit_keeps_no_batch_work_waiting() -> None:
    harness = Harness(num_blocks=20, block_tokens=4, max_running=8)
    launch_all(harness, request("u0", [1] * 8, 50, lane=0, ignore_eos=True))
    waits = request("u1", [2] * 8, 60, lane=0, ignore_eos=True)
    assert launch_all(harness, waits, request("b0", [3] * 4, 2, ignore_eos=True)) == ["u0", "b0"]
    harness.run()
    harness.assert_answers()


def test_counts_are_kept_by_lane() -> None:
    harness = Harness()
    launch_all(harness, request("b", [1] * 8, 4, ignore_eos=True), request("u", [2] * 5, 3, lane=0, ignore_eos=True))
    lanes = harness.scheduler.counters.lanes
    assert [(lanes[lane].open, lanes[lane].running, lanes[lane].waiting) for lane in Lane] == [(1, 1, 0), (1, 1, 0)]
    harness.run()
    shown = [(lanes[lane].prompt_tokens, lanes[lane].computed_tokens, lanes[lane].output_tokens) for lane in Lane]
    assert shown == [(5, 7, 3), (8, 11, 4)]
    assert harness.scheduler.counters.output_tokens == 7
    assert [lanes[lane].open for lane in Lane] == [0, 0]
