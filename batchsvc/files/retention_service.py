"""What an operator can do about how long files of a project live; every change is audited."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sqlalchemy.orm import Session

from batchsvc.accounts import service as accounts
from batchsvc.audit.actions import Action
from batchsvc.audit.actor import Actor
from batchsvc.audit.service import record
from batchsvc.errors import InvalidRequestError
from batchsvc.files import life_queries
from batchsvc.files.retention_schemas import retention_object

_COLUMNS = {"input_seconds": "input_life_s", "output_seconds": "output_life_s"}


def show(session: Session, project: str) -> dict[str, Any]:
    """What holds for a project, given by its id or its name. Raises NotFoundError."""
    project_id = accounts.existing_project(session, project).id
    return retention_object(project_id, life_queries.defaults(session, project_id))


def change(session: Session, actor: Actor, project: str, changes: Mapping[str, int | None]) -> dict[str, Any]:
    """Change `input_seconds` or `output_seconds` for files to come. Raises InvalidRequestError if nothing is named."""
    if not changes:
        raise InvalidRequestError(
            "Name what to change: input_seconds or output_seconds.", code="invalid_value", param="input_seconds"
        )
    project_id = accounts.existing_project(session, project).id
    accounts.locked_project(session, project_id)  # two first changes come one after the other
    row = life_queries.set_defaults(session, project_id, **{_COLUMNS[name]: life for name, life in changes.items()})
    record(session, actor, Action.RETENTION_UPDATED, project_id, project_id=project_id, details=dict(changes))
    return retention_object(project_id, row)
