"""The JSON object that a request's body is, read as strictly as a line of a file: it may hold such lines."""

from __future__ import annotations

from typing import Any

from batchsvc.errors import InvalidRequestError
from batchsvc.files.lines import Problem, parse_object


def request_object(data: bytes, what: str = "The request's body") -> dict[str, Any]:
    """Raises InvalidRequestError."""
    found = parse_object(data, line_no=1, code="invalid_json", what=what)
    if isinstance(found, Problem):
        raise InvalidRequestError(found.message, code="invalid_json")
    if found.flaw is not None:
        raise InvalidRequestError(found.flaw.message, code="invalid_value", param=found.flaw.param)
    return found.value
