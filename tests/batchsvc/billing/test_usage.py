"""Buckets, pages and line items as pure arithmetic: nothing is left out, counted twice or lost by rounding."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime
from itertools import pairwise

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from batchsvc.billing.line_items import Usage, items
from batchsvc.billing.usage import WIDTHS, Kind, Page, Question, page_of, parse, spans
from batchsvc.errors import InvalidRequestError
from batchsvc.money import TOKENS_PER_RATE, Rates, divide_half_even, line_cost_nanos

TIMES = st.integers(0, 4 * 10**9)
WIDTH_NAMES = st.sampled_from(["1m", "1h", "1d"])
RATE = st.integers(0, 10**11)


def seconds(text: str) -> int:
    return int(datetime.fromisoformat(text).replace(tzinfo=UTC).timestamp())


def asked(start_s: int, end_s: int, width: str, limit: int) -> Question:
    said = [("start_time", start_s), ("end_time", end_s), ("bucket_width", width), ("limit", limit)]
    return parse(Kind.COMPLETIONS, [(name, str(value)) for name, value in said])


def walked(question: Question, now_s: int) -> Iterator[Page]:
    page = page_of(question, now_s)
    yield page
    while page.next_page is not None:
        page = page_of(replace(question, page=page.next_page), now_s)
        yield page


@given(TIMES, st.integers(1, 200), st.integers(1, 86_400), WIDTH_NAMES, st.integers(1, 31), st.integers(-3, 3))
def test_buckets_cover_the_time_once_on_pages_of_any_size(
    start_s: int, widths: int, rest_s: int, name: str, limit: int, now_at: int
) -> None:
    width_s = WIDTHS[Kind.COMPLETIONS][name].seconds
    end_s = start_s + widths * width_s // 3 + rest_s % width_s + 1
    now_s = end_s + now_at * width_s
    pages = list(walked(asked(start_s, end_s, name, limit), max(now_s, 0)))
    buckets = [bucket for page in pages for bucket in page.buckets]
    assert all(len(page.buckets) == limit for page in pages[:-1])
    running_end_s = max(now_s, 0) // width_s * width_s + width_s
    if start_s >= running_end_s:
        assert buckets == []
        return
    assert (buckets[0].start_s, buckets[-1].end_s) == (start_s, min(end_s, running_end_s))
    assert all(left.end_s == right.start_s for left, right in pairwise(buckets))
    for bucket in buckets:
        assert bucket.start_s < bucket.end_s and bucket.start_s // width_s == (bucket.end_s - 1) // width_s


@given(st.integers(0, 10**13), st.integers(1, 10**9), st.sampled_from([60_000, 3_600_000, 86_400_000]))
@example(3_600_000, 3_600_000, 3_600_000)
@example(3_599_999, 2, 86_400_000)
def test_spans_cover_the_time_once_and_whole_hours_are_whole(start_ms: int, length_ms: int, width_ms: int) -> None:
    found = list(spans(start_ms, start_ms + length_ms, width_ms))
    assert (found[0][1], found[-1][2]) == (start_ms, start_ms + length_ms)
    assert all(left[2] == right[1] for left, right in pairwise(found))
    for whole_hours, begin, end in found:
        assert begin < end
        assert not whole_hours or begin % 3_600_000 == end % 3_600_000 == 0
        assert whole_hours or width_ms == 60_000 or end - begin < 2 * 3_600_000


@pytest.mark.parametrize("zone", ["Europe/Berlin", "America/New_York", "Australia/Lord_Howe", "UTC"])
@pytest.mark.parametrize(
    ("first", "days"),
    [
        ("2026-03-27", 5),  # clocks go forward in Berlin on the 29th
        ("2026-10-23", 5),  # and back on the 25th
        ("2026-11-01", 1),  # New York
        ("2027-12-30", 4),  # a year ends
        ("2028-02-27", 4),  # a leap day
        ("2027-02-27", 3),
    ],
)
def test_days_are_days_of_utc_wherever_the_server_stands(
    zone: str, first: str, days: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TZ", zone)
    time.tzset()
    try:
        start = seconds(first)
        page = page_of(asked(start, start + days * 86_400, "1d", 31), seconds("2030-01-01"))
        assert [bucket.start_s for bucket in page.buckets] == [start + 86_400 * day for day in range(days)]
        assert {bucket.end_s - bucket.start_s for bucket in page.buckets} == {86_400}
        hours = page_of(asked(start, start + 86_400, "1h", 168), seconds("2030-01-01")).buckets
        assert len(hours) == 24
    finally:
        monkeypatch.undo()
        time.tzset()


def test_a_page_belongs_to_its_question() -> None:
    question = asked(0, 10**9, "1d", 7)
    name = page_of(question, 10**9).next_page
    assert name is not None
    assert page_of(replace(question, page=name, limit=3), 10**9).buckets[0].start_s == 7 * 86_400
    for other in (asked(1, 10**9, "1d", 7), asked(0, 10**9 - 1, "1d", 7), asked(0, 10**9, "1h", 7)):
        with pytest.raises(InvalidRequestError):
            page_of(replace(other, page=name), 10**9)
    for wrong in ("", "page_", name[:-1], name + "A", "page_" + "A" * 32, name.replace("page_", "")):
        with pytest.raises(InvalidRequestError) as refused:
            page_of(replace(question, page=wrong), 10**9)
        assert refused.value.param == "page"


def test_arrays_come_with_brackets_or_short() -> None:
    for arrays in (
        [("group_by[]", "model"), ("group_by[]", "project_id")],
        [("group_by", "model"), ("group_by", "project_id")],
        [("group_by", "model,project_id"), ("group_by[]", "model")],
    ):
        assert parse(Kind.COSTS, [("start_time", "1"), *arrays]).group_by == ("model", "project_id")
    question = parse(Kind.COSTS, [("start_time", "1"), ("models[]", "a,b"), ("line_items", "m, t, rounding")])
    assert question.filters == {"models": ("a,b",), "line_items": ("m, t, rounding",)}
    assert parse(Kind.COSTS, [("start_time", "1"), ("group_by", "metadata.team")]).group_by == ("metadata.team",)
    for name in ("metadata.", "metadata", "Model", "", "metadata.a\nb", 'metadata.a"b'):
        with pytest.raises(InvalidRequestError) as refused:
            parse(Kind.COSTS, [("start_time", "1"), ("group_by[]", name)])
        assert refused.value.param == "group_by"


@given(
    st.builds(Rates, input=RATE, cached_input=RATE, output=RATE),
    st.lists(st.tuples(st.integers(0, 5000), st.integers(0, 5000), st.integers(0, 500), st.sampled_from([1, -1]))),
)
def test_line_items_add_up_to_the_bill(rates: Rates, lines: list[tuple[int, int, int, int]]) -> None:
    total = Usage()
    for prompt, cached, output, sign in lines:
        tokens = {"input_tokens": prompt + cached, "cached_tokens": cached, "output_tokens": output}
        cost = line_cost_nanos(rates, **tokens)
        total += Usage(requests=sign, cost_nanos=sign * cost, **{name: sign * n for name, n in tokens.items()})
    found = items("m", "t", rates, total)
    assert sum(item.amount_nanos for item in found) == total.cost_nanos
    assert len({item.name for item in found}) == len(found)
    for item in found:
        if item.tokens is None:
            # half a nano-dollar a line, and as much for each of the three items
            assert 2 * abs(item.amount_nanos) <= len(lines) + 3
        else:
            assert item.rate_nanos is not None
            assert item.amount_nanos == divide_half_even(item.tokens * item.rate_nanos, TOKENS_PER_RATE)


def test_without_rates_the_sum_is_one_item() -> None:
    (item,) = items("m", "t", None, Usage(cost_nanos=7, input_tokens=3))
    assert (item.name, item.amount_nanos, item.tokens) == ("m, t", 7, None)
