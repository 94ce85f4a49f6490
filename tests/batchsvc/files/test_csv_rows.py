"""CSV comes back as it was written by another program; rows of another width are problems of their own."""

from __future__ import annotations

import csv
import io

from hypothesis import given, settings
from hypothesis import strategies as st

from batchsvc.files.csv_rows import read_csv
from batchsvc.files.lines import Problem

TEXTS = st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=12)


@settings(max_examples=60, deadline=None)
@given(st.data(), st.integers(1, 4), st.sampled_from(",;\t"), st.sampled_from(["\n", "\r\n"]), st.booleans())
def test_any_table_comes_back(data: st.DataObject, width: int, delimiter: str, end: str, has_mark: bool) -> None:
    rows = data.draw(st.lists(st.lists(TEXTS, min_size=width, max_size=width), max_size=6))
    rows = [row for row in rows if width > 1 or row != [""]]
    delimiter = delimiter if width > 1 else ","  # a header of one name doesn't show any other
    header = [f"column{number}" for number in range(width)]
    sink = io.StringIO(newline="")
    quoting = csv.QUOTE_ALL if end == "\n" else csv.QUOTE_MINIMAL  # with "\n" Python's writer leaves "\r" unquoted
    csv.writer(sink, delimiter=delimiter, lineterminator=end, quoting=quoting).writerows([header, *rows])
    packed = (b"\xef\xbb\xbf" if has_mark else b"") + sink.getvalue().encode()
    size = data.draw(st.integers(1, len(packed)))
    file = read_csv([packed[at : at + size] for at in range(0, len(packed), size)], max_line_bytes=10_000)
    assert file.columns == header
    assert list(file.rows) == rows


def test_rows_of_another_width_are_problems() -> None:
    file = read_csv([b"a,b\n1,2\n3\n\n4,5,6\n7,8"], max_line_bytes=100)
    first, second, third, last = file.rows
    assert first == ["1", "2"]
    assert last == ["7", "8"]
    assert isinstance(second, Problem) and second.line == 2
    assert isinstance(third, Problem) and third.message == "The row has 3 fields, and the header names 2."
