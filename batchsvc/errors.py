"""Errors that reach a user, as one tree; each carries what OpenAI's error envelope needs.

ServiceError(message, status, type, code, param)
├── InvalidRequestError   400  a parameter can't be used
├── AuthenticationError   401  no key, or a wrong one
├── PermissionDeniedError 403  a key that may not do this
├── NotFoundError         404  no such object in this project
├── TooLargeError         413  over a limit of bytes
├── MismatchError         422  a name that already means another call
├── OverloadedError       429  more calls than are taken at once
│   └── LimitError             more than the limits of the key or its project allow
├── NoFundsError          429  the project's budget or balance doesn't allow it
└── UnavailableError      503  a service that we need doesn't answer
"""

from __future__ import annotations

from collections.abc import Mapping


class ServiceError(Exception):
    """One clear sentence for the user, and the fields of the envelope `{"error": {...}}`."""

    status = 500
    type = "server_error"

    def __init__(self, message: str, *, code: str | None = None, param: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.code = code
        self.param = param

    def envelope(self) -> dict[str, dict[str, str | None]]:
        return {"error": {"message": self.message, "type": self.type, "param": self.param, "code": self.code}}


class InvalidRequestError(ServiceError):
    """A parameter of the call can't be used."""

    status = 400
    type = "invalid_request_error"


class AuthenticationError(ServiceError):
    """No key, or one that isn't valid."""

    status = 401
    type = "authentication_error"


class PermissionDeniedError(ServiceError):
    """The key is valid and may not do this."""

    status = 403
    type = "permission_error"


class NotFoundError(ServiceError):
    """There is no such object in the caller's project."""

    status = 404
    type = "invalid_request_error"


class TooLargeError(ServiceError):
    """A body is over a limit of bytes."""

    status = 413
    type = "invalid_request_error"


class MismatchError(ServiceError):
    """A call repeats another one's name, but not what it asks for."""

    status = 422
    type = "invalid_request_error"


class OverloadedError(ServiceError):
    """There are too many calls at this moment."""

    status = 429
    type = "rate_limit_error"
    retry_after_s = 1


class LimitError(OverloadedError):
    """The key or its project is at a limit. `retry_after_s`: when it is worth trying again; `headers` say how far.

    `is_passing`: time alone makes room, so clients shall try again unasked.
    """

    def __init__(
        self,
        message: str,
        *,
        code: str,
        retry_after_s: int,
        headers: Mapping[str, str] | None = None,
        is_passing: bool = True,
    ) -> None:
        super().__init__(message, code=code)
        self.retry_after_s = retry_after_s
        self.headers = dict(headers or {})
        self.is_passing = is_passing


class NoFundsError(ServiceError):
    """The project may not spend what the call can cost; trying again changes nothing."""

    status = 429
    type = "insufficient_quota"


class UnavailableError(ServiceError):
    """A service that this call needs doesn't answer."""

    status = 503
    type = "server_error"
