"""Uploads in other formats are planned like their lines: decoded once, found again, and gone with their file."""

from __future__ import annotations

import csv
import gzip
import io
import json
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard

from batchsvc.batches import garbage_queries
from batchsvc.batches.planning import PlanProgress
from batchsvc.batches.tables import Window
from batchsvc.files import service as files
from batchsvc.files.lines import UnreadableFileError
from batchsvc.files.plain import limits_of, plain_file
from batchsvc.files.tables import File
from batchsvc.store import keys
from batchsvc.store.s3 import MIN_PART_BYTES
from tests.batchsvc.batches.planned import Planned, jsonl, line
from tests.batchsvc.files.decoding import LIMITS

LINES = [line(f"00{number}", f"text {number}") for number in range(7)]
on_sqlite = pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
pytestmark = on_sqlite


def in_csv(lines: list[dict[str, Any]]) -> bytes:
    sink = io.StringIO(newline="")
    rows = [[item["custom_id"], "more", json.dumps(item["body"])] for item in lines]
    csv.writer(sink).writerows([["custom_id", "note", "body"], *rows])
    return sink.getvalue().encode()


def in_parquet(lines: list[dict[str, Any]]) -> bytes:
    table = {"custom_id": [one["custom_id"] for one in lines], "body": [json.dumps(one["body"]) for one in lines]}
    sink = io.BytesIO()
    pq.write_table(pa.table(table), sink)
    return sink.getvalue()


def test_every_format_is_planned_like_jsonl(planned: Planned) -> None:
    small = planned.with_settings(window_lines=3)
    plain = small.run(jsonl(*LINES))
    for data in (
        gzip.compress(jsonl(*LINES)),
        zstandard.compress(jsonl(*LINES)),
        in_csv(LINES),
        gzip.compress(in_csv(LINES)),
        zstandard.compress(in_parquet(LINES)),
    ):
        batch = small.run(data)
        assert batch.status == "in_progress", batch.errors
        assert small.lines(batch.id) == small.lines(plain.id)
        assert [window.num_lines for window in small.rows(Window, batch.id)] == [3, 3, 1]


def test_problems_name_their_rows(planned: Planned) -> None:
    rows = b'custom_id,body\na,"{}"\nshort\nb,{\nc,[]\n'
    refused = planned.run(rows)
    assert refused.status == "failed"
    assert [(error["line"], error["code"]) for error in refused.errors or []] == [
        (1, "missing_required_parameter"),
        (2, "invalid_csv_row"),
        (3, "invalid_json_line"),
        (4, "expected_object"),
    ]
    skipped = planned.run(
        rows + b'd,"' + json.dumps(LINES[0]["body"]).replace('"', '""').encode() + b'"\n', on_invalid="skip"
    )
    assert list(planned.lines(skipped.id)) == [5]
    assert sorted(planned.rejected(skipped.id)) == [1, 2, 3, 4]


def test_a_file_that_can_not_be_decoded_fails_its_batch_with_the_reason(planned: Planned) -> None:
    for data in (gzip.compress(jsonl(*LINES))[:-1], gzip.compress(b"\0" * (65 << 20)), b"PAR1xxxxPAR1"):
        batch = planned.run(data, on_invalid="skip")
        assert batch.status == "failed"
        assert [(error["code"], error["line"]) for error in batch.errors or []] == [("invalid_file", None)]
        with planned.db.reading() as session:
            file = session.get_one(File, batch.input_file_id)
        assert planned.store.head(keys.plain_input(file.s3_key)) is None
    empty = planned.run(gzip.compress(b"\n\n"))
    assert [error["code"] for error in empty.errors or []] == ["empty_file"]


def test_the_number_of_rows_is_limited_exactly(planned: Planned) -> None:
    for most, status in ((7, "in_progress"), (6, "failed")):
        batch = planned.with_settings(max_lines=most).run(in_parquet(LINES))
        assert batch.status == status
    assert [(error["code"], error["param"]) for error in batch.errors or []] == [("too_many_tasks", "input_file_id")]


def test_the_plain_form_is_made_once_for_its_version(planned: Planned) -> None:
    store, key = planned.store, "in/p/file-x"
    data = gzip.compress(jsonl(*LINES))
    etag = store.put(key, data)
    limits = limits_of(planned.context.settings)
    asked = []

    def plain(size: int, version: str) -> Any:
        asked.clear()
        return plain_file(store, key, version, size, limits, lambda: asked.append(1))

    first = plain(len(data), etag)
    assert store.get(first.s3_key) == jsonl(*LINES)
    made = len(asked)
    assert plain(len(data), etag) == first
    assert len(asked) < made, "found, not made again"


def test_a_long_file_is_stored_in_parts_and_a_broken_one_leaves_nothing(planned: Planned) -> None:
    store, limits = planned.store, limits_of(planned.context.settings)
    lines = b"".join(b'{"custom_id": "%d", "x": "%s"}\n' % (number, b"y" * 1000) for number in range(20_000))
    assert len(lines) > 2 * MIN_PART_BYTES
    data = zstandard.compress(lines)
    etag = store.put("in/p/file-a", data)
    plain = plain_file(store, "in/p/file-a", etag, len(data), limits, lambda: None)
    assert store.get(plain.s3_key) == lines
    etag = store.put("in/p/file-b", data[:-1])
    with pytest.raises(UnreadableFileError):
        plain_file(store, "in/p/file-b", etag, len(data) - 1, limits, lambda: None)
    assert store.head(keys.plain_input("in/p/file-b")) is None
    assert not list(store.list_uploads("in/"))


def test_a_planner_that_loses_its_lease_while_decoding_leaves_nothing(planned: Planned) -> None:
    store, data = planned.store, zstandard.compress(b"{}\n" * 100_000)
    etag = store.put("in/p/file-a", data)
    calls = []

    def keep() -> None:
        calls.append(1)
        if len(calls) > 2:
            raise InterruptedError

    with pytest.raises(InterruptedError):
        plain_file(store, "in/p/file-a", etag, len(data), LIMITS, keep)
    assert [key for key, _ in store.list_keys("in/")] == ["in/p/file-a"]


def test_the_plain_form_goes_with_its_file(planned: Planned) -> None:
    batch = planned.run(gzip.compress(jsonl(*LINES)))
    with planned.db.reading() as session:
        file = session.get_one(File, batch.input_file_id)
        both = {file.s3_key, keys.plain_input(file.s3_key)}
        assert garbage_queries.referred_to(session, both) == both
    discarded: list[str] = []
    with planned.db.transaction() as session:
        files.delete(
            session,
            batch.project_id,
            file.id,
            live_batch_of=lambda *_: None,
            discard=lambda _, key: discarded.append(key),
        )
        assert set(discarded) == both
        assert garbage_queries.referred_to(session, both) == set()
    assert planned.plan(batch.id) == PlanProgress.DONE
