"""Routes of an operator's verbs for incidents, for the admin key: what the commands `workers`, `claims`, `batches`,
`quarantine` and `models load` do over HTTP."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Query
from sqlalchemy.orm import Session

from batchsvc.accounts.caller import AdminDep
from batchsvc.batches import error_codes, incident_service, loading_service, service
from batchsvc.batches.estimate import Habits
from batchsvc.batches.incident_schemas import LoadModel, PauseClaims, Release, ResumeClaims, Why
from batchsvc.batches.offpeak import Night
from batchsvc.batches.tables import Batch
from batchsvc.http.deps import Context, ContextDep

router = APIRouter(prefix="/v1/admin")
Quiet = Annotated[float, Query(ge=0, le=1e6, description="Seconds without a finished line that count as stuck.")]


@router.post("/workers/{worker}/drain")
def drain_worker(caller: AdminDep, context: ContextDep, worker: str, body: Why | None = None) -> dict[str, Any]:
    """Have a worker, by name or id, claim nothing more; what it has it brings to its end."""
    reason, renew_s = (body or Why()).reason, context.settings.renew_s
    return context.db.once(lambda session: incident_service.drain(session, caller.actor, worker, reason, renew_s))


@router.post("/workers/{worker}/undrain")
def undrain_worker(caller: AdminDep, context: ContextDep, worker: str) -> dict[str, Any]:
    """Let a worker claim again."""
    renew_s = context.settings.renew_s
    return context.db.once(lambda session: incident_service.undrain(session, caller.actor, worker, renew_s))


@router.get("/claims")
def show_claims(_admin: AdminDep, context: ContextDep) -> dict[str, Any]:
    """Which claims are paused, since when, and why."""
    with context.db.reading() as session:
        return incident_service.claims(session)


@router.post("/claims/pause")
def pause_claims(caller: AdminDep, context: ContextDep, body: PauseClaims | None = None) -> dict[str, Any]:
    """Have nobody claim anything new, or nothing of one model; what runs goes on."""
    asked = body or PauseClaims()
    return context.db.once(
        lambda session: incident_service.pause_claims(session, caller.actor, asked.model, asked.reason)
    )


@router.post("/claims/resume")
def resume_claims(caller: AdminDep, context: ContextDep, body: ResumeClaims | None = None) -> dict[str, Any]:
    """End a pause of claims: that of all, or of one model."""
    asked = body or ResumeClaims()
    return context.db.once(lambda session: incident_service.resume_claims(session, caller.actor, asked.model))


@router.get("/batches/stuck")
def list_stuck_batches(
    _admin: AdminDep, context: ContextDep, quiet_s: Quiet = incident_service.QUIET_S
) -> dict[str, Any]:
    """Batches of all projects that don't move, each with why and what to do next."""
    night, renew_s = Night.from_settings(context.settings), context.settings.renew_s
    with context.db.reading() as session:
        return incident_service.stuck_batches(session, night, renew_s, quiet_s)


@router.get("/batches/{batch_id}/why")
def explain_standing(
    _admin: AdminDep, context: ContextDep, batch_id: str, quiet_s: Quiet = incident_service.QUIET_S
) -> dict[str, Any]:
    """How a batch of any project stands, why it is no further, and by which codes lines of it have failed."""
    night, habits = Night.from_settings(context.settings), Habits.from_settings(context.settings)
    with context.db.reading() as session:
        shown = incident_service.why(session, batch_id, night, habits, context.settings.renew_s, quiet_s)
    return shown | {"errors": error_codes.counted(context.db, context.store, batch_id)}


@router.post("/batches/{batch_id}/pause")
def pause_batch(caller: AdminDep, context: ContextDep, batch_id: str, body: Why | None = None) -> dict[str, Any]:
    """Let no more units of a batch of any project run, until an operator resumes it. Its deadline stays."""
    reason = (body or Why()).reason
    return context.db.once(
        lambda session: _shown(session, context, incident_service.pause_batch(session, caller.actor, batch_id, reason))
    )


@router.post("/batches/{batch_id}/resume")
def resume_batch(caller: AdminDep, context: ContextDep, batch_id: str) -> dict[str, Any]:
    """Let a batch of any project run on that an operator has paused, or that crashes have."""
    return context.db.once(
        lambda session: _shown(session, context, incident_service.resume_batch(session, caller.actor, batch_id))
    )


@router.get("/quarantine")
def list_quarantine(
    _admin: AdminDep, context: ContextDep, batch_id: Annotated[str | None, Query(max_length=64)] = None
) -> dict[str, Any]:
    """Lines that ended engines, and units that run alone because of that."""
    with context.db.reading() as session:
        return incident_service.quarantine(session, batch_id)


@router.post("/quarantine/{batch_id}/release")
def release_quarantine(
    caller: AdminDep, context: ContextDep, batch_id: str, body: Release | None = None
) -> dict[str, Any]:
    """Let what is in quarantine of a running batch run again: these lines, or all of it."""
    lines = (body or Release()).lines
    return context.db.once(lambda session: incident_service.release(session, caller.actor, batch_id, lines))


@router.get("/models/served_by")
def show_serving(_admin: AdminDep, context: ContextDep) -> dict[str, Any]:
    """By the digest of each model, the living workers that serve it, load it, or do so in turn with others."""
    with context.db.reading() as session:
        return {"object": "model.serving", "data": loading_service.served_by(session, context.settings.renew_s)}


@router.post("/models/load")
def load_model(caller: AdminDep, context: ContextDep, body: LoadModel) -> dict[str, Any]:
    """Have workers serve a registered model, in turn with those that they serve."""
    renew_s = context.settings.renew_s
    return context.db.once(
        lambda session: loading_service.load(session, caller.actor, body.model, body.worker, renew_s)
    )


@router.post("/models/unload")
def unload_model(caller: AdminDep, context: ContextDep, body: LoadModel) -> dict[str, Any]:
    """Have workers serve a model no more, unless unfinished batches need it."""
    renew_s = context.settings.renew_s
    return context.db.once(
        lambda session: loading_service.unload(session, caller.actor, body.model, body.worker, renew_s)
    )


def _shown(session: Session, context: Context, row: Batch) -> dict[str, Any]:
    settings = context.settings
    night, habits = Night.from_settings(settings), Habits.from_settings(settings)
    return service.show(session, [row], settings.renew_s, night, habits)[0]
