"""What an operator changes about stores of tenants, with its audit row in the same transaction; never their keys."""

from __future__ import annotations

from sqlalchemy.orm import Session

from batchsvc.audit.actions import Action
from batchsvc.audit.actor import Actor
from batchsvc.audit.service import record
from batchsvc.files import store_queries, store_service
from batchsvc.files.store_schemas import RegisterStore
from batchsvc.files.store_service import OwnStore
from batchsvc.files.tables import TenantStore


def register(session: Session, actor: Actor, body: RegisterStore, own: OwnStore) -> TenantStore:
    """Let a project reach a prefix, or reach it otherwise than before."""
    row = store_service.register(session, body, own)
    details = {"uri": f"s3://{row.bucket}/{row.prefix}", "endpoint": row.endpoint, "region": row.region}
    record(session, actor, Action.STORE_REGISTERED, row.id, project_id=row.project_id, details=details)
    return row


def remove(session: Session, actor: Actor, store_id: str) -> None:
    """Forget a store and its keys."""
    project_ids = [row.project_id for row in store_queries.stores(session) if row.id == store_id]
    store_service.remove(session, store_id)
    record(session, actor, Action.STORE_REMOVED, store_id, project_id=project_ids[0] if project_ids else None)
