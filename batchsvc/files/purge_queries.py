"""SQL of purges: what has to be wiped, who is at it, and what is overdue.

    add     in the transaction that deletes, or ends, it; again, it changes nothing
    take    what is due, each for one collector, and again for another one if that was killed in the middle
    note    wiped for the first time, then for good; or given back, because the store is away

A purge may run any number of times, in several processes at once. Its row stays: it says when the content went.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from sqlalchemy import false, func, select, true
from sqlalchemy.orm import Session

from batchsvc.db.session import database_now_ms
from batchsvc.files.retention import Kind, Policy
from batchsvc.files.tables import Purge

_LOOKS = 20  # for things whose time hasn't come yet, which only have to be noted


@dataclass(frozen=True, slots=True, kw_only=True)
class DuePurge:
    """Something to wipe. `is_last`: nobody can write to it any more, so it is wiped for good."""

    subject_id: str
    kind: Kind
    deleted_ms: int
    is_last: bool


def add(session: Session, kind: Kind, subject_id: str, deleted_ms: int) -> None:
    """Have something wiped that was deleted (of a plan: whose batch has ended) then."""
    if session.get(Purge, (subject_id, kind.value)) is None:
        session.add(Purge(subject_id=subject_id, kind=kind.value, deleted_ms=deleted_ms, due_ms=deleted_ms))
        session.flush()


def take(session: Session, policy: Policy, limit: int) -> list[DuePurge]:
    """What to wipe now, at most so many; nobody else takes it for a while. Served by ix_purges_due.

    What was deleted before there were purges comes after all that users were promised to be wiped in time.
    """
    now = database_now_ms(session)
    taken: list[DuePurge] = []
    for is_backlog in (False, True):
        for _ in range(_LOOKS):
            rows = _due(session, now, limit - len(taken), is_backlog=is_backlog)
            taken += [purge for row in rows if (purge := _taken(row, policy, now)) is not None]
            session.flush()
            if not rows or len(taken) >= limit:
                break
    return taken


def _due(session: Session, now_ms: int, limit: int, *, is_backlog: bool) -> list[Purge]:
    if limit <= 0:
        return []
    due = select(Purge).where(
        Purge.purged_ms.is_(None), Purge.is_backlog == (true() if is_backlog else false()), Purge.due_ms <= now_ms
    )
    first = due.order_by(Purge.due_ms).limit(limit).with_for_update(skip_locked=True)
    return list(session.scalars(first.execution_options(populate_existing=True)))


def _taken(row: Purge, policy: Policy, now_ms: int) -> DuePurge | None:
    """Take something, or note when its time comes."""
    kind = Kind(row.kind)
    first_ms, last_ms = (when(kind, row.deleted_ms) for when in (policy.first_ms, policy.last_ms))
    due_ms = first_ms if row.swept_ms is None else last_ms
    if due_ms > now_ms:
        row.due_ms = due_ms
        return None
    row.due_ms = policy.retry_ms(now_ms, row.num_failures)
    return DuePurge(subject_id=row.subject_id, kind=kind, deleted_ms=row.deleted_ms, is_last=last_ms <= now_ms)


def is_due(session: Session) -> bool:
    """Whether something is to be wiped now that nobody is at. Served by ix_purges_due."""
    is_open = (Purge.purged_ms.is_(None), Purge.is_backlog.in_((False, True)))
    due = select(Purge.subject_id).where(*is_open, Purge.due_ms <= database_now_ms(session))
    return session.scalar(due.limit(1)) is not None


def give_back(session: Session, purges: Collection[DuePurge]) -> None:
    """Have what was taken, and not begun, due again at once."""
    now = database_now_ms(session)
    for purge in purges:
        row = session.get_one(Purge, (purge.subject_id, purge.kind.value), with_for_update=True, populate_existing=True)
        row.due_ms = min(row.due_ms, now)


def note_wiped(session: Session, purge: DuePurge, policy: Policy) -> None:
    """Note that something was wiped."""
    row = session.get_one(Purge, (purge.subject_id, purge.kind.value), with_for_update=True, populate_existing=True)
    now = database_now_ms(session)
    row.swept_ms = row.swept_ms or now
    if purge.is_last:
        row.purged_ms = row.purged_ms or now
    else:
        row.due_ms, row.num_failures = policy.last_ms(purge.kind, purge.deleted_ms), 0


def note_failure(session: Session, purge: DuePurge) -> None:
    """Note that an attempt to wipe something has failed; it is due again some time after it was taken."""
    row = session.get_one(Purge, (purge.subject_id, purge.kind.value), with_for_update=True, populate_existing=True)
    row.num_failures += 1


def overdue(session: Session, policy: Policy) -> int:
    """How many things should be gone by now that aren't. Served by ix_purges_due."""
    late = (Purge.purged_ms.is_(None), Purge.deleted_ms < database_now_ms(session) - policy.grace_ms)
    return session.scalar(select(func.count()).select_from(Purge).where(*late)) or 0


def purged_ms(session: Session, kind: Kind, subject_id: str) -> int | None:
    """When the content of something was gone, if it is."""
    row = session.get(Purge, (subject_id, kind.value), populate_existing=True)
    return None if row is None else row.purged_ms
