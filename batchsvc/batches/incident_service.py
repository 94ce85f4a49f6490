"""What an operator does in an incident, each audited in its own transaction: drain workers, stop claims and batches,
see what is stuck or in quarantine, and let it go on.

Whatever is stopped here is stopped by a row that claims read (hold_queries.py) or that belongs to the batch, so it
outlives every process, and it is ended by the twin of what began it.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from sqlalchemy.orm import Session

from batchsvc.audit.actions import Action
from batchsvc.audit.actor import Actor
from batchsvc.audit.service import record
from batchsvc.batches import (
    export_queries,
    hold_queries,
    models,
    outlook,
    poison_queries,
    quarantine_queries,
    stuck,
    stuck_queries,
    worker_service,
)
from batchsvc.batches.estimate import Habits
from batchsvc.batches.lifecycle import TERMINAL
from batchsvc.batches.offpeak import Night
from batchsvc.batches.schemas import export_shown
from batchsvc.batches.tables import Batch
from batchsvc.errors import InvalidRequestError, NotFoundError

QUIET_S = 600.0
"""How long a batch may finish nothing before that alone is called stuck, unless an operator says."""
BY_OPERATOR = "by the operator"
_REASON_CHARS = 255
_DIGEST_CHARS = 16  # what is shown of the digest of a model without a name


# ---- workers


def drain(session: Session, actor: Actor, worker: str, reason: str | None, renew_s: float) -> dict[str, Any]:
    """Have a worker, by name or id, claim nothing more; what it has it brings to its end. By its name it stays drained
    when it starts again. Again changes the reason."""
    rows = hold_queries.workers_of(session, [worker])
    if not rows:
        raise NotFoundError(f"There is no worker {worker}: `batchsvc workers list` shows them.", param="worker")
    reason = _reason(reason)
    hold_queries.hold(session, hold_queries.WORKER + worker, reason)
    for row in rows:
        row.is_draining = True  # at once, so that nothing waits for it; it learns of it within a second
    record(session, actor, Action.WORKER_DRAINED, worker, details={"reason": reason})
    return worker_service.named(session, worker, renew_s)


def undrain(session: Session, actor: Actor, worker: str, renew_s: float) -> dict[str, Any]:
    """Let a worker claim again: by its name all that goes by it, also what was drained by id."""
    rows = hold_queries.workers_of(session, [worker])
    names = [worker, *(row.id for row in rows if row.name == worker)]
    if not [name for name in names if hold_queries.end(session, hold_queries.WORKER + name)]:
        by_name = {row.name for row in rows if row.name and row.name != worker} & _drained(session)
        hint = f": it is drained by its name, so undrain {min(by_name)}" if by_name else ""
        raise InvalidRequestError(f"The worker {worker} isn't drained{hint}.", param="worker")
    for row in rows:
        if row.switching_to is None and hold_queries.of_worker(session, row.id) is None:
            row.is_draining = False  # one whose process is ending says so again with its next heartbeat
    record(session, actor, Action.WORKER_UNDRAINED, worker)
    return worker_service.named(session, worker, renew_s)


def _drained(session: Session) -> set[str]:
    prefix = hold_queries.WORKER
    return {target.removeprefix(prefix) for target in hold_queries.every(session) if target.startswith(prefix)}


# ---- claims


def pause_claims(session: Session, actor: Actor, model: str | None, reason: str | None) -> dict[str, Any]:
    """Have nobody claim anything new, or nothing of one model; what runs goes on. Again changes the reason."""
    reason = _reason(reason)
    target, name = _target(session, model)
    hold_queries.hold(session, target, reason)
    record(session, actor, Action.CLAIMS_PAUSED, name or "all", details={"reason": reason})
    return claims(session)


def resume_claims(session: Session, actor: Actor, model: str | None) -> dict[str, Any]:
    """End a pause of claims: that of all, or of one model; neither ends the other. A model's may also be named as
    `claims` shows it, or by its digest: new weights may have come under its name since."""
    target, name = _held_target(session, model)
    if not hold_queries.end(session, target):
        others = [row["model"] or "all models" for row in claims(session)["data"]]
        hint = f": those of {' and '.join(others)} are" if others else ""
        raise InvalidRequestError(
            f"Claims of {name or 'all models'} aren't paused{hint}.", code="not_paused", param="model"
        )
    record(session, actor, Action.CLAIMS_RESUMED, name or "all")
    return claims(session)


def claims(session: Session) -> dict[str, Any]:
    """Which claims are paused, since when, and why."""
    names = {row.digest: row.id for row in reversed(models.list_models(session, project_id=None)) if not row.alias_of}
    rows = []
    for target, hold in hold_queries.every(session).items():
        if target.startswith(hold_queries.WORKER):
            continue
        digest = target.removeprefix(hold_queries.MODEL)
        model = None if target == hold_queries.EVERYTHING else names.get(digest, digest[:_DIGEST_CHARS])
        rows.append(
            {"object": "claim_hold", "model": model, "reason": hold.reason, "created_at": hold.created_ms // 1000}
        )
    return {"object": "list", "data": rows}


def _held_target(session: Session, model: str | None) -> tuple[str, str | None]:
    holds = hold_queries.every(session)
    row = None if model is None else models.resolve(session, model, project_id=None)
    if model is not None and (row is None or hold_queries.MODEL + row.digest not in holds):
        for target in holds:
            digest = target.removeprefix(hold_queries.MODEL)
            if target != digest and model in (digest, digest[:_DIGEST_CHARS]):
                return target, digest[:_DIGEST_CHARS]
    return _target(session, model)


def _target(session: Session, model: str | None) -> tuple[str, str | None]:
    if model is None:
        return hold_queries.EVERYTHING, None
    row = models.resolve(session, model, project_id=None)
    if row is None:
        raise NotFoundError(f"There is no model {model}.", code="model_not_found", param="model")
    return hold_queries.MODEL + row.digest, row.id


# ---- batches


def pause_batch(session: Session, actor: Actor, batch_id: str, reason: str | None) -> Batch:
    """Stop a batch of any project until an operator resumes it. One that was paused so stays as it was; the audit row
    has the reason that was given now, and the one that the batch goes on to show."""
    reason = _reason(reason)
    row = poison_queries.pause(session, batch_id, reason)
    details = {"reason": reason}
    if row.pause_reason and row.pause_reason != reason:
        details["shown"] = row.pause_reason
    record(session, actor, Action.BATCH_PAUSED, batch_id, project_id=row.project_id, details=details)
    return row


def resume_batch(session: Session, actor: Actor, batch_id: str) -> Batch:
    """End an operator's pause of a batch, or one for crashes. Its project's own pause stays."""
    row = poison_queries.resume(session, batch_id)
    record(session, actor, Action.BATCH_RESUMED, batch_id, project_id=row.project_id)
    return row


def stuck_batches(session: Session, night: Night, renew_s: float, quiet_s: float) -> dict[str, Any]:
    """Batches of all projects that don't move, each with why and what to type next, the oldest first."""
    rows = stuck_queries.unfinished(session)
    facts = stuck_queries.facts(session, rows, night, renew_s)
    found = [(row, stuck.find(facts[row.id], quiet_s)) for row in rows]
    listed = [_shown(row, one, facts[row.id]) for row, one in found if one is not None and one.is_stuck]
    return {"object": "list", "data": listed}


