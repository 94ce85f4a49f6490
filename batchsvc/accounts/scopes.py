"""What a restricted key may do: scopes, and which calls each of them covers. Pure.

A scope is `api.<area>.read` or `api.<area>.write`; who may write may read. `api.all.read` reads everything that the
key's kind may see, as OpenAI spells it. A call that no area covers is for keys without restrictions alone: so a new
route is closed to restricted keys until it is named here.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence

from batchsvc.errors import InvalidRequestError

READ_ALL = "api.all.read"
_AREAS: dict[str, tuple[str, ...]] = {  # how paths of an area begin, below /v1/
    "files": ("files", "uploads"),
    "batches": ("batches", "messages/batches"),
    "calls": ("chat/completions", "completions", "responses", "messages", "embeddings", "moderations", "images"),
    "usage": ("organization/usage", "organization/costs"),
    "models": ("models", "scaling"),
    "webhooks": ("webhook_endpoints", "webhook_event_types"),
}
_READS = ("GET", "HEAD", "OPTIONS")
_SPELLING = re.compile(r"(?:api\.)?([a-z_]+)(?:[.:](read|write))?")
AREAS = tuple(_AREAS)


def parse(texts: Collection[str]) -> list[str] | None:
    """Scopes as they are kept, sorted; None: no restriction, which is what an empty list says.

    `files` and `files:write` are short for `api.files.write`, `read-only` for `api.all.read`. Raises
    InvalidRequestError for any other text.
    """
    return sorted({_one(text) for text in texts}) or None


def allows(scopes: Sequence[str] | None, method: str, path: str) -> bool:
    """Whether a key of these scopes may make this call."""
    if scopes is None:
        return True
    is_read = method in _READS
    if is_read and READ_ALL in scopes:
        return True
    area = area_of(path)
    if area is None:
        return False
    return f"api.{area}.write" in scopes or (is_read and f"api.{area}.read" in scopes)


def area_of(path: str) -> str | None:
    """The area of a path; the longest beginning counts, so batches of messages are no calls."""
    below = path.removeprefix("/v1/")
    found = [
        (len(start), area)
        for area, starts in _AREAS.items()
        for start in starts
        if below == start or below.startswith(start + "/")
    ]
    return max(found)[1] if found else None


def _one(text: str) -> str:
    if text in ("read-only", READ_ALL):
        return READ_ALL
    spelled = _SPELLING.fullmatch(text)
    if not spelled or spelled[1] not in _AREAS:
        known = ", ".join(f"api.{area}.read|write" for area in _AREAS)
        raise InvalidRequestError(
            f"There is no scope {text[:64]!r}: it is {READ_ALL}, or one of {known}.",
            code="invalid_value",
            param="scopes",
        )
    return f"api.{spelled[1]}.{spelled[2] or 'write'}"
