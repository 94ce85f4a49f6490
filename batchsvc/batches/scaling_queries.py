"""How much there is to do for the workers of a model: the signal for autoscalers, from SQL alone.

Only work that may run counts (unit_queries.scaling): what waits for the night or for quota, is paused or has ended
wants no worker. The backlog also holds what is left of the units that workers have, so that nobody takes away the one
that runs the last unit.
"""

from __future__ import annotations

from dataclasses import dataclass

from sqlalchemy import func, select
from sqlalchemy.orm import Session

from batchsvc.batches import queries, unit_queries
from batchsvc.batches.offpeak import Night
from batchsvc.batches.tables import Part, Unit
from batchsvc.batches.unit_queries import Backlog
from batchsvc.batches.waiting import alive_since_ms
from batchsvc.db.session import database_now_ms

_LOOK_BACK_MS = 10 * 60_000
_LEAST_SEEN_MS = 60_000  # a first part alone would tell of any rate
_ASSUMED_TOKENS_PER_S = 1_000.0  # of one worker, while nothing was seen of its model lately


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """What a model's workers could do now. `tokens_per_s` is one worker's rate, in predicted tokens of work."""

    model: str
    digest: str
    units_claimable: int
    backlog_tokens: int
    tokens_per_s: float
    workers: int

    @property
    def backlog_seconds(self) -> float:
        """How long one worker alone would take."""
        return self.backlog_tokens / self.tokens_per_s


def demands(session: Session, night: Night, renew_s: float) -> list[Demand]:
    """One for each model, by its oldest name; those without work have zeros, so that a scaler sees them go."""
    now = database_now_ms(session)
    backlogs = unit_queries.scaling(session, night.is_open(now))
    workers = queries.live_workers_by_model(session, alive_since_ms(session, renew_s))
    rates = _rates(session, workers, now)
    return [
        Demand(
            model=name,
            digest=digest,
            units_claimable=backlogs.get(digest, Backlog(0, 0)).claimable,
            backlog_tokens=backlogs.get(digest, Backlog(0, 0)).tokens,
            tokens_per_s=rates.get(digest, _ASSUMED_TOKENS_PER_S),
            workers=workers.get(digest, 0),
        )
        for digest, name in queries.names_by_digest(session).items()
    ]


def _rates(session: Session, workers: dict[str, int], now_ms: int) -> dict[str, float]:
    """What one worker of a model did in a second, on average over the last minutes. Served by ix_parts_created."""
    done = (
        select(Unit.model_digest, func.sum(Part.est_tokens), func.min(Part.created_ms))
        .join(Unit, Unit.id == Part.unit_id)
        .where(Part.created_ms >= now_ms - _LOOK_BACK_MS, Part.unit_id.is_not(None), Part.est_tokens > 0)
        .group_by(Unit.model_digest)
    )
    return {
        digest: int(tokens) * 1000 / max(now_ms - first_ms, _LEAST_SEEN_MS) / max(1, workers.get(digest, 0))
        for digest, tokens, first_ms in session.execute(done)
        if digest is not None
    }
