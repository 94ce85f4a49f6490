"""SQL of engine workers: a row for every start of a process, its heartbeat, and its end."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Delete, delete, exists, func, select, update
from sqlalchemy.orm import Session

from batchsvc import mode
from batchsvc.batches import hold_queries
from batchsvc.batches.tables import ClaimHold, Model, Unit, Worker
from batchsvc.db.session import database_now_ms


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """What is the same for every start of a worker: its name, and what it serves in turn (None: its one model)."""

    name: str | None = None
    models: tuple[str, ...] | None = None


NO_PLACE = Place()


def register(session: Session, worker_id: str, model_digest: str, place: Place = NO_PLACE) -> None:
    """Make a worker known that is ready to claim, or let one that was loading be ready."""
    row, now = session.get(Worker, worker_id), database_now_ms(session)
    if row is None:
        row = Worker(id=worker_id)
        session.add(row)
    row.name, row.models = place.name, None if place.models is None else list(place.models)
    row.model_digest, row.switching_to, row.beat_ms, row.is_draining = model_digest, None, now, False
    session.flush()
    row.is_draining = hold_queries.of_worker(session, worker_id) is not None


def loading(session: Session, worker_id: str, model_digest: str, place: Place) -> None:
    """Say that a worker is alive that can't claim yet, because it loads its model."""
    register(session, worker_id, model_digest, place)
    row = session.get_one(Worker, worker_id)
    row.switching_to, row.is_draining = model_digest, True


def change_over(session: Session, worker_id: str, digest: str) -> None:
    """Say that a worker serves its model no more, and will load another one."""
    row = session.get(Worker, worker_id)
    if row is not None:
        row.switching_to, row.is_draining = digest, True
        _let_go(session, {row.model_digest: database_now_ms(session)})


def note_swap(session: Session, digest: str, swap_ms: int) -> None:
    """Record what it took a worker to change over to this model."""
    session.execute(update(Model).where(Model.digest == digest).values(swap_ms=swap_ms))


def note_formats(
    session: Session, model_digest: str, *, weight_format: str, kv_format: str, quality: dict[str, Any] | None
) -> None:
    """Record what a worker really runs this model in, and what is known of its quality: `/v1/models` shows it, and
    batches planned from now on pin it."""
    served = update(Model).where(Model.digest == model_digest)
    session.execute(served.values(weight_format=weight_format, kv_format=kv_format, quality=quality))


def beat(
    session: Session,
    worker_id: str,
    model_digest: str,
    *,
    is_draining: bool,
    stats: dict[str, Any],
    place: Place = NO_PLACE,
) -> str | None:
    """Say that a worker is alive, and what its engine does. One that was taken for dead is known again. Returns why an
    operator has drained it, or None."""
    row = session.get(Worker, worker_id)
    if row is None:
        register(session, worker_id, model_digest, place)
        row = session.get_one(Worker, worker_id)
    drained = hold_queries.of_worker(session, worker_id)
    row.beat_ms, row.stats = database_now_ms(session), stats
    row.is_draining = is_draining or drained is not None
    row.models = None if place.models is None else list(place.models)
    return drained


def retire(session: Session, worker_id: str) -> None:
    """Forget a worker that ended in order, and its drain if that was of this process alone."""
    ended = delete(Worker).where(Worker.id == worker_id)
    _forgotten(session, ended, database_now_ms(session))


def mark_dead(session: Session, host: str, pid: int) -> None:
    """Have nobody wait for a worker whose process is known to have ended. Its name is known for a while, so that it
    can be drained before it starts again."""
    rows = session.scalars(select(Worker).where(Worker.id.startswith(f"{host}:{pid}:", autoescape=True))).all()
    served: dict[str, int] = {}
    for row in rows:
        if row.switching_to is None:
            served[row.model_digest] = max(row.beat_ms, served.get(row.model_digest, 0))
        row.is_draining, row.switching_to = True, None
    session.flush()
    _let_go(session, served)


def forget_dead(session: Session, silent_s: float) -> int:
    """Forget workers that were silent for `silent_s` and hold no unit any more. Returns how many."""
    holds = exists(select(Unit.id).where(Unit.owner == Worker.id, Unit.state == "leased"))
    silent = Worker.beat_ms < database_now_ms(session) - round(silent_s * 1000)
    return _forgotten(session, delete(Worker).where(silent, ~holds), None)


def _forgotten(session: Session, which: Delete, at_ms: int | None) -> int:
    """Delete workers, and the drains of these processes: nobody goes by their ids again. They let go of their models
    at that time, or with their last heartbeat."""
    gone = session.execute(which.returning(Worker.id, Worker.model_digest, Worker.switching_to, Worker.beat_ms)).all()
    if not gone:
        return 0
    targets = [hold_queries.WORKER + row.id for row in gone]
    session.execute(delete(ClaimHold).where(ClaimHold.target.in_(targets)))
    served: dict[str, int] = {}
    for row in gone:
        if row.switching_to is None:  # else it had let go before, or had nothing yet
            served[row.model_digest] = max(row.beat_ms if at_ms is None else at_ms, served.get(row.model_digest, 0))
    _let_go(session, served)
    return len(gone)


def _let_go(session: Session, served: Mapping[str, int]) -> None:
    """Note until when a worker served these models: their work waits since then, not since it began (model_switch.py).
    The rows are locked in the order in which everybody does."""
    found = select(Model).where(Model.digest.in_(served)).order_by(Model.id).with_for_update()
    for row in session.scalars(found.execution_options(populate_existing=True)):
        row.served_ms = max(row.served_ms, served[row.digest or ""])
    session.flush()


def alive(session: Session, since_ms: int, *, with_test_mode: bool = False) -> list[Worker]:
    """Workers that gave a sign of life since then; those of test mode (of control processes), if asked for."""
    found = select(Worker).where(Worker.beat_ms >= since_ms).order_by(Worker.id)
    return list(session.scalars(found if with_test_mode else found.where(Worker.model_digest != mode.DIGEST)))


def notes(session: Session, since_ms: int) -> dict[str, str]:
    """What workers that are alive wait for, by the digest of their model; one of several."""
    alive = session.execute(select(Worker.model_digest, Worker.stats).where(Worker.beat_ms >= since_ms))
    return {digest: str(stats["note"]) for digest, stats in alive if stats and stats.get("note")}


def units_held(session: Session) -> dict[str, int]:
    """How many units each worker has leased. Served by ix_units_lease."""
    held = select(Unit.owner, func.count()).where(Unit.state == "leased").group_by(Unit.owner)
    return {owner: count for owner, count in session.execute(held) if owner is not None}


def with_calls(session: Session, worker_ids: Collection[str]) -> set[str]:
    """Those of these workers that had calls open when they were last heard of."""
    found = session.execute(select(Worker.id, Worker.stats).where(Worker.id.in_(worker_ids)))
    return {worker_id for worker_id, stats in found if stats and stats.get("calls")}


def is_beating(session: Session, host: str, pid: int, silent_s: float = 15) -> bool:
    """Whether this process is an engine worker that is ready and was heard of lately."""
    lately = Worker.beat_ms > database_now_ms(session) - round(silent_s * 1000)
    mine = Worker.id.startswith(f"{host}:{pid}:", autoescape=True)
    ready = (mine, lately, Worker.switching_to.is_(None))
    return session.scalars(select(Worker.id).where(*ready).limit(1)).first() is not None
