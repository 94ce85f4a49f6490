"""A call that arrives again has one effect and one answer.

A caller may name a call with `Idempotency-Key`: the answer is stored in the call's own transaction, and the same key
gets it again, whether the first answer was lost or is still on its way (then the second call waits). A key belongs to
one call: with other arguments it is refused. Calls that were refused leave nothing, so they can be corrected and sent
again. The official client sends no such key, only a count of its attempts; `is_retry` is for the callee to use.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any

import orjson
from fastapi import Depends, Header
from sqlalchemy.orm import Session

from batchsvc.accounts import queries
from batchsvc.accounts.tables import IdempotentAnswer
from batchsvc.db.session import database_now_ms
from batchsvc.errors import InvalidRequestError, MismatchError, UnavailableError

RETRY_MS = 15 * 60_000  # how long a client may take to send a call again by itself
_KEEP_MS = 7 * 24 * 3_600_000
_KEY = re.compile(r"[\x20-\x7e]{1,200}")


@dataclass(frozen=True, slots=True)
class Repetition:
    """What a caller says of repeating: the name of this call, or that its client sends it again unasked."""

    key: str | None = None
    is_retry: bool = False


def repetition(
    idempotency_key: Annotated[str | None, Header()] = None,
    x_stainless_retry_count: Annotated[str, Header()] = "0",
) -> Repetition:
    """What the headers say. Raises InvalidRequestError for a key that can't be one."""
    if idempotency_key is not None and not _KEY.fullmatch(idempotency_key):
        raise InvalidRequestError(
            "The header Idempotency-Key must be 1 to 200 printable ASCII characters.",
            code="invalid_idempotency_key",
        )
    is_retry = x_stainless_retry_count.isdecimal() and int(x_stainless_retry_count[:9]) > 0
    return Repetition(idempotency_key, is_retry and idempotency_key is None)


RepetitionDep = Annotated[Repetition, Depends(repetition)]


def once(
    session: Session, project_id: str, call: str, key: str | None, arguments: Mapping[str, Any], do: Callable[[], Any]
) -> dict[str, Any]:
    """What `do` answers, or what it answered the first time. Runs in the transaction in which `do` has its effect.

    `call` and `key` name the call within the project. Raises MismatchError for a key that named other arguments.
    """
    if key is None:
        return dict(do())
    name, fingerprint = f"{call} {key}", _fingerprint(arguments)
    now = database_now_ms(session)
    if not queries.add_answer(session, project_id, name, fingerprint, now):
        return _again(queries.answer(session, project_id, name), fingerprint)
    body = dict(do())
    queries.fill_answer(session, project_id, name, orjson.dumps(body).decode())
    return body


def forget_old(session: Session) -> int:
    """Forget the answers that nobody asks for any more. Returns how many."""
    return queries.delete_answers(session, database_now_ms(session) - _KEEP_MS)


def _again(stored: IdempotentAnswer | None, fingerprint: str) -> dict[str, Any]:
    if stored is None:  # forgotten at this very moment
        raise UnavailableError("The first call with this Idempotency-Key was just forgotten; try again.")
    if stored.fingerprint != fingerprint:
        raise MismatchError(
            "This Idempotency-Key was used for a call with other arguments: use a new key for a new call.",
            code="idempotency_key_reused",
        )
    return dict(orjson.loads(stored.body))


def _fingerprint(arguments: Mapping[str, Any]) -> str:
    try:
        text = orjson.dumps(arguments, option=orjson.OPT_SORT_KEYS)
    except TypeError as error:  # such as a number of hundreds of digits
        raise InvalidRequestError(
            "A value of this call can't be written as JSON: is a number beyond 64 bits?", code="invalid_value"
        ) from error
    return hashlib.sha256(text).hexdigest()
