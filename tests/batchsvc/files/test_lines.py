"""The line parser: good lines are never lost, bad ones never raise, and the usual traps read as they should."""

from __future__ import annotations

import json
import tracemalloc
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batchsvc.files.lines import MAX_DEPTH, Problem, Record, jsonl_records

LIMIT = 1_000
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.text(st.characters(exclude_categories=["Cs"])),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text('ab:{["\\', max_size=3), inner, max_size=3),
    max_leaves=6,
)
OBJECT = st.dictionaries(st.text("abc", max_size=3), JSON, max_size=3)


def read(data: bytes, cut: int = 7, **options: Any) -> list[Record]:
    chunks = [data[at : at + cut] for at in range(0, len(data), cut)]
    return list(jsonl_records(chunks, **({"max_line_bytes": LIMIT} | options)))


def one(data: bytes) -> Record:
    (record,) = read(data)
    return record


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.tuples(OBJECT | st.binary(max_size=40), st.sampled_from([b"\n", b"\r\n"])), max_size=8),
    st.booleans(),
    st.integers(1, 50),
)
def test_good_lines_are_never_lost_and_bad_ones_never_raise(
    lines: list[tuple[Any, bytes]], has_last_end: bool, cut: int
) -> None:
    data, good, line_no = b"", [], 0
    for content, end in lines:
        line_no += 1
        if isinstance(content, bytes):
            data += content + end
            line_no += content.count(b"\n")
        else:
            text = json.dumps(content, ensure_ascii=False).encode()
            data += text + end
            if len(text) <= LIMIT:
                good.append((line_no, content))
    if not has_last_end and data:
        data = data[:-1]
    records = read(data, cut)
    found = {record.line_no: record for record in records}
    assert len(found) == len(records)
    assert [record.line_no for record in records] == sorted(found)
    for number, content in good:
        assert found[number].problem is None
        assert found[number].value == content
    physical = data.split(b"\n")
    for record in records:
        assert record.next_offset == min(len(data), sum(len(line) + 1 for line in physical[: record.line_no]))


@settings(max_examples=100, deadline=None)
@given(st.binary(max_size=200) | st.text(st.sampled_from('{}[]",:\\ \n\ufeff0eE-1.tnu'), max_size=80).map(str.encode))
def test_no_bytes_raise_and_every_record_is_an_object_or_a_problem(data: bytes) -> None:
    for record in read(data):
        assert isinstance(record.value, dict)
        if record.problem is not None:
            assert record.value == {}
            assert record.problem.line == record.line_no


@settings(max_examples=40, deadline=None)
@given(st.lists(OBJECT, min_size=1, max_size=6), st.data())
def test_reading_resumes_at_any_records_offset(values: list[dict[str, Any]], data: st.DataObject) -> None:
    text = b"\n\n".join(json.dumps(value).encode() for value in values)
    whole = read(text)
    at = data.draw(st.integers(0, len(whole) - 1))
    rest = read(text[whole[at].next_offset :], first_line=whole[at].line_no + 1, offset=whole[at].next_offset)
    assert rest == whole[at + 1 :]


def test_marks_carriage_returns_and_blank_lines() -> None:
    data = b'\xef\xbb\xbf{"a":1}\r\n\r\n \t\n\xef\xbb\xbf{"a":"x\\ry"}\n\xef\xbb\xbf\n{"a":3}'
    assert [(r.line_no, r.value, r.problem) for r in read(data)] == [
        (1, {"a": 1}, None),
        (4, {"a": "x\ry"}, None),
        (6, {"a": 3}, None),
    ]


def test_only_line_feed_ends_a_line() -> None:
    value = {"a": "x\u2028y\u2029z\u0085w"}
    assert one(json.dumps(value, ensure_ascii=False).encode() + b"\n").value == value
    assert one(b'{"a":"x\x0by"}\n').problem is not None


@pytest.mark.parametrize(
    ("line", "code"),
    [
        (b"{", "invalid_json_line"),
        (b'{"a":NaN}', "invalid_json_line"),
        (b'{"a":Infinity}', "invalid_json_line"),
        (b'{"a":1e400,"b":NaN}', "invalid_json_line"),
        (b'{"a":01e400}', "invalid_json_line"),
        (b'{"a":1e400', "invalid_json_line"),
        (b'{"a":1e400,"a":2}', "invalid_json_line"),
        (b'{"a":"\xff"}', "invalid_json_line"),
        (b'{"a":1} {"b":2}', "invalid_json_line"),
        (b'{"a":1,"a":2}', "invalid_json_line"),
        (b'{"b":[{"\\u0061":1,"a":2}]}', "invalid_json_line"),
        (b"[]", "expected_object"),
        (b'"x"', "expected_object"),
        (b"null", "expected_object"),
        (b"42", "expected_object"),
    ],
)
def test_what_is_no_strict_json_object_is_a_problem(line: bytes, code: str) -> None:
    record = one(line + b"\n")
    assert isinstance(record.problem, Problem)
    assert record.problem.code == code
    assert record.problem.message


