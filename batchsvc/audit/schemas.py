"""Audit rows as the official client reads them: OpenAI's fields, and what happened under the name of the event."""

from __future__ import annotations

from typing import Any

from batchsvc.audit.actor import ActorKind
from batchsvc.audit.tables import AuditRow

_PAYLOADS = {"created": "data", "registered": "data", "updated": "changes_requested"}  # by the verb; else beside the id


def row_object(row: AuditRow) -> dict[str, Any]:
    """One row. `ip_address` of an actor with a key is ours; commands and the service are sessions without one."""
    payload = _PAYLOADS.get(row.action.rpartition(".")[2])
    happened = {"id": row.target_id, **({payload: row.details} if payload else row.details)}
    return {
        "object": "organization.audit_log",
        "id": row.id,
        "type": row.action,
        "effective_at": row.effective_ms // 1000,
        "actor": _actor_object(row),
        "project": None if row.project_id is None else {"id": row.project_id},
        row.action: happened,
    }


def _actor_object(row: AuditRow) -> dict[str, Any]:
    if row.actor_kind == ActorKind.API_KEY:
        key = {"id": row.actor_id, "project_id": row.actor_project_id, "ip_address": row.address}
        return {"type": "api_key", "api_key": key}
    return {"type": "session", "session": {"user": {"id": row.actor_id}, "ip_address": row.address}}
