"""Files made to blow up: each is refused with the line or the reason, in little memory and little time.

The limit of 10 s counts what the decoder computes, so that a busy machine doesn't fail the test.
"""

from __future__ import annotations

import gzip
import io
import json
import struct
import subprocess
import sys
import zlib
from collections.abc import Callable
from dataclasses import replace

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from batchsvc.files.lines import MAX_DEPTH, jsonl_records
from tests.batchsvc.files.decoding import LIMITS, MOST_BYTES, bomb, code_of, decode, decode_table, refusal

MEGABYTE = b"\0" * (1 << 20)


def gzip_of(piece: bytes, times: int) -> bytes:
    packer = zlib.compressobj(9, wbits=31)
    return b"".join(packer.compress(piece) for _ in range(times)) + packer.flush()


def zstd_of(piece: bytes, times: int) -> bytes:
    packer = zstandard.ZstdCompressor().compressobj()
    return b"".join(packer.compress(piece) for _ in range(times)) + packer.flush()


def parquet(table: pa.Table, **options: object) -> bytes:
    sink = io.BytesIO()
    pq.write_table(table, sink, **options)
    return sink.getvalue()


@pytest.mark.parametrize("pack", [gzip_of, zstd_of])
@pytest.mark.parametrize(
    ("piece", "says"),
    [
        (MEGABYTE, "more than 67108864"),
        (b"{}\n" * 350_000, "The file has more than 4000000 lines."),
        ((b"x" * 999 + b"\n") * 1000, "decodes to more than 67108864"),
    ],
    ids=["zeros", "lines", "long lines"],
)
def test_compressed_bytes_that_grow_without_end(pack: Callable[[bytes, int], bytes], piece: bytes, says: str) -> None:
    data = pack(piece, 80)
    assert len(data) < 300_000
    for reader in (lambda data: decode(data, replace(LIMITS, max_rows=1_000_000)), decode_table):
        problem = bomb(data, reader)
        assert problem.code in ("invalid_file", "invalid_json_line", "too_many_tasks")
        assert says in problem.message or reader is decode_table


def test_a_zstd_frame_that_asks_for_a_window_of_gigabytes() -> None:
    huge = b"\x28\xb5\x2f\xfd" + b"\x00" + bytes([(41 - 10) << 3]) + b"\x01\x00\x00"  # 2 TiB, an empty last block
    assert "zstd data can't be unpacked" in bomb(huge).message


def test_packed_twice_is_refused() -> None:
    assert "compressed twice" in refusal(gzip.compress(zstandard.compress(b"{}\n"))).message


def test_a_parquet_file_whose_one_value_stands_for_terabytes() -> None:
    values = pa.DictionaryArray.from_arrays(pa.array([0] * 2000, pa.int32()), pa.array(["x" * 1_000_000]))
    table = pa.table({"custom_id": ["a"] * 2000, "body": values})
    for reader in (decode, decode_table):
        assert bomb(parquet(table), reader).code == "invalid_file"


def test_a_page_that_claims_gigabytes() -> None:
    """The uncompressed size in a page header, and everything else that is a small number, as large as can be."""
    data = parquet(pa.table({"custom_id": ["a"] * 50, "body": ["{}"] * 50}), compression="zstd")
    hostile = [data[:at] + b"\xff\xff\xff\xff\x0f" + data[at + 5 :] for at in range(4, 12)]  # a varint of 4 GiB
    found = [code_of(one) for one in hostile]
    assert "invalid_file" in found
    assert set(found) <= {"invalid_file", None}


def test_a_parquet_file_of_nothing_but_rows() -> None:
    nothing = pa.nulls(5_000_000, pa.string())
    data = parquet(pa.table({"custom_id": nothing, "body": nothing}))
    assert len(data) < 30_000
    problem = bomb(data, lambda data: decode(data, replace(LIMITS, max_rows=1_000)))
    assert (problem.code, problem.message) == ("too_many_tasks", "The file has more than 1000 requests.")


@pytest.mark.parametrize(
    "footer",
    [
        struct.pack("<I", 0),
        struct.pack("<I", 0xFFFFFFFF),
        struct.pack("<I", 0x7FFFFFF0),
        b"\x19\xfc\xff\xff\xff\x7f" * 50 + struct.pack("<I", 300),  # lists of 2^28 items
        b"\x1c" * 100_000 + struct.pack("<I", 100_000),  # structs in structs
    ],
    ids=["none", "all", "most", "lists", "deep"],
)
def test_hostile_footers(footer: bytes) -> None:
    for reader in (decode, decode_table):
        problem = bomb(b"PAR1" + footer + b"PAR1", reader)
        assert problem.code == "invalid_file"


def test_a_value_of_hundreds_of_megabytes_in_a_small_file() -> None:
    """One page of one row: it can't be given out in smaller pieces, so it has to be refused before it is there."""
    data = parquet(pa.table({"custom_id": ["a"], "body": ["x" * 160_000_000]}), compression="zstd")
    assert len(data) < 100_000
    assert bomb(data, decode).code == "invalid_file"


def test_a_parquet_file_of_nothing_but_columns() -> None:
    columns = [pa.array([1], pa.int8())] * 20_000
    data = parquet(pa.Table.from_arrays(columns, [f"c{number}" for number in range(20_000)]), compression="none")
    for reader in (decode, decode_table):
        assert "more than 10000 columns" in bomb(data, reader).message