@pytest.mark.parametrize(
    ("line", "where"),
    [
        (b'{"a":1e400}', "a"),
        (b'{"a":-1e400,"b":1e400}', "a"),
        (b'{"a":' + b"9" * 900 + b"}", "a"),
        (b'{"x":{"1e400":"\\"1e400"},"b":[{},{"c\xc3\xa9":[1, 1.5E+999]}]}', "b[1].c\xe9[1]"),
        (b'{"a":1e308,"b":1e-400,"c":"1e400"}', None),
        (b'{"a":"\\ud83d\\ude00","b":["x",{"c":"\\udfff\\ud800"}]}', "b[1].c"),
        (b'{"a":"\\\\ud800","b":"\\ud83d\\\\ude00"}', "b"),
        (b'{"a":1e400,"b":"\\ud800"}', "a"),
        (b'{"a":"\\uD800x","b":1e400}', "a"),
        (b'{"a":"\xef\xb7\x90"}', None),
    ],
)
def test_what_no_value_can_hold_is_named_where_it_stands(line: bytes, where: str | None) -> None:
    """It is JSON, so the line is read; whoever reads the field refuses it."""
    record = one(line)
    assert (record.problem, record.flaw and record.flaw.path) == (None, where)
    assert record.value.keys() == json.loads(line).keys()


def test_a_name_with_half_of_a_character_is_named() -> None:
    flaw = one(b'{"a":{"b\\udc00":1}}').flaw
    assert flaw is not None
    assert flaw.path == "a.b\ufffd"
    assert "half" in flaw.message
    assert one(b'{"x\\ud800":1,"x\\ud801":2}').flaw is not None, "they aren't the same name"


def test_a_mark_inside_of_a_file_is_noted() -> None:
    first, second, third = read(b'\xef\xbb\xbf{"a":1}\n\xef\xbb\xbf{"b":2}\n{"c":3}')
    assert (first.note, third.note) == (None, None)
    assert second.note is not None and (second.note.line, second.note.code) == (2, "byte_order_mark")
    (resumed,) = read(b'\xef\xbb\xbf{"b":2}', first_line=2, offset=9)
    assert resumed == Record(line_no=2, next_offset=19, value={"b": 2}, note=second.note)


def test_a_pretty_printed_object_is_one_problem_a_line() -> None:
    records = read(b'{\n "a":\n 1\n}\n')
    assert [record.line_no for record in records if record.problem] == [1, 2, 3, 4]


@pytest.mark.parametrize(("depth", "is_fine"), [(MAX_DEPTH, True), (MAX_DEPTH + 1, False), (400, False)])
def test_nesting_has_a_limit(depth: int, is_fine: bool) -> None:
    record = one(b'{"a":' + b"[" * (depth - 1) + b"]" * (depth - 1) + b"}")
    assert (record.problem is None) == is_fine
    flat = one(b'{"a":"' + b"[" * (depth - 1) + b'"}')
    assert flat.problem is None


@pytest.mark.parametrize("end", [b"", b"\n", b"\r\n"])
def test_the_limit_of_a_line_is_exact_and_the_next_line_is_read(end: bytes) -> None:
    fits = b'{"a":"' + b"x" * (LIMIT - 8) + b'"}'
    assert len(fits) == LIMIT
    assert read(fits + end)[0].problem is None
    assert read(b"\xef\xbb\xbf" + fits + end)[0].problem is None
    too_long = b'{"a":"' + b"x" * (LIMIT - 7) + b'"}'
    for cut in (1, 7, 5000):
        records = read(too_long + b'\n{"b":1}' + end, cut)
        assert records[0].problem is not None
        assert records[0].problem.code == "line_too_long"
        assert str(LIMIT) in records[0].problem.message
        assert records[1].value == {"b": 1}


def test_a_line_of_60_mb_takes_little_memory() -> None:
    def chunks() -> Iterator[bytes]:
        yield b'{"a":"'
        for _ in range(60):
            yield b"x" * 1_000_000
        yield b'"}\n{"b":1}\n'

    tracemalloc.start()
    records = list(jsonl_records(chunks(), max_line_bytes=1_048_576))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert records[0].problem is not None and "60000008 bytes" in records[0].problem.message
    assert records[1].value == {"b": 1}
    assert peak < 8_000_000


KEYS = st.sampled_from(["a", "b", 'a"', "a:", " :"])
PAIRS = st.recursive(
    st.none() | st.integers(0, 9) | st.text('":\\{} a', max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.lists(st.tuples(KEYS, inner), max_size=3).map(tuple),
    max_leaves=8,
)


def written(value: Any, colon: str) -> str:
    """JSON of a value whose objects are tuples of pairs, so that a key may stand twice."""
    if isinstance(value, tuple):
        return "{" + ",".join(json.dumps(key) + colon + written(child, colon) for key, child in value) + "}"
    if isinstance(value, list):
        return "[" + ",".join(written(child, colon) for child in value) + "]"
    return json.dumps(value)


def has_twin(value: Any) -> bool:
    if not isinstance(value, list | tuple):
        return False
    children = [child for _, child in value] if isinstance(value, tuple) else value
    is_double = isinstance(value, tuple) and len({key for key, _ in value}) < len(value)
    return is_double or any(map(has_twin, children))


@given(PAIRS, st.sampled_from([":", ": ", " :", " : "]))
def test_a_key_that_stands_twice_is_found_wherever_it_stands(value: Any, colon: str) -> None:
    """The quick look at the keys never says otherwise than the parse that counts them."""
    data = written((("k", value),), colon)
    found = one(data.encode())
    assert (found.problem is not None) == has_twin(value)
    if found.problem is None:
        assert found.value == json.loads(data)
