"""What the engine workers of a deployment do right now, from their heartbeats, and what operators have ordered."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from sqlalchemy.orm import Session

from batchsvc.batches import hold_queries, queries, worker_queries
from batchsvc.batches.engine_view import view
from batchsvc.batches.tables import ClaimHold, Worker
from batchsvc.batches.waiting import alive_since_ms
from batchsvc.db.session import database_now_ms


def shown_workers(session: Session, renew_s: float) -> dict[str, Any]:
    """Those that are alive; and names that are drained without a process that goes by them now."""
    workers = worker_queries.alive(session, alive_since_ms(session, renew_s))
    drained = _drained(session)
    seen = {name for worker in workers for name in (worker.id, worker.name)}
    return {
        "object": "list",
        "data": _shown(session, workers, drained),
        "drained_and_gone": [
            {"name": name, "reason": hold.reason, "since": hold.created_ms // 1000}
            for name, hold in drained.items()
            if name not in seen
        ],
    }


def named(session: Session, worker: str, renew_s: float) -> dict[str, Any]:
    """What goes by this name or id and is alive."""
    session.flush()
    since_ms = alive_since_ms(session, renew_s)
    workers = [row for row in hold_queries.workers_of(session, [worker]) if row.beat_ms >= since_ms]
    return {"object": "list", "data": _shown(session, workers, _drained(session))}


def _shown(session: Session, workers: Iterable[Worker], drained: dict[str, ClaimHold]) -> list[dict[str, Any]]:
    now_ms, names = database_now_ms(session), queries.names_by_digest(session)
    units = worker_queries.units_held(session)

    def model_name(digest: str) -> str:
        return names.get(digest, digest[:12])

    rows = []
    for worker in workers:
        hold = drained.get(worker.id) or drained.get(worker.name or "")
        shown = view(
            worker.stats or {},
            worker_id=worker.id,
            model=model_name(worker.model_digest),
            model_digest=worker.model_digest,
            is_draining=worker.is_draining,
            silent_s=max(now_ms - worker.beat_ms, 0) / 1000,
        )
        shown["units"] = units.get(worker.id, 0)
        rows.append(
            shown
            | {
                "name": worker.name,
                "state": state_of(worker, shown["units"], is_drained=hold is not None),
                "drain_reason": hold.reason if hold else None,
                "models": [model_name(digest) for digest in worker.models or [worker.model_digest]],
                "loads": model_name(worker.switching_to) if worker.switching_to else None,
                "note": (worker.stats or {}).get("note") if hold is None else _order(hold),
                "problems": (worker.stats or {}).get("problems") or [],
                "clock_skew_s": _skew_s(worker),
            }
        )
    return rows


def _order(hold: ClaimHold) -> str:
    """Of a drained worker, for operators alone: the reason is theirs."""
    name = hold.target.removeprefix(hold_queries.WORKER)
    return f"The worker {name} is drained ({hold.reason}): `batchsvc workers undrain {name}` ends that."


def state_of(worker: Worker, units: int, *, is_drained: bool) -> str:
    """One word: loading (a model), serving, draining (an operator's order, and it still has units), drained (it has
    none), or ending (its process is)."""
    if worker.switching_to is not None:
        return "loading"
    if is_drained:
        return "draining" if units else "drained"
    return "ending" if worker.is_draining else "serving"


def _skew_s(worker: Worker) -> float | None:
    """How far its clock is ahead of the database's, as its last heartbeat shows it; None: it doesn't say."""
    clock_ms = (worker.stats or {}).get("clock_ms")
    return None if clock_ms is None else round((clock_ms - worker.beat_ms) / 1000, 3)


def _drained(session: Session) -> dict[str, ClaimHold]:
    prefix = hold_queries.WORKER
    holds = hold_queries.every(session)
    return {target.removeprefix(prefix): hold for target, hold in holds.items() if target.startswith(prefix)}
