"""Input 25: files in other formats, damaged or made to break readers; and the files that come out."""

from __future__ import annotations

import decimal
import gzip
import io
import json
import zipfile
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard

from tests.batchsvc.batches.planned import jsonl, line
from tests.batchsvc.batches.test_formats import in_csv, in_parquet
from tests.batchsvc.files.test_bombs import MEGABYTE, gzip_of
from tests.inputs.service import Service

LINES = [line(f"00{number}", f"text {number}", seed=1) for number in range(5)]
BODY = json.dumps(line("x")["body"])


def parquet(**columns: Any) -> bytes:
    return parquet_of(pa.table(columns))


def parquet_of(table: pa.Table) -> bytes:
    sink = io.BytesIO()
    pq.write_table(table, sink)
    return sink.getvalue()


def zipped(data: bytes) -> bytes:
    sink = io.BytesIO()
    with zipfile.ZipFile(sink, "w") as archive:
        archive.writestr("in.jsonl", data)
    return sink.getvalue()


def test_input_25_what_is_in_a_file_is_told_by_its_bytes(running: Service) -> None:
    """Whatever its name says; the answers are those of the plain file."""
    plain = running.run(jsonl(*LINES)).texts
    assert list(plain) == ["000", "001", "002", "003", "004"]
    packed = {
        "in.jsonl": gzip.compress(jsonl(*LINES)),
        "in.gz": zstandard.compress(jsonl(*LINES)),
        "in.csv": in_parquet(LINES),
        "in.parquet": in_csv(LINES),
        "in.zst": gzip.compress(in_csv(LINES)) + gzip.compress(b""),
    }
    for name, data in packed.items():
        batch_id = running.client.post(
            "/v1/batches",
            json={
                "input_file_id": running.upload(data, name),
                "endpoint": "/v1/chat/completions",
                "completion_window": "24h",
            },
        ).json()["id"]
        running.planned.plan(batch_id)
        assert running.finish(batch_id).texts == plain, name


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (gzip.compress(zstandard.compress(jsonl(*LINES))), "compressed twice"),
        (gzip_of(MEGABYTE, 70), "more than"),
        (gzip.compress(jsonl(*LINES))[:-9], "ends early"),
        (zipped(jsonl(*LINES)), "zip archive"),
        (jsonl(*LINES).decode().encode("utf-16"), "UTF-16"),
        (b"PAR1" + b"\x15" * 40 + b"PAR1", "Parquet"),
    ],
    ids=["zstd in gzip", "bomb", "cut", "zip", "utf-16", "no parquet"],
)
def test_input_25_files_that_can_not_be_read(service: Service, data: bytes, says: str) -> None:
    """Each is refused with the reason, one layer of packing is opened, and what grows too much is not."""
    batch = service.shown(service.start(data, on_invalid="skip"))
    (problem,) = batch["errors"]["data"]
    assert (batch["status"], problem["code"]) == ("failed", "invalid_file"), problem
    assert says in problem["message"]


def test_input_25_parquet_that_is_odd(running: Service) -> None:
    """Nulls cost their row; other types, and two columns of one name, are refused by name."""
    nulls = parquet(custom_id=["a", None, "c", ""], body=[BODY, BODY, None, BODY], note=[None] * 4)
    ended = running.run(nulls, on_invalid="skip")
    assert list(ended.texts) == ["a"]
    assert ended.codes == {2: "missing_required_parameter", 3: "missing_required_parameter", 4: "invalid_value"}
    nested = pa.array([{"model": "tiny"}], pa.struct([("model", pa.string())]))
    twice = pa.Table.from_arrays([pa.array(["a"]), pa.array([BODY]), pa.array(["b"])], ["custom_id", "body", "body"])
    for data, says in (
        (parquet(custom_id=["a"], body=nested), "body"),
        (parquet(custom_id=[decimal.Decimal("7.00")], body=[BODY]), "custom_id"),
        (parquet_of(twice), "twice"),
    ):
        (problem,) = running.shown(running.start(data))["errors"]["data"]
        assert problem["code"] == "invalid_file" and says in problem["message"], problem
    more = parquet(custom_id=pa.array(["007", "007a"]).dictionary_encode(), body=[BODY] * 2, n=nested.take([0, 0]))
    assert list(running.run(more).texts) == ["007", "007a"], "columns that nobody asked for do no harm"


def test_input_25_csv_that_is_odd(running: Service) -> None:
    """Line ends inside quotes belong to the value, ids stay text, and what would be a formula is text, too."""
    ids = [
        "007",
        "1.0",
        "1e5",
        "TRUE",
        "=1+1",
        "@SUM(A1)",
        "-2",
        "+3",
        "2024-01-01",
        "two\nlines\r\n",
        'say "x"',
        "a,b",
    ]
    ended = running.run(in_csv([line(custom_id, 'one\ntwo, "three"\r\n') for custom_id in ids]))
    assert [row["custom_id"] for row in ended.output.values()] == ids
    assert list(ended.output) == list(range(1, len(ids) + 1)), "a row is a row, however many lines it takes"
    head = in_csv([line("a")])
    for data, code in (
        (head + b"b\n", "invalid_csv_row"),
        (head + b'b,x,"{""model"": }"\n', "invalid_json_line"),
    ):
        assert running.run(data, on_invalid="skip").codes == {2: code}
    (problem,) = running.shown(running.start(head + b'b,x,"{'))["errors"]["data"]
    assert problem["code"] == "invalid_file"


def test_input_25_files_that_come_out(running: Service) -> None:
    """No file without lines; ranges are honoured; an input that is read can't be deleted."""
    fine = running.run(jsonl(*LINES)).batch
    assert fine["error_file_id"] is None and fine["output_file_id"] is not None
    whole = running.content(fine["output_file_id"])
    path = f"/v1/files/{fine['output_file_id']}/content"
    for asked, want in (("0-9", whole[:10]), ("10-", whole[10:]), ("-5", whole[-5:]), ("0-0", whole[:1])):
        answer = running.client.get(path, headers={"Range": f"bytes={asked}"})
        assert (answer.status_code, answer.content) == (206, want)
    beyond = running.client.get(path, headers={"Range": f"bytes={len(whole)}-"})
    assert beyond.status_code == 416
    assert beyond.headers["content-range"] == f"bytes */{len(whole)}"

    batch_id = running.create(jsonl(*LINES))
    file_id = running.shown(batch_id)["input_file_id"]
    refused = running.client.delete(f"/v1/files/{file_id}")
    assert (refused.status_code, refused.json()["error"]["code"]) == (400, "file_in_use")
    running.planned.plan(batch_id)
    running.finish(batch_id)
    assert running.client.delete(f"/v1/files/{file_id}").status_code == 200
    assert running.client.get(path).content == whole
