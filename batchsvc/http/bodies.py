"""JSON bodies that may be large: parsed beside the event loop, not on it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from fastapi import Request
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel, ValidationError
from starlette.concurrency import run_in_threadpool

M = TypeVar("M", bound=BaseModel)


def json_body(shape: type[M], read_object: Callable[[bytes], dict[str, Any]]) -> Callable[[Request], Awaitable[M]]:
    """A dependency that reads the body as a `shape`; `read_object` raises InvalidRequestError for what is no object."""

    async def read(request: Request) -> M:
        return await run_in_threadpool(parsed, shape, read_object, await request.body())

    return read


def described(shape: type[BaseModel]) -> dict[str, Any]:
    """What the description of a route has to say of such a body."""
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": shape.model_json_schema()}}}}


def parsed(shape: type[M], read_object: Callable[[bytes], dict[str, Any]], data: bytes) -> M:
    """The body. Raises what `read_object` raises, RequestValidationError for other shapes."""
    value = read_object(data)
    try:
        return shape.model_validate(value)
    except ValidationError as error:
        problems = error.errors(include_input=False, include_url=False)
        raise RequestValidationError([{**problem, "loc": ("body", *problem["loc"])} for problem in problems]) from error
