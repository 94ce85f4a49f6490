"""CSV as a stream of rows: RFC 4180 with comma, semicolon or tab, UTF-8, and every value as the text that it is.

Line ends inside quotes belong to the value; U+2028 and the like are text. Blank lines are no rows. A row with more or
fewer fields than the header is a problem of that row; a quote that never ends, or what isn't UTF-8, ends the file.
"""

from __future__ import annotations

import csv
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from batchsvc.files.formats import MAX_COLUMNS, delimiter_of, twice_named
from batchsvc.files.lines import Problem
from batchsvc.files.unpack import unreadable


@dataclass(frozen=True, slots=True)
class CsvFile:
    """The names of the columns, and the rows: values in the order of the columns, or why there are none."""

    columns: list[str]
    rows: Iterator[list[str] | Problem]


def read_csv(pieces: Iterable[bytes], *, max_line_bytes: int) -> CsvFile:
    """Reads the header. Raises UnreadableFileError, then or later."""
    lines = _lines(pieces, max_line_bytes)
    first = next((line for line in lines if line.strip()), None)
    if first is None:
        raise unreadable("The CSV file is empty: its first line must name the columns.")
    records = _records(_again(first, lines), delimiter_of(first), max_line_bytes)
    columns = next(records)
    if len(columns) > MAX_COLUMNS:
        raise unreadable(f"The CSV file has more than {MAX_COLUMNS} columns.")
    if (twice := twice_named(columns)) is not None:
        raise unreadable(f"The CSV file has the column {twice[:100]!r} twice.")
    return CsvFile(columns, _rows(records, len(columns)))


def _rows(records: Iterator[list[str]], width: int) -> Iterator[list[str] | Problem]:
    for row, values in enumerate(records, start=1):
        if len(values) == width:
            yield values
        else:
            says = f"The row has {len(values)} fields, and the header names {width}."
            yield Problem(line=row, code="invalid_csv_row", message=says)


def _records(lines: Iterator[str], delimiter: str, max_field_chars: int) -> Iterator[list[str]]:
    csv.field_size_limit(max_field_chars)
    reader = csv.reader(lines, delimiter=delimiter, strict=True)
    while True:
        try:
            record = next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            where = reader.line_num
            raise unreadable(f"The CSV file can't be read at line {where}: {error}.", line=where) from error
        if record:
            yield record


def _lines(pieces: Iterable[bytes], max_line_bytes: int) -> Iterator[str]:
    """Physical lines with their ends."""
    rest: list[bytes] = []
    size, number = 0, 1
    for piece in pieces:
        *whole, last = piece.split(b"\n")
        for part in whole:
            size += len(part)
            _check(size, number, max_line_bytes)
            yield _text(b"".join([*rest, part, b"\n"]), number)
            rest, size, number = [], 0, number + 1
        rest.append(last)
        size += len(last)
        _check(size, number, max_line_bytes)
    if size:
        yield _text(b"".join(rest), number)


def _check(size: int, number: int, max_line_bytes: int) -> None:
    if size > max_line_bytes:
        says = f"Line {number} of the CSV file has more than {max_line_bytes} bytes."
        raise unreadable(says, line=number)


def _text(line: bytes, number: int) -> str:
    try:
        return line.decode("utf-8-sig" if number == 1 else "utf-8")
    except UnicodeDecodeError as error:
        raise unreadable(f"Line {number} of the CSV file is not UTF-8: save it as UTF-8.", line=number) from error


def _again(first: str, lines: Iterator[str]) -> Iterator[str]:
    yield first
    yield from lines
