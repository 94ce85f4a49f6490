"""Routes of registered stores, for the admin key."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter

from batchsvc.accounts.caller import AdminDep
from batchsvc.egress import Egress
from batchsvc.files import store_administration, store_service
from batchsvc.files.store_schemas import RegisterStore, deleted_object, store_object
from batchsvc.files.store_service import OwnStore
from batchsvc.http.deps import ContextDep

router = APIRouter(prefix="/v1/admin/stores")


@router.post("")
def register_store(admin: AdminDep, context: ContextDep, body: RegisterStore) -> dict[str, Any]:
    """Let a project reach a prefix of a bucket; the same again changes its keys, its server or its region."""
    settings = context.settings
    store_service.check_endpoint(body.endpoint, Egress.parse(settings.egress_allow))
    own = OwnStore.of(settings)
    return context.db.run(lambda session: store_object(store_administration.register(session, admin.actor, body, own)))


@router.get("")
def list_stores(_admin: AdminDep, context: ContextDep) -> dict[str, Any]:
    """All stores of all projects, without their secrets."""
    with context.db.reading() as session:
        return {"object": "list", "data": [store_object(row) for row in store_service.list_stores(session)]}


@router.delete("/{store_id}")
def remove_store(admin: AdminDep, context: ContextDep, store_id: str) -> dict[str, Any]:
    """Forget a store and its keys."""
    with context.db.transaction() as session:
        store_administration.remove(session, admin.actor, store_id)
    return deleted_object(store_id)
