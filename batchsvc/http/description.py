"""Our API as OpenAPI describes it: what FastAPI knows of it, the key as we take it and the errors as we send them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from importlib.metadata import version
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

_MESSAGES = "/v1/messages"
_OPEN = ("/livez", "/readyz", "/metrics")  # no key, or none from this machine
_SAYS = {
    400: "An argument can't be used; `param` names it.",
    401: "The key is missing or isn't valid.",
    403: "The key may not do this.",
    404: "There is no such object in the key's project.",
    413: "The body is too large.",
    422: "The Idempotency-Key named another call.",
    429: "The key or its project is at a limit; `Retry-After` says when to try again.",
    503: "A part that this call needs doesn't answer; `Retry-After` says when to try again.",
}
_TEXT = {"type": "string"}
_TEXT_OR_NOTHING = {"type": ["string", "null"]}
_ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {"message": _TEXT, "type": _TEXT, "param": _TEXT_OR_NOTHING, "code": _TEXT_OR_NOTHING},
        }
    },
}
_MESSAGE_ERROR = {
    "type": "object",
    "required": ["type", "error", "request_id"],
    "properties": {
        "type": {"const": "error"},
        "error": {"type": "object", "required": ["type", "message"], "properties": {"type": _TEXT, "message": _TEXT}},
        "request_id": _TEXT_OR_NOTHING,
    },
}


def describe(app: FastAPI) -> dict[str, Any]:
    """The description of an application."""
    found = get_openapi(title=app.title, version=version("batchsvc"), routes=app.routes)
    for path, operations in found["paths"].items():
        for method, operation in operations.items():
            if path in _OPEN:
                operation["security"] = []
            answers = operation["responses"]
            if "HTTPValidationError" in str(answers.get("422")):
                del answers["422"]  # FastAPI's own; ours is a 400
            for status in _errors(path, method, operation):
                answers.setdefault(str(status), _error(path, status))
    parts = found.setdefault("components", {})
    for name in ("HTTPValidationError", "ValidationError"):
        parts.get("schemas", {}).pop(name, None)
    parts.setdefault("schemas", {}).update(Error=_ERROR, MessageError=_MESSAGE_ERROR)
    parts["securitySchemes"] = {
        "bearer": {"type": "http", "scheme": "bearer"},
        "header": {"type": "apiKey", "in": "header", "name": "x-api-key"},
    }
    found["security"] = [{"bearer": []}, {"header": []}]
    return found


def sends(*kinds: str, **others: Mapping[str, Any]) -> dict[int | str, dict[str, Any]]:
    """What a route that doesn't answer with JSON says of its 200, and of `others` (`_206=...`)."""
    whole: dict[str, Any] = {"description": "OK", "content": {kind: {"schema": _TEXT} for kind in kinds}}
    answers: dict[int | str, dict[str, Any]] = {200: whole}
    return answers | {int(status.removeprefix("_")): dict(about) for status, about in others.items()}


def takes_form(file: str, *fields: str) -> dict[str, Any]:
    """What a route that takes one file in a form, and fields beside it, says of its body."""
    properties = {file: {"type": "string", "format": "binary"}} | dict.fromkeys(fields, _TEXT)
    schema = {"type": "object", "required": [file], "properties": properties}
    return {"requestBody": {"required": True, "content": {"multipart/form-data": {"schema": schema}}}}


def _errors(path: str, method: str, operation: Mapping[str, Any]) -> Iterator[int]:
    if path in _OPEN:
        return
    yield from (400, 401, 403, 404, 429, 503)
    if method == "post":
        yield 413
    if any(one["name"].lower() == "idempotency-key" for one in operation.get("parameters", ())):
        yield 422


def _error(path: str, status: int) -> dict[str, Any]:
    name = "MessageError" if path.startswith(_MESSAGES) else "Error"
    schema = {"$ref": f"#/components/schemas/{name}"}
    return {"description": _SAYS[status], "content": {"application/json": {"schema": schema}}}
