"""The form parser: the same events however the body is cut, and no error but ours for any bytes."""

from __future__ import annotations

from contextlib import suppress

from hypothesis import example, given
from hypothesis import strategies as st

from batchsvc.errors import InvalidRequestError
from batchsvc.files.service import clean_filename
from batchsvc.http.ranges import UnsatisfiableRangeError, span
from batchsvc.http.uploads import Event, Field, FileData, FileStart, Form

KIND = "multipart/form-data; boundary=BB"


def joined(events: list[Event]) -> list[Event]:
    """The events with neighbouring pieces of data put together."""
    out: list[Event] = []
    for event in events:
        if isinstance(event, FileData) and out and isinstance(out[-1], FileData):
            out[-1] = FileData(out[-1].data + event.data)
        else:
            out.append(event)
    return out


@given(st.binary(max_size=400), st.text("abc\r\n-B", max_size=20), st.lists(st.integers(1, 60), min_size=1))
def test_events_do_not_depend_on_how_the_body_is_cut(content: bytes, value: str, cuts: list[int]) -> None:
    if b"\r\n--BB" in b"\r\n" + content or "\r\n--BB" in "\r\n" + value:
        return
    body = (
        f'--BB\r\nContent-Disposition: form-data; name="purpose"\r\n\r\n{value}\r\n'
        '--BB\r\nContent-Disposition: form-data; name="file"; filename="a.jsonl"\r\nContent-Type: x/y\r\n\r\n'
    ).encode() + content
    body += b"\r\n--BB--\r\n"
    parser, events, position = Form(KIND), [], 0
    while position < len(body):
        size = cuts[position % len(cuts)]
        events += parser.feed(body[position : position + size])
        position += size
    assert parser.is_complete
    expected: list[Event] = [Field("purpose", value), FileStart("file", "a.jsonl")]
    assert joined(events) == expected + ([FileData(content)] if content else [])


@given(st.lists(st.binary(max_size=50) | st.sampled_from([b"--BB\r\n", b"\r\n--BB", b"--", b"a: b\r\n", b"\r\n\r\n"])))
def test_any_bytes_end_in_events_or_one_error_of_ours(pieces: list[bytes]) -> None:
    parser = Form(KIND)
    with suppress(InvalidRequestError):
        for piece in pieces:
            list(parser.feed(piece))


@given(st.integers(0, 100), st.integers(0, 120), st.none() | st.integers(0, 120))
def test_a_span_is_what_slicing_gives(size: int, first: int, last: int | None) -> None:
    data = bytes(range(size))
    header = f"bytes={first}-{'' if last is None else last}"
    try:
        got = span(header, size)
    except UnsatisfiableRangeError:
        assert data[first:] == b""
        return
    if got is None:
        assert last is not None and last < first
    else:
        assert data[got[0] : got[1]] == data[first : None if last is None else last + 1]


@given(st.integers(1, 100), st.integers(1, 120))
def test_a_suffix_is_the_end(size: int, count: int) -> None:
    got = span(f"bytes=-{count}", size)
    assert got is not None and bytes(range(size))[got[0] : got[1]] == bytes(range(size))[-count:]


@given(st.text(max_size=600), st.sampled_from([".jsonl", ".csv.gz", ""]))
@example("x" * 1_000_000, ".jsonl")
@example("x." + "y" * 1_000_000, "")
def test_a_name_is_cut_to_what_is_kept_and_keeps_its_ending(stem: str, suffix: str) -> None:
    name = clean_filename(stem + suffix)
    assert len(name.encode()) <= 255 and name.isprintable() and "/" not in name
    assert not suffix or name.endswith(suffix.rpartition(".")[1] + suffix.rpartition(".")[2])
    assert clean_filename(name) == name
