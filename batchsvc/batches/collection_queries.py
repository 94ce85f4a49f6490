"""Holds the collection of garbage while somebody copies the bucket: no object goes until the hold is released or ends.

A backup takes the database first and the bucket then; whatever the database's copy names must still be there when the
bucket is read. So it calls `hold_collection` before the first, waits until `is_collecting` is false (a collector may be
in the middle of a deletion that it began before), and calls `release_collection` at the end:

    db.run(lambda session: hold_collection(session, "backup:2026-11-30", reason="a backup", hold_s=3600))
    while db.run(is_collecting): ...  # moments, unless a collector was killed in the middle: then SWEEP_S at most

A hold ends by itself after `hold_s`, so that a backup that was killed doesn't keep deleted content for ever; the same
call again prolongs it. What users delete meanwhile is out of their sight at once and goes after the hold.

The other side is `begin_sweep` and `end_sweep`, which every collector calls around each deletion. Both sides lock one
row first, so of a hold and a deletion that begin at the same moment the later one sees the earlier one.
"""

from __future__ import annotations

from dataclasses import dataclass

from sqlalchemy import delete, exists, select
from sqlalchemy.orm import Session

from batchsvc.batches.tables import CollectionLock
from batchsvc.db.session import database_now_ms

SWEEP_S = 300.0  # that a deletion of some hundred objects never takes: a client gives up on a store before
_HOLD, _SWEEP, _MUTEX = "hold", "sweep", ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Hold:
    """Somebody who needs all objects to stay, why, and until when at the latest."""

    holder: str
    reason: str
    until_ms: int


def hold_collection(session: Session, holder: str, *, reason: str, hold_s: float) -> int:
    """Let no object be deleted for `hold_s` seconds, or until `release_collection`. Returns when it ends, in ms.

    `holder` names who wants it; the same holder again moves the end. What a collector has begun before goes on: wait
    until `is_collecting` is false.
    """
    _lock(session)
    until_ms = database_now_ms(session) + round(hold_s * 1000)
    session.merge(CollectionLock(holder=_named(_HOLD, holder), kind=_HOLD, until_ms=until_ms, reason=reason[:255]))
    session.flush()
    return until_ms


def release_collection(session: Session, holder: str) -> bool:
    """End a hold. False: there was none of this holder, or it had ended by itself: objects may be gone since."""
    now = database_now_ms(session)
    gone = delete(CollectionLock).where(CollectionLock.holder == _named(_HOLD, holder))
    until_ms = session.scalar(gone.returning(CollectionLock.until_ms))
    return until_ms is not None and until_ms > now


def holds(session: Session) -> list[Hold]:
    """The holds that count, the one that ends first first."""
    wanted = (CollectionLock.kind == _HOLD, CollectionLock.until_ms > database_now_ms(session))
    named = select(CollectionLock.holder, CollectionLock.reason, CollectionLock.until_ms)  # all that old schemas have
    rows = session.execute(named.where(*wanted).order_by(CollectionLock.until_ms))
    return [Hold(holder=row.holder.removeprefix(f"{_HOLD}:"), reason=row.reason, until_ms=row.until_ms) for row in rows]


def is_collecting(session: Session) -> bool:
    """Whether somebody is deleting objects at this moment, or was killed doing so less than `SWEEP_S` ago."""
    return _has(session, _SWEEP)


def begin_sweep(session: Session, owner: str) -> bool:
    """Ask to delete some objects. True: `end_sweep` follows within `SWEEP_S`. False: somebody needs them all."""
    _lock(session)
    if _has(session, _HOLD):
        return False
    until_ms = database_now_ms(session) + round(SWEEP_S * 1000)
    session.merge(CollectionLock(holder=_named(_SWEEP, owner), kind=_SWEEP, until_ms=until_ms, reason=""))
    session.flush()
    return True


def end_sweep(session: Session, owner: str) -> None:
    """Note that the objects are gone; and forget the sweeps and holds that have ended by themselves."""
    over = (CollectionLock.holder != _MUTEX, CollectionLock.until_ms <= database_now_ms(session))
    session.execute(delete(CollectionLock).where(CollectionLock.holder == _named(_SWEEP, owner)))
    session.execute(delete(CollectionLock).where(*over))


def _has(session: Session, kind: str) -> bool:
    """Whether there is a row of this kind that counts."""
    counts = (CollectionLock.kind == kind, CollectionLock.until_ms > database_now_ms(session))
    return bool(session.scalar(select(exists().where(*counts))))


def _lock(session: Session) -> None:
    session.execute(select(CollectionLock.holder).where(CollectionLock.holder == _MUTEX).with_for_update())


def _named(kind: str, name: str) -> str:
    return f"{kind}:{name}"[:128]
