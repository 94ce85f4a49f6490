"""Which models workers serve: what an operator loads and unloads, audited, and what workers make of it.

A worker serves what its settings name; a load or an unload changes that for all workers or for those of a name, from
their next look on, and for every later start. Several models on one worker take turns (model_switch.py). What a batch
waits for isn't taken away: an unload that would leave unfinished batches without any worker is refused.
"""

from __future__ import annotations

from typing import Any

from sqlalchemy.orm import Session

from batchsvc.audit.actions import Action
from batchsvc.audit.actor import Actor
from batchsvc.audit.service import record
from batchsvc.batches import hold_queries, models, switch_queries, waiting
from batchsvc.batches.tables import Model, Worker
from batchsvc.errors import InvalidRequestError, NotFoundError

_NAMED = 10  # batches in a refusal


def load(session: Session, actor: Actor, name: str, worker: str | None, renew_s: float) -> dict[str, Any]:
    """Have all workers, or those of a name, serve a registered model, too."""
    row = _model(session, name)
    _known(session, worker)
    switch_queries.order(session, worker or switch_queries.EVERYBODY, row.digest, is_loaded=True)
    if worker is None:
        switch_queries.forget_orders(session, row.digest)
    record(session, actor, Action.MODEL_LOADED, row.id, details={"worker": worker or "all"})
    return _shown(session, row, worker, renew_s)


def unload(session: Session, actor: Actor, name: str, worker: str | None, renew_s: float) -> dict[str, Any]:
    """Have all workers, or those of a name, serve a model no more. Raises InvalidRequestError where unfinished batches
    would be left without a worker, or a worker without a model."""
    row = _model(session, name)
    _known(session, worker)
    switch_queries.lock_models(session)  # what another unload took away counts, or the two leave nobody
    alive = switch_queries.able(session, waiting.alive_since_ms(session, renew_s))
    serving = {one.id: one for one in alive.get(row.digest, []) if row.digest in _told(session, one)}
    leaving = {key: one for key, one in serving.items() if worker is None or one.name == worker}
    for one in leaving.values():
        if _told(session, one) <= {row.digest}:
            raise InvalidRequestError(
                f"{row.id} is the only model of the worker {one.name or one.id}: load another one there first, or stop "
                "that worker.",
                code="last_model",
                param="model",
            )
    if leaving.keys() == serving.keys() and (needed := switch_queries.unfinished(session, row.digest, _NAMED + 1)):
        named = ", ".join(needed[:_NAMED]) + (" and others" if len(needed) > _NAMED else "")
        raise InvalidRequestError(
            f"{row.id} can't be unloaded, because unfinished batches need it: {named}. Let them end, or cancel them.",
            code="model_in_use",
            param="model",
        )
    switch_queries.order(session, worker or switch_queries.EVERYBODY, row.digest, is_loaded=False)
    if worker is None:
        switch_queries.forget_orders(session, row.digest)
    record(session, actor, Action.MODEL_UNLOADED, row.id, details={"worker": worker or "all"})
    return _shown(session, row, worker, renew_s)


def served_by(session: Session, renew_s: float) -> dict[str, list[str]]:
    """By the digests of models, the living workers that serve them now, load them, or do so in turn."""
    found: dict[str, list[str]] = {}
    for digest, workers in switch_queries.able(session, waiting.alive_since_ms(session, renew_s)).items():
        found[digest] = sorted(_role(worker, digest) for worker in workers)
    return found


def _told(session: Session, worker: Worker) -> set[str]:
    """What it should serve: as its last heartbeat says, and what was ordered since."""
    return set(switch_queries.wanted(session, [worker.name or worker.id], worker.models or [worker.model_digest]))


def _role(worker: Worker, digest: str) -> str:
    name = worker.name or worker.id
    if worker.switching_to == digest:
        return f"{name} (loads it)"
    is_now = worker.switching_to is None and worker.model_digest == digest
    return name if is_now else f"{name} (in turn)"


def _model(session: Session, name: str) -> Model:
    row = models.resolve(session, name, project_id=None)
    if row is None:
        raise NotFoundError(
            f"There is no model {name}: `batchsvc models add {name}` registers one.",
            code="model_not_found",
            param="model",
        )
    return row


def _known(session: Session, worker: str | None) -> None:
    if worker is not None and not [row for row in hold_queries.workers_of(session, [worker]) if row.name == worker]:
        raise NotFoundError(
            f"There is no worker by the name {worker}: `batchsvc workers list` shows them.", param="worker"
        )


def _shown(session: Session, row: Model, worker: str | None, renew_s: float) -> dict[str, Any]:
    return {
        "object": "model.loading",
        "model": row.id,
        "digest": row.digest,
        "worker": worker,
        "served_by": served_by(session, renew_s).get(row.digest, []),
    }
