"""SQL of prefill workers: where they are found, as long as they give signs of life."""

from __future__ import annotations

from sqlalchemy import delete, select
from sqlalchemy.orm import Session

from batchsvc.batches.tables import PrefillEngine
from batchsvc.db.session import database_now_ms

_FORGOTTEN_MS = 600_000


def beat(session: Session, engine_id: str, model_digest: str, address: str) -> None:
    """Say that a prefill worker is alive, and where; those that were silent for ten minutes are forgotten."""
    now_ms = database_now_ms(session)
    session.execute(delete(PrefillEngine).where(PrefillEngine.beat_ms < now_ms - _FORGOTTEN_MS))
    row = session.get(PrefillEngine, engine_id)
    if row is None:
        row = PrefillEngine(id=engine_id, model_digest=model_digest)
        session.add(row)
    row.address, row.beat_ms = address, now_ms


def retire(session: Session, engine_id: str) -> None:
    """Forget one that ended in order."""
    session.execute(delete(PrefillEngine).where(PrefillEngine.id == engine_id))


def addresses(session: Session, model_digest: str, silent_s: float) -> list[str]:
    """Of those of a model that gave a sign of life within so many seconds."""
    lately = PrefillEngine.beat_ms > database_now_ms(session) - round(silent_s * 1000)
    alive = select(PrefillEngine.address).where(PrefillEngine.model_digest == model_digest, lately)
    return list(session.scalars(alive.order_by(PrefillEngine.id)))
