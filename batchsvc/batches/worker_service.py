"""What the engine workers of a deployment do right now, from their heartbeats."""

from __future__ import annotations

from typing import Any

from sqlalchemy.orm import Session

from batchsvc.batches import queries, worker_queries
from batchsvc.batches.engine_view import view
from batchsvc.batches.waiting import alive_since_ms
from batchsvc.db.session import database_now_ms


def shown_workers(session: Session, renew_s: float) -> dict[str, Any]:
    """Those that are alive."""
    now_ms, names = database_now_ms(session), queries.names_by_digest(session)
    return {
        "object": "list",
        "data": [
            view(
                worker.stats or {},
                worker_id=worker.id,
                model=names.get(worker.model_digest, worker.model_digest[:12]),
                model_digest=worker.model_digest,
                is_draining=worker.is_draining,
                silent_s=max(now_ms - worker.beat_ms, 0) / 1000,
            )
            for worker in worker_queries.alive(session, alive_since_ms(session, renew_s))
        ],
    }
