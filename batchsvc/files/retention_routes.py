"""Routes of how long files of a project live, for the admin key."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter

from batchsvc.accounts.caller import AdminDep
from batchsvc.files import retention_service
from batchsvc.files.retention_schemas import ChangeRetention
from batchsvc.http.deps import ContextDep

router = APIRouter(prefix="/v1/admin/projects/{project}/retention")


@router.get("")
def show_retention(_admin: AdminDep, context: ContextDep, project: str) -> dict[str, Any]:
    """How long inputs and results of a project live whose calls don't say."""
    with context.db.reading() as session:
        return retention_service.show(session, project)


@router.post("")
def change_retention(admin: AdminDep, context: ContextDep, project: str, body: ChangeRetention) -> dict[str, Any]:
    """Change that, for files to come; what isn't named stays, and null means the setting's again."""
    changes = body.model_dump(exclude_unset=True)
    return context.db.run(lambda session: retention_service.change(session, admin.actor, project, changes))
