"""SQL of purges: what has to be wiped, who is at it, and what is overdue.

    add     in the transaction that deletes, or ends, it; again, it changes nothing
    take    what is due, each for one collector, and again for another one if that was killed in the middle
    note    wiped for the first time, then for good

A purge may run any number of times, in several processes at once. Its row stays: it says when the content went.
"""

from __future__ import annotations

from dataclasses import dataclass

from sqlalchemy import func, select
from sqlalchemy.orm import Session

from batchsvc.db.session import database_now_ms
from batchsvc.files.retention import Kind, Policy
from batchsvc.files.tables import Purge


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
    """What to wipe now, at most so many; nobody else takes it for a while. Served by ix_purges_due."""
    now = database_now_ms(session)
    due = select(Purge).where(Purge.purged_ms.is_(None), Purge.due_ms <= now).order_by(Purge.due_ms).limit(limit)
    taken = []
    for row in session.scalars(due.with_for_update(skip_locked=True).execution_options(populate_existing=True)):
        kind = Kind(row.kind)
        first_ms, last_ms = (when(kind, row.deleted_ms) for when in (policy.first_ms, policy.last_ms))
        due_ms = first_ms if row.swept_ms is None else last_ms
        if due_ms > now:
            row.due_ms = due_ms
            continue
        row.due_ms = policy.retry_ms(now, row.num_failures)
        is_last = last_ms <= now
        taken.append(DuePurge(subject_id=row.subject_id, kind=kind, deleted_ms=row.deleted_ms, is_last=is_last))
    return taken


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
