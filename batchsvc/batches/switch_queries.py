"""SQL of workers that serve several models in turn: what operators have loaded and unloaded, what waits for each model,
and who changes over to it. model_switch.py decides."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Select, and_, func, or_, select
from sqlalchemy.orm import Session

from batchsvc.batches import claim_queries, hold_queries, worker_queries
from batchsvc.batches.lifecycle import UNFINISHED
from batchsvc.batches.model_switch import ASSUMED_SWAP_S, Choice, Queue, Seat, next_model
from batchsvc.batches.tables import Batch, Model, ServedModel, Unit, Worker
from batchsvc.db.insert import insert
from batchsvc.db.session import database_now_ms

EVERYBODY = ""  # the worker of orders that are for all
_START_MS = 45_000  # a worker that changes over is silent for so much longer, until it has come to load

_ORDERS = select(ServedModel).execution_options(populate_existing=True)  # upserts pass the session by


@dataclass(frozen=True, slots=True, kw_only=True)
class Installed:
    """A registered model: its oldest name, its digest, and where its files are."""

    name: str
    digest: str
    path: str


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """What a worker looks at before it decides. `is_idle`: it holds no unit, and could claim none of its model."""

    queues: list[Queue]
    is_idle: bool


def installed(session: Session) -> list[Installed]:
    """All models that are registered, each once, the oldest first."""
    rows = session.scalars(select(Model).where(Model.alias_of.is_(None)).order_by(Model.created_ms, Model.id))
    found: dict[str, Installed] = {}
    for row in rows:
        found.setdefault(row.digest, Installed(name=row.id, digest=row.digest, path=row.path))
    return list(found.values())


def order(session: Session, worker: str, digest: str, *, is_loaded: bool) -> None:
    """Have workers of this name (EVERYBODY: all) serve a model, or not, whatever their settings say."""
    ordered = insert(session, ServedModel).values(worker=worker, model_digest=digest, is_loaded=is_loaded)
    session.execute(
        ordered.on_conflict_do_update(index_elements=("worker", "model_digest"), set_={"is_loaded": is_loaded}),
        execution_options={"synchronize_session": False},
    )


def forget_orders(session: Session, digest: str) -> None:
    """Take back what was ordered of a model for workers by name: what is ordered for all holds for them again."""
    for row in session.scalars(_ORDERS.where(ServedModel.model_digest == digest, ServedModel.worker != "")):
        session.delete(row)
    session.flush()


def lock_models(session: Session) -> None:
    """Let nobody else change what is served until this transaction ends."""
    session.execute(select(Model.id).order_by(Model.id).with_for_update()).all()


def wanted(session: Session, names: Iterable[str], own: Sequence[str]) -> list[str]:
    """The digests that a worker serves in turn: those of its settings, and what operators have changed about them.
    An order for its name counts more than one for all. Never empty: the first of its own is there if nothing is."""
    every = session.scalars(_ORDERS.where(ServedModel.worker.in_((EVERYBODY, *names))))
    orders = {row.model_digest: row.is_loaded for row in sorted(every, key=lambda row: row.worker != EVERYBODY)}
    kept = [digest for digest in own if orders.get(digest, True)]
    added = sorted(digest for digest, is_loaded in orders.items() if is_loaded and digest not in own)
    return kept + added or list(own[:1])


def able(session: Session, since_ms: int, *, with_draining: bool = False) -> dict[str, list[Worker]]:
    """Workers that are alive and take work, by the digests of all that they serve in turn; if asked for, also those
    that take none because they were drained, or end."""
    found: dict[str, list[Worker]] = {}
    for worker in worker_queries.alive(session, since_ms):
        if worker.is_draining and worker.switching_to is None and not with_draining:
            continue
        for digest in {worker.model_digest, *(worker.models or [])}:
            found.setdefault(digest, []).append(worker)
    return found


def unfinished(session: Session, digest: str, most: int) -> list[str]:
    """Batches that haven't ended and need this model, the oldest first, at most so many: those that pinned it, and
    those whose units name it."""
    of_units = select(Unit.batch_id).where(Unit.model_digest == digest, Unit.state.in_(("pending", "ready", "leased")))
    needs = or_(Batch.model_digest == digest, Batch.id.in_(of_units))
    found = select(Batch.id).where(Batch.status.in_(UNFINISHED), needs).order_by(Batch.created_ms, Batch.id)
    return list(session.scalars(found.limit(most)))


def look(
    session: Session, worker_id: str, current: str, digests: Sequence[str], *, is_night: bool, since_ms: int
) -> View:
    """What waits for each of these models, seen by one worker. Others that were silent since `since_ms` are dead."""
    now = database_now_ms(session)
    waiting = {row.model_digest: row for row in session.execute(_claimable(digests, now, is_night=is_night))}
    models = {row.digest: row for row in session.scalars(select(Model).where(Model.digest.in_(digests)))}
    held = select(func.count(Unit.id)).where(Unit.owner == worker_id, Unit.state == "leased")
    counts = _workers(session, worker_id, digests, since_ms)
    died = _died(session, digests, since_ms)
    queues = []
    for digest in digests:
        row, model = waiting.get(digest), models.get(digest)
        left_ms = max(model.served_ms if model else 0, died.get(digest, 0))
        waits_ms = max(row.since_ms or now, left_ms) if row else now
        queues.append(
            Queue(
                digest=digest,
                units=int(row.units) if row else 0,
                wait_s=max(now - waits_ms, 0) / 1000,
                slack_s=(row.start_ms - now) / 1000 if row else None,
                workers=counts.get(digest, 0),
                swap_s=ASSUMED_SWAP_S if model is None or model.swap_ms is None else model.swap_ms / 1000,
            )
        )
    has_units = any(queue.units for queue in queues if queue.digest == current)
    return View(queues=queues, is_idle=not has_units and not session.scalar(held))


def change_over(
    session: Session, worker_id: str, seat: Seat, digests: Sequence[str], *, is_night: bool, since_ms: int
) -> Choice | None:
    """Decide once more, while nobody else does for these models, and note it. None: not now."""
    known = {*digests, *([seat.digest] if seat.digest else [])}
    locked = select(Model.digest).where(Model.digest.in_(known)).order_by(Model.id).with_for_update()
    session.execute(locked).all()
    view = look(session, worker_id, seat.digest or "", digests, is_night=is_night, since_ms=since_ms)
    choice = next_model(seat, view.queues)
    if choice is not None:
        worker_queries.change_over(session, worker_id, choice.digest)
    return choice


def _claimable(digests: Collection[str], now: int, *, is_night: bool) -> Select[*tuple[Any, ...]]:
    """Units that could be claimed at this moment, by model."""
    start = func.min(func.coalesce(Batch.latest_start_ms, Batch.expires_ms)).label("start_ms")
    return (
        select(Unit.model_digest, func.count(Unit.id).label("units"), start)
        .add_columns(func.min(Batch.in_progress_ms).label("since_ms"))
        .join(Batch, Batch.id == Unit.batch_id)
        .where(
            Unit.model_digest.in_(digests),
            *claim_queries.claimable(now, is_night=is_night),
            ~hold_queries.is_model_held(Unit.model_digest.expression),
        )
        .group_by(Unit.model_digest)
    )


def _died(session: Session, digests: Collection[str], since_ms: int) -> dict[str, int]:
    """When a worker of a model gave its last sign of life that serves nobody since, by the model."""
    dead = (Worker.switching_to.is_(None), Worker.beat_ms < since_ms, Worker.model_digest.in_(digests))
    found = select(Worker.model_digest, func.max(Worker.beat_ms)).where(*dead).group_by(Worker.model_digest)
    return {digest: int(beat_ms) for digest, beat_ms in session.execute(found)}


def _workers(session: Session, worker_id: str, digests: Collection[str], since_ms: int) -> dict[str, int]:
    """Others that serve a model, or are changing over to it."""
    serves = and_(Worker.switching_to.is_(None), Worker.is_draining.is_(False), Worker.beat_ms >= since_ms)
    comes = and_(Worker.switching_to.is_not(None), Worker.beat_ms >= since_ms - _START_MS)
    model = func.coalesce(Worker.switching_to, Worker.model_digest)
    found = select(model, func.count()).where(Worker.id != worker_id, or_(serves, comes), model.in_(digests))
    return {digest: int(count) for digest, count in session.execute(found.group_by(model))}
