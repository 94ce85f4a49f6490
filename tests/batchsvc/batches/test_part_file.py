"""Part files keep rows byte for byte; output and error lines have the shapes that OpenAI's readers know."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from batchsvc.batches import part_file
from batchsvc.batches.part_file import PartLine

COUNT = st.integers(0, 2**53)
TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=50)


def success(**changes: Any) -> bytes:
    values: dict[str, Any] = {
        "batch_id": "batch_1",
        "line_no": 7,
        "custom_id": "a",
        "model": "m",
        "created_s": 1_700_000_000,
        "text": "hello",
        "finish_reason": "stop",
        "prompt_tokens": 20,
        "cached_tokens": 16,
        "completion_tokens": 3,
        "cost_nanos": 999,
    }
    return part_file.success_row(**(values | changes))


@st.composite
def part_lines(draw: st.DrawFn) -> PartLine:
    line_no = draw(st.integers(1, 2**40))
    if draw(st.booleans()):
        row = success(line_no=line_no, custom_id=draw(TEXT), text=draw(TEXT | st.just(',"row":{}')))
    else:
        row = part_file.error_row(batch_id="b", line_no=line_no, custom_id=None, code="c", message=draw(TEXT))
    return PartLine(
        line_no=line_no,
        is_ok=draw(st.booleans()),
        input_tokens=draw(COUNT),
        cached_tokens=draw(COUNT),
        output_tokens=draw(COUNT),
        cost_nanos=draw(COUNT),
        standard_nanos=draw(COUNT),
        row=row,
    )


@settings(max_examples=100, deadline=None)
@given(st.lists(part_lines(), max_size=20))
def test_a_part_gives_back_its_lines(lines: list[PartLine]) -> None:
    data = part_file.encode(lines)
    assert part_file.decode(data) == lines
    rows = part_file.rows(data)
    assert rows.line_nos.tolist() == [line.line_no for line in lines]
    assert rows.is_ok.tolist() == [line.is_ok for line in lines]
    places = zip(rows.starts.tolist(), rows.ends.tolist(), strict=True)
    assert [rows.text[start:end] for start, end in places] == [line.row for line in lines]


@given(TEXT, TEXT)
def test_output_lines_survive_any_reader_and_keep_the_text(custom_id: str, text: str) -> None:
    row = success(custom_id=custom_id, text=text).decode()
    assert len(row.splitlines()) == 1
    value = json.loads(row)
    assert value["custom_id"] == custom_id
    assert value["response"]["body"]["choices"][0]["message"]["content"] == text


def test_line_ends_of_unicode_are_escaped() -> None:
    row = success(text="a\u2028b\u2029c\u0085d\u00e5")
    assert b"a\\u2028b\\u2029c\\u0085d\xc3\xa5" in row


def test_a_success_row_is_openais_and_carries_the_cost() -> None:
    value = json.loads(success())
    assert value["error"] is None
    assert value["line"] == 7
    assert value["id"].startswith("batch_req_")
    assert value["response"]["status_code"] == 200
    assert value["response"]["request_id"].startswith("req_")
    body = value["response"]["body"]
    assert body["object"] == "chat.completion"
    assert body["usage"] == {
        "prompt_tokens": 20,
        "completion_tokens": 3,
        "total_tokens": 23,
        "prompt_tokens_details": {"cached_tokens": 16},
        "completion_tokens_details": {"reasoning_tokens": 0},
        "cost_nanos": 999,
    }


def test_a_line_that_never_ran_has_no_response() -> None:
    row = part_file.error_row(batch_id="b", line_no=2, custom_id="x", code="batch_expired", message="Too late.")
    value = json.loads(row)
    assert value["response"] is None
    assert value["error"] == {"code": "batch_expired", "message": "Too late."}


def test_a_rejected_line_has_a_response_with_the_error_and_none_on_top() -> None:
    row = part_file.error_row(
        batch_id="b", line_no=2, custom_id=None, code="invalid_value", message="No.", param="body.n", status=400
    )
    value = json.loads(row)
    assert value["error"] is None
    assert value["custom_id"] is None
    assert value["response"]["status_code"] == 400
    assert value["response"]["body"]["error"] == {
        "message": "No.",
        "type": "invalid_request_error",
        "param": "body.n",
        "code": "invalid_value",
    }


def test_a_rerun_gives_the_same_bytes_and_other_lines_other_ids() -> None:
    assert success() == success()
    ids = {json.loads(success(batch_id=batch, line_no=line))["id"] for batch in "ab" for line in range(50)}
    assert len(ids) == 100
