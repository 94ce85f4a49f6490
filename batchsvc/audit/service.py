"""Writes and reads the audit log. A row is written in the transaction of the change that it tells of.

Call `record` beside the change, with the session that makes it; if that is rolled back, so is the row:

    from batchsvc.audit.actions import Action
    from batchsvc.audit.actor import at_command_line
    from batchsvc.audit.service import record

    record(session, caller.actor, Action.BATCH_PAUSED, batch.id, project_id=batch.project_id)  # in a route
    record(session, at_command_line(), Action.WORKER_DRAINED, worker.id, details={"reason": reason})  # in a command

`caller.actor` is what `CallerDep` and `AdminDep` bring. `details` says what changed by ids, counts and settings: flat,
of JSON's scalars and short lists of them. Never prompts, custom ids, answers or secrets: the caller leaves them out,
and a text that holds an API key, a signing secret or a database's password is refused here.

What it doesn't do: tell of reads, and of what a project does with its own files and batches.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import TypeAlias

from sqlalchemy.orm import Session

from batchsvc import ids
from batchsvc.audit.actions import Action
from batchsvc.audit.actor import Actor
from batchsvc.audit.tables import AuditRow
from batchsvc.db.session import database_now_ms
from batchsvc.errors import InvalidRequestError

Scalar: TypeAlias = str | int | float | bool | None
Details: TypeAlias = Mapping[str, Scalar | Sequence[Scalar]]

_TEXT_CHARS, _ITEMS = 255, 32
_SECRET = re.compile(r"\bsk_[0-9A-Za-z_]{50,}|\bwhsec_|\bpostgres(ql)?(\+\w+)?://[^/\s]*:[^/\s]*@")


def record(
    session: Session,
    actor: Actor,
    action: Action,
    target_id: str,
    *,
    project_id: str | None = None,
    details: Details | None = None,
) -> None:
    """Note that `actor` did `action` to `target_id`, which belongs to `project_id` if to any, in this transaction.

    Texts are cut at 255 characters, lists at 32 items. Raises InvalidRequestError for a text that holds a secret, which
    takes the change back with it.
    """
    row = AuditRow(
        id=ids.audit_id(),
        action=action.value,
        actor_kind=actor.kind.value,
        actor_id=actor.id,
        actor_project_id=actor.project_id,
        address=actor.address,
        project_id=project_id,
        target_id=_text("target_id", target_id),
        details={name: _short(name, value) for name, value in (details or {}).items()},
        effective_ms=database_now_ms(session),
    )
    session.add(row)
    session.flush()


def _short(name: str, value: Scalar | Sequence[Scalar]) -> Scalar | list[Scalar]:
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [_cut(name, one) for one in value[:_ITEMS]]
    return _cut(name, value)


def _cut(name: str, value: Scalar) -> Scalar:
    return _text(name, value) if isinstance(value, str) else value


def _text(name: str, value: str) -> str:
    if _SECRET.search(value):
        raise InvalidRequestError(
            f"{name} holds a secret, which the audit log would keep for ever: leave the secret out.",
            code="secret_in_audit_log",
            param=name,
        )
    return value[:_TEXT_CHARS]
