"""Routes of models: list, retrieve and demand for everybody; register, alias and unalias for the admin key."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Query
from sqlalchemy.orm import Session

from batchsvc.accounts.caller import AdminDep, CallerDep
from batchsvc.accounts.service import Caller
from batchsvc.batches import model_administration, models, queries, scaling_queries, worker_queries
from batchsvc.batches.offpeak import Night
from batchsvc.batches.schemas import CreateAlias, RegisterModel, demand_object, model_object
from batchsvc.batches.tables import Model
from batchsvc.batches.waiting import alive_since_ms
from batchsvc.errors import NotFoundError
from batchsvc.http.deps import Context, ContextDep

router = APIRouter(prefix="/v1")


@router.get("/models")
def list_models(caller: CallerDep, context: ContextDep) -> dict[str, Any]:
    """All models that the caller may use, then all aliases of these."""
    with context.db.reading() as session:
        rows = models.list_models(session, project_id=_eyes(caller))
        return {"object": "list", "data": _show(session, context, rows)}


@router.get("/models/{name:path}")
def retrieve_model(caller: CallerDep, context: ContextDep, name: str) -> dict[str, Any]:
    """One model or alias."""
    with context.db.reading() as session:
        row = queries.model(session, name)
        if row is None or models.resolve(session, name, project_id=_eyes(caller)) is None:
            raise NotFoundError(f"The model '{name}' does not exist.", code="model_not_found", param="model")
        return _show(session, context, [row])[0]


@router.get("/scaling")
def show_demand(
    caller: CallerDep, context: ContextDep, model: Annotated[str | None, Query(max_length=255)] = None
) -> dict[str, Any]:
    """What the workers of a model could do now, for an autoscaler; without `model`, of each model."""
    settings = context.settings
    with context.db.reading() as session:
        seen = {row.id for row in models.list_models(session, project_id=_eyes(caller))}
        demands = scaling_queries.demands(session, Night.from_settings(settings), settings.renew_s)
        demands = [demand for demand in demands if demand.model in seen]
        if model is None:
            return {"object": "list", "data": [demand_object(demand) for demand in demands]}
        row = models.resolve(session, model, project_id=_eyes(caller))
    for demand in demands:
        if row is not None and demand.digest == row.digest:
            return demand_object(demand)
    raise NotFoundError(f"The model '{model}' does not exist.", code="model_not_found", param="model")


@router.post("/admin/models")
def register_model(admin: AdminDep, context: ContextDep, body: RegisterModel) -> dict[str, Any]:
    """Make a model known, or update it."""
    with context.db.transaction() as session:
        row = model_administration.register(
            session,
            admin.actor,
            body.name,
            path=body.path,
            digest=body.digest,
            context_tokens=body.context_tokens,
            weight_format=body.weight_format,
            kv_format=body.kv_format,
            project_id=body.project_id,
        )
        return _show(session, context, [row])[0]


@router.post("/admin/aliases")
def create_alias(admin: AdminDep, context: ContextDep, body: CreateAlias) -> dict[str, Any]:
    """Let a name mean a model, from the next batch on."""
    with context.db.transaction() as session:
        return _show(session, context, [model_administration.alias(session, admin.actor, body.name, body.target)])[0]


@router.delete("/admin/aliases/{name:path}")
def delete_alias(admin: AdminDep, context: ContextDep, name: str) -> dict[str, Any]:
    """Forget an alias."""
    with context.db.transaction() as session:
        model_administration.unalias(session, admin.actor, name)
    return {"id": name, "object": "model", "deleted": True}


def _eyes(caller: Caller) -> str | None:
    """Whose models the caller sees: its project's; an operator all."""
    return None if caller.is_admin else caller.project_id


def _show(session: Session, context: Context, rows: list[Model]) -> list[dict[str, Any]]:
    since_ms = alive_since_ms(session, context.settings.renew_s)
    workers, notes = queries.live_workers_by_model(session, since_ms), worker_queries.notes(session, since_ms)
    targets = [queries.model(session, row.alias_of) if row.alias_of else None for row in rows]
    return [model_object(row, target, workers, notes) for row, target in zip(rows, targets, strict=True)]
