"""Every error as OpenAI's envelope `{"error": {message, type, param, code}}`, whoever raised it.

Under /v1/messages it is Anthropic's: `{"type": "error", "error": {type, message}, "request_id"}`.

No status 409 is ever sent: the official client takes it for "try again".
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import structlog
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from sqlalchemy import exc
from starlette.exceptions import HTTPException

from batchsvc.errors import (
    AuthenticationError,
    InvalidRequestError,
    LimitError,
    NoFundsError,
    OverloadedError,
    ServiceError,
    UnavailableError,
)
from batchsvc.logs import where

_MESSAGES = "/v1/messages"
_MESSAGE_ERRORS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
}
_RETRY_AFTER_S = 5  # the official client takes up to 120 and gives up at once above

log = structlog.get_logger(__name__)


def install(app: FastAPI) -> None:
    """Register the handlers of all errors that a route may raise."""
    app.add_exception_handler(ServiceError, _service_error)
    app.add_exception_handler(RequestValidationError, _invalid_arguments)
    app.add_exception_handler(HTTPException, _http_error)
    for unstorable in (exc.DataError, UnicodeEncodeError):
        app.add_exception_handler(unstorable, _unstorable)
    # InternalError: such as a server that has become a standby and takes no writes
    for broken in (exc.OperationalError, exc.InterfaceError, exc.InternalError, exc.TimeoutError):
        app.add_exception_handler(broken, _database_error)


def response(error: ServiceError, request: Request, *, headers: Mapping[str, str] | None = None) -> JSONResponse:
    """The response of an error, in the shape that the request's API has."""
    extra: dict[str, str] = {}
    if isinstance(error, AuthenticationError):
        extra["WWW-Authenticate"] = "Bearer"
    if isinstance(error, UnavailableError):
        extra["Retry-After"] = str(_RETRY_AFTER_S)
    if isinstance(error, OverloadedError):
        extra["Retry-After"] = str(error.retry_after_s)
    if isinstance(error, LimitError):
        extra |= error.headers if error.is_passing else {**error.headers, "x-should-retry": "false"}
    if isinstance(error, NoFundsError):
        extra["x-should-retry"] = "false"  # which the official client does with every other 429
    return JSONResponse(
        _envelope(error, error.status, request), status_code=error.status, headers={**extra, **(headers or {})}
    )


async def _service_error(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, ServiceError), "registered for this class"
    return response(error, request)


async def _invalid_arguments(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, RequestValidationError), "registered for this class"
    return response(_of_problem(error.errors()[0]), request)


async def _http_error(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, HTTPException), "registered for this class"
    said = {
        404: ("unknown_url", f"Unknown request URL: {request.method} {request.url.path}."),
        405: ("method_not_allowed", f"{request.url.path} doesn't take {request.method}."),
        413: ("body_too_large", str(error.detail)),
    }
    code, message = said.get(error.status_code, ("invalid_body", "The request's body can't be read."))
    envelope = _envelope(InvalidRequestError(message, code=code), error.status_code, request)
    return JSONResponse(envelope, status_code=error.status_code, headers=error.headers)


async def _unstorable(request: Request, _error: Exception) -> JSONResponse:
    says = "A value has characters that can't be stored, such as NUL or half a character."
    return response(InvalidRequestError(says, code="invalid_value"), request)


async def _database_error(request: Request, error: Exception) -> JSONResponse:
    log.error("database.failed", **where(error))
    return response(UnavailableError("The database doesn't answer; try again.", code="database_unavailable"), request)


def _envelope(error: ServiceError, status: int, request: Request) -> dict[str, Any]:
    if not request.url.path.startswith(_MESSAGES):
        return error.envelope()
    kind = _MESSAGE_ERRORS.get(status, "invalid_request_error" if status < 500 else "api_error")
    # one sentence is all that this shape has room for, so the parameter's name stands in it
    message = f"{error.param}: {error.message}" if error.param and error.param not in error.message else error.message
    return {
        "type": "error",
        "error": {"type": kind, "message": message},
        "request_id": getattr(request.state, "request_id", None),
    }


def _of_problem(problem: Mapping[str, Any]) -> InvalidRequestError:
    """One problem that pydantic found, without the value that it found it in."""
    kind = problem["type"]
    if kind == "json_invalid":
        return InvalidRequestError("The request's body is not valid JSON.", code="invalid_json")
    place = problem["loc"][1:] if problem["loc"][0] in ("body", "query", "path") else problem["loc"]
    param = ".".join(str(step) for step in place) or None
    if param is None:
        return InvalidRequestError("The request's body must be a JSON object.", code="invalid_json")
    if kind == "missing":
        return InvalidRequestError(
            f"Missing required parameter: '{param}'.", code="missing_required_parameter", param=param
        )
    if kind == "extra_forbidden":
        return InvalidRequestError(f"Unknown parameter: '{param}'.", code="unknown_parameter", param=param)
    return InvalidRequestError(f"Invalid '{param}': {problem['msg']}.", code="invalid_value", param=param)
