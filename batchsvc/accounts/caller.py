"""From a request to its caller: its key, checked against the database every time, and let in by the door.

The key stands in `Authorization: Bearer KEY`, or in `x-api-key`, where Anthropic's client puts it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, cast

from fastapi import Depends, Request

from batchsvc.accounts import service
from batchsvc.accounts.door import Door
from batchsvc.accounts.service import Caller
from batchsvc.errors import AuthenticationError, PermissionDeniedError
from batchsvc.http.deps import ContextDep


def require_caller(request: Request, context: ContextDep) -> Caller:
    """Who makes this call. No cache: a key that is revoked is refused from the next call on."""
    secret = secret_of(request)
    with context.db.reading() as session:
        found = service.caller(session, secret, request.client.host if request.client else None)
    request.state.headers = _door(request).admit(found, request.method, path_of(request.scope))
    return found


def secret_of(request: Request) -> str:
    """The key that a call brings. Raises AuthenticationError if it brings none."""
    scheme, _, secret = request.headers.get("authorization", "").partition(" ")
    if not scheme:
        scheme, secret = "bearer", request.headers.get("x-api-key", "")
    if scheme.lower() != "bearer" or not secret.strip():
        raise AuthenticationError(
            "You didn't provide an API key: send it in a header, Authorization: Bearer KEY.", code="missing_api_key"
        )
    return secret.strip()


def path_of(scope: Mapping[str, Any]) -> str:
    """The path that a call is routed by, below the prefix of a proxy. Not `request.url.path`: that is parsed from an
    address which begins with the header Host, so a caller could say what scopes are checked on."""
    path, prefix = str(scope["path"]), str(scope.get("root_path") or "")
    return path[len(prefix) :] if prefix and path.startswith(f"{prefix}/") else path


def _door(request: Request) -> Door:
    return cast(Door, request.app.state.door)


def require_admin(caller: Annotated[Caller, Depends(require_caller)]) -> Caller:
    """A caller that may manage keys and models."""
    if not caller.is_admin:
        raise PermissionDeniedError("This needs the admin key.", code="admin_only")
    return caller


CallerDep = Annotated[Caller, Depends(require_caller)]
AdminDep = Annotated[Caller, Depends(require_admin)]
