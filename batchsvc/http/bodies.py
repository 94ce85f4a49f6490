"""JSON bodies that may be large: read as strictly as a line of a file, and parsed beside the event loop, not on it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import orjson
from fastapi import Request
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel, ValidationError
from starlette.concurrency import run_in_threadpool

from batchsvc.errors import InvalidRequestError

M = TypeVar("M", bound=BaseModel)


def json_body(shape: type[M]) -> Callable[[Request], Awaitable[M]]:
    """A dependency that reads the body as a `shape`."""

    async def read(request: Request) -> M:
        return await run_in_threadpool(parsed, shape, await request.body())

    return read


def described(shape: type[BaseModel]) -> dict[str, Any]:
    """What the description of a route has to say of such a body."""
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": shape.model_json_schema()}}}}


def parsed(shape: type[M], data: bytes) -> M:
    """The body. Raises InvalidRequestError for what is no JSON, RequestValidationError for other shapes."""
    try:
        value = orjson.loads(data)
    except orjson.JSONDecodeError as error:
        raise InvalidRequestError("The request's body is not valid JSON.", code="invalid_json") from error
    if not isinstance(value, dict):
        raise InvalidRequestError("The request's body must be a JSON object.", code="invalid_json")
    try:
        return shape.model_validate(value)
    except ValidationError as error:
        problems = error.errors(include_input=False, include_url=False)
        raise RequestValidationError([{**problem, "loc": ("body", *problem["loc"])} for problem in problems]) from error
