"""Parquet rows become the same records as JSONL lines; a file that can't be used is one clear problem."""

from __future__ import annotations

import io
import json
from contextlib import suppress
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batchsvc.files.lines import Record, UnreadableFileError
from batchsvc.files.parquet import batch_lines
from batchsvc.files.rows import row_records
from batchsvc.files.unpack import DecodeLimits, Meter

BODY = json.dumps({"model": "m"})


def parquet(columns: Any, **options: Any) -> bytes:
    sink = io.BytesIO()
    table = columns if isinstance(columns, pa.Table) else pa.table(columns)
    pq.write_table(table, sink, **options)
    return sink.getvalue()


def read(data: bytes, *, max_line_bytes: int = 10_000, max_decoded_bytes: int = 10**9) -> list[Record]:
    limits = DecodeLimits(max_line_bytes=max_line_bytes, max_decoded_bytes=max_decoded_bytes, max_expansion=10**6)
    lines = batch_lines(io.BytesIO(data), max_line_bytes=max_line_bytes, meter=Meter(limits, len(data)))
    return list(row_records(lines, endpoint="/v1/x", max_line_bytes=max_line_bytes))


def refusal(data: bytes, **options: Any) -> str:
    with pytest.raises(UnreadableFileError) as refused:
        read(data, **options)
    assert refused.value.problem.code == "invalid_file"
    assert refused.value.problem.line is None
    return refused.value.problem.message


@pytest.mark.parametrize("kind", [pa.string(), pa.large_string(), pa.dictionary(pa.int32(), pa.string())])
def test_rows_become_records_with_row_numbers(kind: pa.DataType) -> None:
    data = parquet({"custom_id": pa.array(["007", "b"]).cast(kind), "body": [BODY, BODY], "more": [1, 2]})
    assert read(data) == [
        Record(
            line_no=number,
            next_offset=offset,
            value={"method": "POST", "url": "/v1/x", "custom_id": custom_id, "body": {"model": "m"}},
        )
        for number, custom_id, offset in ((1, "007", 48), (2, "b", 94))
    ]


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 90), st.integers(1, 40))
def test_every_row_is_read_once_whatever_the_row_groups(num_rows: int, group_rows: int) -> None:
    file = parquet(
        {
            "custom_id": pa.array([str(i) for i in range(num_rows)], pa.string()),
            "body": pa.array([BODY] * num_rows, pa.string()),
        },
        row_group_size=group_rows,
    )
    records = read(file)
    assert [record.line_no for record in records] == list(range(1, num_rows + 1))
    assert [record.value["custom_id"] for record in records] == [str(i) for i in range(num_rows)]


def test_nulls_and_bad_bodies_are_problems_of_their_row() -> None:
    data = parquet({"custom_id": pa.array([None, "b", "c", "d"]), "body": [BODY, None, "{", "[1]"]})
    records = read(data)
    assert "custom_id" not in records[0].value
    assert "body" not in records[1].value
    assert [record.problem and record.problem.code for record in records[2:]] == [
        "invalid_json_line",
        "expected_object",
    ]
    assert records[2].problem is not None and records[2].problem.param == "body"


def test_a_row_over_the_limit_is_a_problem_of_that_row() -> None:
    data = parquet({"custom_id": ["a", "b"], "body": [json.dumps({"x": "y" * 10_000}), BODY]})
    first, second = read(data)
    assert first.problem is not None and first.problem.code == "line_too_long"
    assert second.problem is None


def test_wrong_columns_are_one_clear_problem() -> None:
    assert "no column body" in refusal(parquet({"custom_id": ["a"]}))
    assert "must be text, not int64" in refusal(parquet({"custom_id": [1], "body": [BODY]}))
    assert "must be text" in refusal(parquet({"custom_id": ["a"], "body": [{"model": "m"}]}))
    twice = pa.Table.from_arrays([pa.array(["a"]), pa.array([BODY]), pa.array([BODY])], ["custom_id", "body", "body"])
    assert "'body' twice" in refusal(parquet(twice))


def test_a_small_file_that_decodes_to_gigabytes_is_refused() -> None:
    same = pa.DictionaryArray.from_arrays(pa.array([0] * 3000, pa.int32()), pa.array(["x" * 1_000_000]))
    data = parquet({"custom_id": pa.array(["a"] * 3000), "body": same})
    assert len(data) < 200_000
    assert "to more than" in refusal(data, max_decoded_bytes=100_000_000)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10_000), st.integers(1, 255), st.integers(0, 400))
def test_a_damaged_file_never_raises_anything_else(at: int, flip: int, cut: int) -> None:
    data = bytearray(parquet({"custom_id": ["a", "b", "c"], "body": [BODY] * 3}))
    data[at % len(data)] ^= flip
    with suppress(UnreadableFileError):
        read(bytes(data[: len(data) - cut] if cut < len(data) else data))
