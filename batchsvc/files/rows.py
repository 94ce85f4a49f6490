"""Rows of a table in batch form as lines of an object of our own: JSON with `custom_id` and `body` as text, or why not.

A table is read once, in a limited process; what planning reads is these lines, one a row, so that the number of a line
is the number of a row (1-based, without the header of a CSV file), and a window begins at a byte. The body stays the
text that it was, and is judged when its line is read.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import orjson

from batchsvc.files.lines import JsonObject, Problem, Record, parse_object, split_lines

_ESCAPED = 6  # a byte of text becomes at most so many of JSON, as \u0000
_FRAME_BYTES = 1024


def row_line(custom_id: str | None, body: str | None, row: int, max_line_bytes: int) -> bytes:
    """The line of a row. One that is too long is a problem of that row."""
    size = sum(len(text.encode(errors="surrogatepass")) for text in (custom_id, body) if text is not None)
    if size > max_line_bytes:
        return problem_line(too_long(row, size, max_line_bytes))
    return orjson.dumps({"custom_id": custom_id, "body": body}) + b"\n"


def problem_line(problem: Problem) -> bytes:
    """The line of a row that can't be used."""
    return orjson.dumps({"problem": [problem.code, problem.message, problem.param]}) + b"\n"


def too_long(row: int, size: int, max_line_bytes: int) -> Problem:
    says = f"The row has {size} bytes; at most {max_line_bytes} are allowed."
    return Problem(line=row, code="line_too_long", message=says)


def row_records(
    chunks: Iterable[bytes], *, endpoint: str, max_line_bytes: int, first_row: int = 1, offset: int = 0
) -> Iterator[Record]:
    """Records of lines that `row_line` and `problem_line` have made, from the byte `offset` on, which begins
    `first_row`."""
    longest = _ESCAPED * max_line_bytes + _FRAME_BYTES
    for raw in split_lines(chunks, max_line_bytes=longest, first_line=first_row, offset=offset):
        assert raw.data is not None, "a longer row is a problem line"
        found = _value(orjson.loads(raw.data), raw.line_no, endpoint)
        if isinstance(found, Problem):
            yield Record(line_no=raw.line_no, next_offset=raw.next_offset, value={}, problem=found)
        else:
            value, flaw = found
            yield Record(line_no=raw.line_no, next_offset=raw.next_offset, value=value, flaw=flaw)


def _value(found: dict[str, Any], row: int, endpoint: str) -> JsonObject | Problem:
    if "problem" in found:
        code, message, param = found["problem"]
        return Problem(line=row, code=code, message=message, param=param)
    value: dict[str, Any] = {"method": "POST", "url": endpoint}
    if found["custom_id"] is not None:
        value["custom_id"] = found["custom_id"]
    if found["body"] is None:
        return JsonObject(value)
    body = parse_object(found["body"].encode(), line_no=row, code="invalid_json_line", what="body", param="body")
    if isinstance(body, Problem):
        return body
    return JsonObject({**value, "body": body.value}, body.flaw and body.flaw.within("body"))
