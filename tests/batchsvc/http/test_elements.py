"""A body with one long array comes apart wherever its pieces end, and never more than one element is held."""

from __future__ import annotations

import json
import tracemalloc
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from batchsvc.http.elements import Elements, ElementTooLargeError, NotAnArrayError

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=6) | st.sampled_from(['"', "\\", '}"]', '\\"{[']),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)
OBJECTS = st.lists(st.dictionaries(st.text(max_size=4), JSON, max_size=3), max_size=4)


def elements(data: bytes, cuts: list[int], most_bytes: int = 1 << 20) -> list[Any]:
    """What comes out of a body whose pieces end there."""
    found, reader, begin = [], Elements("requests", most_bytes=most_bytes), 0
    for end in [*sorted(cuts), len(data)]:
        found += [json.loads(element) for element in reader.feed(data[begin:end])]
        begin = max(begin, end)
    reader.finish()
    return found


@given(OBJECTS, st.sampled_from([None, 2]), st.booleans(), st.lists(st.integers(0, 300), max_size=6))
def test_what_is_put_in_comes_out(values: list[Any], indent: int | None, is_ascii: bool, cuts: list[int]) -> None:
    data = json.dumps({"requests": values}, indent=indent, ensure_ascii=is_ascii).encode(errors="replace")
    assert elements(data, cuts) == json.loads(data)["requests"]


@pytest.mark.parametrize(
    "data",
    [
        *(b"", b"{", b"[]", b"null", b'{"x":[]}', b'{"requests":{}}', b'{"requests":[', b'{"requests":[1]}'),
        *(b'{"requests":[{}', b'{"requests":[{},]}', b'{"requests":[{}{}]}', b'{"requests":[,{}]}'),
        *(b'{"requests":[{}]', b'{"requests":[{}],"x":1}', b'{"requests":[{}]}x', b" " * 2_000),
    ],
)
def test_another_shape_is_told(data: bytes) -> None:
    with pytest.raises(NotAnArrayError):
        elements(data, [])


@given(st.binary(max_size=60), st.lists(st.integers(0, 60), max_size=3))
@example(b'{"requests":[{"a":"\\', [])
def test_any_bytes_are_read_or_refused(data: bytes, cuts: list[int]) -> None:
    reader, begin = Elements("requests", most_bytes=40), 0
    try:
        for end in [*sorted(cuts), len(data)]:
            list(reader.feed(b'{"requests":[' * (begin == 0) + data[begin:end]))
            begin = max(begin, end)
        reader.finish()
    except (NotAnArrayError, ElementTooLargeError):
        pass


def test_one_that_is_too_large_is_named_before_it_is_whole() -> None:
    reader = Elements("requests", most_bytes=1_000)
    assert len(list(reader.feed(b'{"requests":[{"a":1},{"a":"'))) == 1

    def go_on() -> None:
        for _ in range(20):
            list(reader.feed(b"x" * 100))

    with pytest.raises(ElementTooLargeError) as refused:
        go_on()
    assert refused.value.index == 1


def test_spaces_between_elements_are_not_kept() -> None:
    reader = Elements("requests", most_bytes=40)
    pieces = [b'{"requests":[', *[b" " * 100_000] * 5, b'{"a":1}', *[b"\n" * 100_000] * 5, b"]", b" " * 100_000, b"}"]
    tracemalloc.start()
    try:
        found = [json.loads(one) for piece in pieces for one in reader.feed(piece)]
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    reader.finish()
    assert found == [{"a": 1}]
    assert most < 350_000, "one piece at a time"