def why(
    session: Session, batch_id: str, night: Night, habits: Habits, renew_s: float, quiet_s: float
) -> dict[str, Any]:
    """How a batch of any project stands, and why it is no further. Raises NotFoundError."""
    row = session.get(Batch, batch_id)
    if row is None:
        raise NotFoundError(f"There is no batch {batch_id}.", param="batch_id")
    look = outlook.outlooks(session, [row], night, habits)[row.id]
    facts = stuck_queries.facts(session, [row], night, renew_s)[row.id]
    finding = None if row.status in TERMINAL else stuck.find(facts, quiet_s)
    export = export_queries.of_batches(session, [row]).get(batch_id)
    return _shown(row, finding, facts) | look.shown() | {"output_s3": export_shown(row, export)}


def _shown(row: Batch, finding: stuck.Finding | None, facts: stuck.Facts) -> dict[str, Any]:
    return {
        "object": "batch.standing",
        "id": row.id,
        "project_id": row.project_id,
        "status": row.status,
        "model": facts.model or None,
        "is_stuck": finding is not None and finding.is_stuck,
        "reason": finding.reason if finding else None,
        "next": finding.next if finding else None,
        "quiet_s": round(facts.moved_s),
        "units": {"ready": facts.ready, "delayed": facts.delayed, "leased": facts.leased, "suspect": facts.suspects},
        "workers": [holder.name for holder in facts.holders],
        "created_at": row.created_ms // 1000,
        "expires_at": row.expires_ms // 1000,
    }


# ---- quarantine


def quarantine(session: Session, batch_id: str | None) -> dict[str, Any]:
    """Lines that ended engines, and units that run alone because of that; of one batch, or of all."""
    if batch_id is not None and session.get(Batch, batch_id) is None:
        raise NotFoundError(f"There is no batch {batch_id}.", param="batch_id")
    lines = [
        {
            "object": "quarantine.line",
            "batch_id": one.batch_id,
            "project_id": one.project_id,
            "batch_status": one.status,
            "line": one.line,
            "found_at": one.found_ms // 1000,
        }
        for one in quarantine_queries.poison(session, batch_id)
    ]
    suspects = [
        {
            "object": "quarantine.unit",
            "batch_id": one.batch_id,
            "project_id": one.project_id,
            "unit_id": one.unit_id,
            "lines": one.lines,
            "crashes": one.crashes,
            "state": one.state,
        }
        for one in quarantine_queries.suspects(session, batch_id)
    ]
    return {"object": "list", "data": [*lines, *suspects]}


def release(session: Session, actor: Actor, batch_id: str, lines: Collection[int]) -> dict[str, Any]:
    """Let what is in quarantine of a batch run again: these lines, or all of it. Raises InvalidRequestError that says
    why that isn't possible."""
    done = quarantine_queries.release(session, batch_id, lines)
    record(
        session,
        actor,
        Action.QUARANTINE_RELEASED,
        batch_id,
        project_id=done.batch.project_id,
        details={"lines": done.lines, "units": done.units},
    )
    return {
        "object": "quarantine.release",
        "batch_id": batch_id,
        "lines": done.lines,
        "units": done.units,
        "pause_reason": done.batch.pause_reason,
    }


def _reason(text: str | None) -> str:
    """Raises InvalidRequestError for what can't be shown in a line."""
    reason = (text or "").strip() or BY_OPERATOR
    if len(reason) > _REASON_CHARS or not reason.isprintable():
        raise InvalidRequestError(
            f"reason: it must be at most {_REASON_CHARS} printable characters.", code="invalid_value", param="reason"
        )
    return reason
