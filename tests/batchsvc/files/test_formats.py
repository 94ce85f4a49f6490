"""Formats are told by content; what was packed comes back, whatever the pieces; limits count what comes out."""

from __future__ import annotations

import gzip
import io

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from batchsvc.files.formats import Kind, Packing, is_plain, kind_of, packing_of
from batchsvc.files.lines import UnreadableFileError
from batchsvc.files.unpack import FREE_BYTES, DecodeLimits, Meter, unpacked
from tests.batchsvc.files.decoding import LIMITS, decode, decode_table, refusal

SKIPPABLE = b"\x53\x2a\x4d\x18\x03\x00\x00\x00abc"


@pytest.mark.parametrize(
    ("head", "kind"),
    [
        (b'{"custom_id"', Kind.JSONL),
        (b"\xef\xbb\xbf \r\n\t {", Kind.JSONL),
        (b"PAR1", Kind.PARQUET),
        (b"custom_id,body\n", Kind.CSV),
        (b'\xef\xbb\xbf"body";x;"custom_id"\r\n', Kind.CSV),
        (b"nonsense", None),
        (b"[1]", None),
        (b'"custom_id"', None),
        (b"", None),
    ],
)
def test_kinds_are_told_by_content(head: bytes, kind: Kind | None) -> None:
    for otherwise in (Kind.JSONL, Kind.CSV):
        assert kind_of(head, otherwise=otherwise) is (kind or otherwise)
    assert is_plain(head) == (kind in (Kind.JSONL, None))


def test_packings_are_told_by_content() -> None:
    assert packing_of(gzip.compress(b"")) is Packing.GZIP
    assert packing_of(zstandard.compress(b"")) is packing_of(SKIPPABLE) is Packing.ZSTD
    assert packing_of(b"") is packing_of(b"\x1f") is packing_of(b"\x53\x2a") is None


@settings(max_examples=60, deadline=None)
@given(st.lists(st.binary(max_size=3000), min_size=1, max_size=4), st.sampled_from(Packing), st.data())
def test_what_was_packed_comes_back(members: list[bytes], packing: Packing, data: st.DataObject) -> None:
    pack = gzip.compress if packing is Packing.GZIP else zstandard.compress
    packed = b"".join(pack(member) for member in members)
    packed = SKIPPABLE + packed + SKIPPABLE if packing is Packing.ZSTD else packed + b"\0" * 7
    size = data.draw(st.integers(1, len(packed)))
    chunks = [packed[at : at + size] for at in range(0, len(packed), size)]
    assert b"".join(unpacked(chunks, packing, Meter(LIMITS, len(packed)))) == b"".join(members)


@pytest.mark.parametrize("pack", [gzip.compress, zstandard.compress])
def test_many_megabytes_come_back_in_small_pieces(pack: object) -> None:
    assert callable(pack)
    data = b"0123456789abcdef" * (1 << 17)
    packed = pack(data)
    packing = packing_of(packed)
    assert packing is not None
    pieces = list(unpacked([packed], packing, Meter(LIMITS, len(packed))))
    assert b"".join(pieces) == data
    assert max(map(len, pieces)) <= 64 * 1024 * 1024


def test_limits_are_exact() -> None:
    limits = DecodeLimits(max_line_bytes=100, max_decoded_bytes=10 * FREE_BYTES, max_expansion=2)
    for size, most in ((1, FREE_BYTES), (FREE_BYTES, 2 * FREE_BYTES), (9 * FREE_BYTES, 10 * FREE_BYTES)):
        assert limits.most_bytes(size) == most
        meter = Meter(limits, size)
        meter.count(most)
        with pytest.raises(UnreadableFileError):
            meter.count(1)


def test_an_upload_is_lines_or_rows() -> None:
    jsonl = b'{"custom_id": "a"}\n\n{"b": 1}'
    assert decode(gzip.compress(jsonl)).data == jsonl
    assert decode(zstandard.compress(jsonl)).form == "lines"
    sink = io.BytesIO()
    pq.write_table(pa.table({"custom_id": ["007", None], "body": ['{"x": 1}', "{"]}), sink)
    rows = b'{"custom_id":"007","body":"{\\"x\\": 1}"}\n{"custom_id":null,"body":"{"}\n'
    for data in (sink.getvalue(), gzip.compress(sink.getvalue()), zstandard.compress(sink.getvalue())):
        assert (decode(data).form, decode(data).data) == ("rows", rows)
    csv = b'custom_id,body\r\n007,"{""x"": 1}"\r\n\r\nshort\r\n'
    first, second = decode(csv).data.splitlines()
    assert first == rows.splitlines()[0]
    assert b"invalid_csv_row" in second


def test_tables_keep_their_types_and_json_its_values() -> None:
    lines = (
        b'{"id":"007","n":1,"x":1.5,"b":true,"m":[1],"k":1}\n\n{"id":"b","n":2,"x":2,"m":"t","k":"s","big":%d}\n'
        % 10**30
    )
    table = decode_table(gzip.compress(lines))
    assert table.to_pylist() == [
        {"line": 1, "id": "007", "n": 1, "x": 1.5, "b": True, "m": "[1]", "k": "1", "big": None},
        {"line": 3, "id": "b", "n": 2, "x": 2.0, "b": None, "m": '"t"', "k": '"s"', "big": table["big"][1].as_py()},
    ]
    csv = decode_table(b'id;note\n007;\n008;"a\nb"\n')
    assert csv.to_pylist() == [{"line": 1, "id": "007", "note": ""}, {"line": 2, "id": "008", "note": "a\nb"}]


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"PK\x03\x04rest", "export it as CSV"),
        (b"\xff\xfea\x00", "UTF-16"),
        (b"", "empty"),
        (b"a,a\n1,2\n", "the column 'a' twice"),
        (b"a,b\n1\n", "Row 1 of the CSV file"),
        (b'a,b\n1,"x', "can't be read at line 2"),
        (b"a,b\n1,\xff\n", "Line 2 of the CSV file is not UTF-8"),
        (b'{"a": 1}\n[]\n', "Line 2 can't be used"),
        (b'{"a": 1, "a": 2}\n', "twice"),
    ],
)
def test_a_table_that_can_not_be_read_says_where(data: bytes, says: str) -> None:
    assert says in refusal(data, decode_table).message
