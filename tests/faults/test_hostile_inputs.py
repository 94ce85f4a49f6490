"""Rows 68 and 69: inputs that are made to break readers, through the API and a planner of its own process."""

from __future__ import annotations

import gzip
import io
import json
import re
import struct
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard

from tests.faults.cluster import Cluster, Process
from tests.faults.judge import Verdict

pytestmark = pytest.mark.faults
Judge = Callable[..., Verdict]
both_databases = pytest.mark.parametrize("database_url", ["sqlite", "postgresql"], indirect=True)
MOST_BYTES = 256 << 20
MOST_CPU_S = 10.0


def good(number: int) -> bytes:
    messages = [{"role": "user", "content": f"say {number}"}]
    body = {"model": "tiny", "messages": messages, "max_tokens": 2, "temperature": 0, "seed": number}
    line = {"custom_id": f"c{number}", "method": "POST", "url": "/v1/chat/completions", "body": body}
    return json.dumps(line).encode()


def upload(cluster: Cluster, data: bytes, name: str = "in.jsonl") -> str:
    answer = cluster.call("POST", "/v1/files", files={"file": (name, data)}, data={"purpose": "batch"})
    assert answer.status_code == 200, answer.text
    return str(answer.json()["id"])


def ended(cluster: Cluster, file_id: str, **body: Any) -> dict[str, Any]:
    """A batch of this file, once it has ended."""
    answer = cluster.create(file_id, **body)
    assert answer.status_code == 200, answer.text
    batch_id = str(answer.json()["id"])
    cluster.until(lambda: cluster.batch(batch_id).ended_ms, "it has ended")
    return cluster.get(batch_id)


def problems(batch: dict[str, Any]) -> list[tuple[int | None, str]]:
    assert batch["status"] == "failed", batch
    return [(problem["line"], problem["code"]) for problem in batch["errors"]["data"]]


ODD = {
    "BOM, CRLF, no last newline": (b"\xef\xbb\xbf" + good(1) + b"\r\n\r\n" + good(2), []),
    "NaN": (good(1) + b"\n" + good(2).replace(b'"seed": 2', b'"seed": NaN'), [(2, "invalid_json_line")]),
    "deep": (good(1) + b'\n{"custom_id":' + b"[" * 100_000 + b"]" * 100_000 + b"}\n", [(2, "invalid_json_line")]),
    "surrogate in an id": (
        good(1) + b"\n" + good(2).replace(b'"c2"', b'"\\ud800"'),
        [(2, "invalid_value")],
    ),
    "NUL in an id": (good(1) + b"\n" + good(2).replace(b'"c2"', b'"\\u0000"'), [(2, "invalid_value")]),
    "the same id twice": (good(1) + b"\n\n" + good(1) + b"\n", [(3, "duplicate_custom_id")]),
    "blank lines only": (b"\n \n\t\n", [(None, "empty_file")]),
    "giant": (good(1) + b"\n" + b'{"custom_id": "' + b"x" * 60_000_000 + b'"}\n', [(2, "line_too_long")]),
}


@both_databases
def test_row_68_odd_files_are_read_or_refused_by_line(cluster: Cluster) -> None:
    """The same on both databases; the planner lives on, and nobody sees a traceback."""
    control = cluster.start("control")
    cluster.start("engine")
    for name, (data, found) in ODD.items():
        batch = ended(cluster, upload(cluster, data))
        if not found:
            assert (batch["status"], batch["request_counts"]["completed"]) == ("completed", 2), name
        else:
            assert problems(batch) == found, f"{name}: {batch['errors']}"
    empty = cluster.call("POST", "/v1/files", files={"file": ("in.jsonl", b"")}, data={"purpose": "batch"})
    assert problems(ended(cluster, empty.json()["id"])) == [(None, "empty_file")]
    assert control.is_alive and "Traceback" not in control.text()


