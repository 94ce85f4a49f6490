"""Cursors of result lines and sets of line numbers: what was written is read, and nothing else is taken for it."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from batchsvc.batches import line_set, result_cursor
from batchsvc.batches.result_cursor import Cursor, Kind

BATCH = "batch_1"
NUMBER = st.integers(0, 2**62 - 1)
CURSORS = st.one_of(
    st.builds(Cursor, st.just(Kind.PART), st.tuples(NUMBER, NUMBER)),
    st.builds(Cursor, st.just(Kind.TAIL), st.tuples(NUMBER)),
    st.builds(Cursor, st.just(Kind.INPUT), st.tuples(NUMBER, NUMBER, NUMBER)),
)


@given(CURSORS)
def test_a_cursor_is_read_as_it_was_written(cursor: Cursor) -> None:
    text = result_cursor.encode(BATCH, cursor)
    assert result_cursor.decode(BATCH, text) == cursor
    assert text.isascii() and not set(text) & set("+/=&?# ")


@given(CURSORS)
def test_a_cursor_belongs_to_its_batch(cursor: Cursor) -> None:
    assert result_cursor.decode("batch_2", result_cursor.encode(BATCH, cursor)) is None


@given(st.text(max_size=60))
def test_other_text_is_no_cursor(text: str) -> None:
    assert result_cursor.decode(BATCH, text) is None


@given(CURSORS, st.integers(0, 100), st.characters(codec="ascii"))
def test_a_changed_cursor_is_none(cursor: Cursor, at: int, letter: str) -> None:
    text = result_cursor.encode(BATCH, cursor)
    at %= len(text)
    changed = text[:at] + letter + text[at + 1 :]
    assert changed == text or result_cursor.decode(BATCH, changed) is None
    assert result_cursor.decode(BATCH, text[:at]) is None


@given(st.sets(st.integers(1, 2**40), min_size=1, max_size=200))
def test_a_set_of_lines_is_kept(line_nos: set[int]) -> None:
    assert line_set.decode(line_set.encode(line_nos)).tolist() == sorted(line_nos)


def test_a_line_takes_about_a_byte() -> None:
    scattered = [(number * 7919) % 50_000 for number in range(512)]
    assert len(line_set.encode(scattered)) < 1.6 * 512