READER = r"""
import re, resource, sys
from pathlib import Path

import orjson

from batchsvc.files.envelope import EnvelopeCheck, SeenIds
from batchsvc.files.lines import jsonl_records

resource.setrlimit(resource.RLIMIT_CPU, (10, 10))
pieces = iter(lambda: sys.stdin.buffer.read(1 << 20), b"")
check = EnvelopeCheck(endpoint="/", resolve=lambda _: None, seen=SeenIds())
found = {}
for record in check.check_all(jsonl_records(pieces, max_line_bytes=1 << 20)):
    found.setdefault(record.problems[0].code, []).append(record.line_no)
peak = int(re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())[1]) * 1024
print(orjson.dumps([found, peak]).decode())
"""


@pytest.mark.parametrize(
    ("lines", "code"),
    [
        ([b'{"custom_id": "' + b"x" * 60_000_000 + b'"}'], "line_too_long"),
        ([b"x" * 60_000_000], "line_too_long"),
        ([b'{"' + b"k" * 10_000_000 + b'": 1}'] * 5, "line_too_long"),
        ([b'{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}"] * 50, "invalid_json_line"),
        ([b'{"a":' * 100_000 + b"1" + b"}" * 100_000] * 20, "invalid_json_line"),
        ([b"[" * 1_000_000] * 10, "invalid_json_line"),
        ([b'{"a":[' + b"1e400," * 160_000 + b"1]}"], "missing_required_parameter"),
        ([b'{"a":[' + b"{}," * 300_000 + b"{}]}"], "missing_required_parameter"),
        ([b'{"a":1e400,"b":' + b'"\\' * 500_000] * 10, "invalid_json_line"),
    ],
    ids=["60 MB", "60 MB without an end", "10 MB keys", "arrays", "objects", "open", "numbers", "braces", "quotes"],
)
def test_plain_lines_that_are_hard_to_read(lines: list[bytes], code: str) -> None:
    """Plain JSONL is read by the planner itself, line by line: here in a process of its own, with its limits."""
    command = [sys.executable, "-P", "-c", READER]
    ran = subprocess.run(command, input=b"\n".join([*lines, b"{}"]), capture_output=True, timeout=120, check=False)
    assert ran.returncode == 0, ran.stderr.decode()[-1000:]
    found, peak = json.loads(ran.stdout)
    numbers = list(range(1, len(lines) + 1))
    assert found.pop(code)[: len(lines)] == numbers
    assert found in ({}, {"missing_required_parameter": [len(lines) + 1]}), "the line behind is read"
    assert peak < MOST_BYTES


def test_a_line_of_60_megabytes_costs_that_line() -> None:
    long = b'{"custom_id": "' + b"x" * 60_000_000 + b'"}\n'
    decoded = decode(gzip.compress(b'{"a": 1}\n' + long + b'{"b": 2}\n', 1))
    records = list(jsonl_records([decoded.data], max_line_bytes=1 << 20))
    assert [record.problem and record.problem.code for record in records] == [None, "line_too_long", None]
    assert records[1].line_no == 2
    problem = bomb(long * 2, decode_table)
    assert problem.line == 1
    assert "has 60000017 bytes" in problem.message


def test_a_quote_of_60_megabytes_ends_a_csv_file_at_its_line() -> None:
    for field in (b'"' + b"x" * 60_000_000, b'"' + b"x\n" * 3_000_000):
        problem = bomb(b"custom_id,body\na,{}\n" + field)
        assert problem.code == "invalid_file"
        assert problem.line is not None and problem.line >= 3


def test_json_that_is_100_000_levels_deep() -> None:
    deep = b'{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}"
    (record,) = jsonl_records([decode(gzip.compress(deep)).data], max_line_bytes=1 << 20)
    assert record.problem is not None and record.problem.code == "invalid_json_line"
    assert bomb(deep, decode_table).line == 1
    barely = b'{"a":' + b"[" * (MAX_DEPTH + 1) + b"]" * (MAX_DEPTH + 1) + b"}"
    assert "levels deep" in bomb(barely, decode_table).message


def test_a_million_columns() -> None:
    header = ",".join(f"c{number}" for number in range(100_000)).encode()
    assert "more than 10000 columns" in bomb(header + b"\n", decode_table).message
    keys = b"".join(b'{"k%d": 1}\n' % number for number in range(20_000))
    assert "more than 10000 different keys" in bomb(keys, decode_table).message


def test_what_ends_early_or_is_damaged_is_refused() -> None:
    rows = b"".join(b'{"custom_id": "%d"}\n' % number for number in range(5000))
    for packed, name in ((gzip.compress(rows), "gzip"), (zstandard.compress(rows), "zstd")):
        assert f"The {name} data ends early" in refusal(packed[:-1]).message
        assert f"The {name} data ends early" in refusal(packed + packed[:20]).message
        middle = len(packed) // 2
        damaged = packed[:middle] + bytes(64) + packed[middle + 64 :]
        assert f"The {name} data can't be unpacked" in refusal(damaged).message


@settings(max_examples=8, deadline=None)
@given(st.integers(0, 10_000), st.integers(1, 255), st.integers(0, 300), st.booleans())
def test_a_damaged_parquet_file_is_decoded_or_refused(at: int, flip: int, cut: int, is_table: bool) -> None:
    data = bytearray(parquet(pa.table({"custom_id": ["a", "b", "c"], "body": [json.dumps({"model": "m"})] * 3})))
    data[at % len(data)] ^= flip
    assert code_of(bytes(data[: len(data) - cut]), decode_table if is_table else decode) in ("invalid_file", None)