@both_databases
def test_row_68_a_bad_line_costs_itself_where_it_may(cluster: Cluster) -> None:
    cluster.start("control")
    cluster.start("engine")
    bad = [
        data.split(b"\n")[1] for name, (data, found) in ODD.items() if found and found[0][0] == 2 and name != "giant"
    ]
    data = b"\n".join([good(1), *bad, good(2)])
    batch = ended(cluster, upload(cluster, data), on_invalid="skip")
    counts = batch["request_counts"]
    assert (batch["status"], counts["completed"], counts["failed"]) == ("completed", 2, len(bad))
    lines = cluster.call("GET", f"/v1/files/{batch['error_file_id']}/content").content.splitlines()
    assert [json.loads(line)["line"] for line in lines] == list(range(2, 2 + len(bad)))


@pytest.mark.slow
def test_row_68_ten_million_tiny_lines(cluster: Cluster) -> None:
    """Refused by their number, in memory that doesn't grow with the file."""
    control = cluster.start("control", BATCHSVC_MAX_LINES=100_000)
    file_id = upload(cluster, b"{}\n" * 10_000_000)
    base = memory_of(control)
    batch = ended(cluster, file_id, on_invalid="skip")
    assert (None, "too_many_tasks") in problems(batch)
    assert memory_of(control) - base < MOST_BYTES


def memory_of(process: Process) -> int:
    """The most memory that the process itself has had."""
    found = re.search(r"VmHWM:\s+(\d+) kB", Path(f"/proc/{process.pid}/status").read_text())
    assert found, "the kernel tells it"
    return int(found[1]) * 1024


def parquet(table: pa.Table) -> bytes:
    sink = io.BytesIO()
    pq.write_table(table, sink)
    return sink.getvalue()


def bombs() -> Iterator[tuple[str, bytes]]:
    zeros = b"\0" * (1 << 20)
    packer = zlib.compressobj(9, wbits=31)
    yield "gzip", b"".join(packer.compress(zeros) for _ in range(2_000)) + packer.flush()
    frame = zstandard.ZstdCompressor().compressobj()
    yield "zstd", b"".join(frame.compress(zeros) for _ in range(2_000)) + frame.flush()
    yield "packed twice", gzip.compress(gzip.compress(good(1)))
    values = pa.DictionaryArray.from_arrays(pa.array([0] * 2_000, pa.int32()), pa.array(["x" * 1_000_000]))
    yield "one value for all rows", parquet(pa.table({"custom_id": ["a"] * 2_000, "body": values}))
    yield "window of 2 TiB", b"\x28\xb5\x2f\xfd\x00" + bytes([(41 - 10) << 3]) + b"\x01\x00\x00"
    yield "hostile footer", b"PAR1" + b"\x1c" * 100_000 + struct.pack("<I", 100_000) + b"PAR1"


@both_databases
def test_row_69_bombs_are_refused_in_little_memory(cluster: Cluster) -> None:
    """What the planner and the decoder that it starts take; the time is what they compute."""
    control = cluster.start("control")
    batch = ended(cluster, upload(cluster, b"x"))  # so that what is loaded once is loaded
    base = memory_of(control)
    seen = Children(control.pid)
    for name, data in bombs():
        before = seen.cpu_s()
        batch = ended(cluster, upload(cluster, data))
        refusals = {"invalid_file", "invalid_json_line", "too_many_tasks"}
        assert {code for _, code in problems(batch)} <= refusals, name
        assert seen.cpu_s() - before < MOST_CPU_S, name
        assert seen.most_bytes < MOST_BYTES, name
    assert memory_of(control) - base < MOST_BYTES
    assert control.is_alive and "Traceback" not in control.text()
    fine = ended(cluster, upload(cluster, b"not JSON"))
    assert problems(fine) == [(1, "invalid_json_line")], "the next one is planned as ever"


class Children:
    """What a process and those that it starts take, watched by a thread."""

    def __init__(self, pid: int) -> None:
        self.most_bytes = 0
        self._process = psutil.Process(pid)
        threading.Thread(target=self._run, daemon=True).start()

    def cpu_s(self) -> float:
        """What was computed so far, by children that have ended, too."""
        times = self._process.cpu_times()
        return float(times.user + times.system + times.children_user + times.children_system)

    def _run(self) -> None:
        while True:
            try:
                for child in self._process.children(recursive=True):
                    self.most_bytes = max(self.most_bytes, child.memory_info().rss)
            except psutil.Error:
                if not self._process.is_running():
                    return
            time.sleep(0.005)
