"""A call that arrives again has one effect and one answer.

A caller may name a call with `Idempotency-Key`: the answer is stored in the call's own transaction, and the same key
gets it again, whether the first answer was lost or is still on its way (then the second call waits). A key belongs to
one call: with other arguments it is refused. Calls that were refused leave nothing, so they can be corrected and sent
again.

The official client sends no such key, only a count of its attempts. Creates know such a call by what it says: a retry
is answered as the same call was before, and the first attempt as its own retry was, if that has overtaken it. Two
calls that say the same and are both first attempts are two calls. Elsewhere `is_retry` is for the callee to use.
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
from batchsvc.http.deps import ContextDep

RETRY_MS = 15 * 60_000  # how long a client may take to send a call again by itself
_KEEP_MS = 7 * 24 * 3_600_000
_KEY = re.compile(r"[\x20-\x7e]{1,200}")
_TO_FIRST, _TO_RETRY = "first", "retry"  # whom an answer without a key was given to


@dataclass(frozen=True, slots=True)
class Repetition:
    """What a caller says of repeating: the name of this call, or that its client sends it again unasked."""

    key: str | None = None
    is_retry: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Sent:
    """A call as it came: what it says of repeating, the API key that sent it, a digest of all that it says, and when
    it began to come."""

    repetition: Repetition
    api_key_id: str
    digest: str
    arrived_ms: int


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


def arrival_ms(context: ContextDep) -> int:
    """When a call began to come, by the database's clock: as a dependency it stands before the body's."""
    with context.db.reading() as session:
        return database_now_ms(session)


ArrivalDep = Annotated[int, Depends(arrival_ms)]


def once(
    session: Session, project_id: str, call: str, key: str | None, arguments: Mapping[str, Any], do: Callable[[], Any]
) -> dict[str, Any]:
    """What `do` answers, or what it answered the first time. Runs in the transaction in which `do` has its effect.

    `call` and `key` name the call within the project. Raises MismatchError for a key that named other arguments.
    """
    return dict(do()) if key is None else _once_named(session, project_id, f"{call} {key}", digest_of(arguments), do)


def answered(
    session: Session, project_id: str, call: str, key: str | None, arguments: Mapping[str, Any]
) -> dict[str, Any] | None:
    """What `once` has answered before, for a call that needs something before it can begin. None: nothing."""
    stored = None if key is None else queries.answer(session, project_id, f"{call} {key}")
    return None if stored is None or not stored.body else _again(stored, digest_of(arguments))


def once_sent(
    session: Session,
    project_id: str,
    call: str,
    sent: Sent,
    do: Callable[[], Any],
    *,
    is_there: Callable[[dict[str, Any]], bool] = lambda _: True,
) -> dict[str, Any]:
    """Like `once`, and without a key a call is known by what it says; calls that say the same go one by one.

    `is_there` says of an answer whether what it tells of is still there: if not, the call is a new one.
    """
    is_retry = sent.repetition.is_retry
    if sent.repetition.key is not None:
        return _once_named(session, project_id, f"{call} {sent.repetition.key}", sent.digest, do)
    name, now = f"{call}:{sent.api_key_id}:{sent.digest}", database_now_ms(session)
    if not queries.add_answer(session, project_id, name, "", now):
        known = queries.locked_answer(session, project_id, name)
        since_ms = now - RETRY_MS if is_retry else sent.arrived_ms
        if known is not None and known.created_ms >= since_ms and (is_retry or known.fingerprint == _TO_RETRY):
            answer = dict(orjson.loads(known.body))
            if is_there(answer):
                return answer
    body = dict(do())
    text, to = orjson.dumps(body).decode(), _TO_RETRY if is_retry else _TO_FIRST
    queries.fill_answer(session, project_id, name, text, fingerprint=to, created_ms=database_now_ms(session))
    return body


def _once_named(
    session: Session, project_id: str, name: str, fingerprint: str, do: Callable[[], Any]
) -> dict[str, Any]:
    now = database_now_ms(session)
    if not queries.add_answer(session, project_id, name, fingerprint, now):
        return _again(queries.answer(session, project_id, name), fingerprint)
    body = dict(do())
    queries.fill_answer(session, project_id, name, orjson.dumps(body).decode())
    return body


def forget_old(session: Session) -> int:
    """Forget the answers that nobody asks for any more. Returns how many."""
    return queries.delete_answers(session, database_now_ms(session) - _KEEP_MS)


def rewrite_answers(
    session: Session, project_id: str, object_id: str, made_ms: int, rewrite: Callable[[str], str]
) -> None:
    """Change the bodies of the answers that tell of an object, so that what was deleted is gone from them too.

    An answer is written with what it tells of, so `made_ms`, when that was made, finds it among many.
    """
    for row in queries.answers_with(session, project_id, object_id, made_ms - RETRY_MS, made_ms + RETRY_MS):
        row.body = rewrite(row.body)


def _again(stored: IdempotentAnswer | None, fingerprint: str) -> dict[str, Any]:
    if stored is None:  # forgotten at this very moment
        raise UnavailableError("The first call with this Idempotency-Key was just forgotten; try again.")
    if stored.fingerprint != fingerprint:
        raise MismatchError(
            "This Idempotency-Key was used for a call with other arguments: use a new key for a new call.",
            code="idempotency_key_reused",
        )
    return dict(orjson.loads(stored.body))


def digest_of(arguments: Mapping[str, Any]) -> str:
    """Names what a call says. Raises InvalidRequestError for what can't be written as JSON."""
    try:
        text = orjson.dumps(arguments, option=orjson.OPT_SORT_KEYS)
    except TypeError as error:  # such as a number of hundreds of digits
        raise InvalidRequestError(
            "A value of this call can't be written as JSON: is a number beyond 64 bits?", code="invalid_value"
        ) from error
    return hashlib.sha256(text).hexdigest()
