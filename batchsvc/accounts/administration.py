"""What an operator changes about projects and their limits; each change and its audit row are one transaction.

Routes and commands come through here and through key_administration.py; accounts/service.py has what the service
itself does, which nobody is asked about. Every change locks the rows that it is decided by, a project before its
service accounts, and these before keys: of two changes at once the second sees what the first has done.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sqlalchemy.orm import Session

from batchsvc import mode
from batchsvc.accounts import organization_queries as queries
from batchsvc.accounts import service
from batchsvc.accounts.tables import Project
from batchsvc.audit.actions import Action
from batchsvc.audit.actor import Actor
from batchsvc.audit.service import record
from batchsvc.db.session import database_now_ms
from batchsvc.errors import InvalidRequestError, NotFoundError

LIMITS = ("requests_per_minute", "max_open_batches", "max_stored_bytes")


def create_project(session: Session, actor: Actor, name: str) -> Project:
    """A new project."""
    made = service.create_project(session, name)
    record(session, actor, Action.PROJECT_CREATED, made.id, project_id=made.id, details={"name": name})
    return made


def project_of(session: Session, actor: Actor, project: str) -> str:
    """The id of a project that is given by id or by name; a name is made on first use."""
    if project.startswith("proj_"):
        return project
    found = service.project_named(session, project)
    if found is None or found.archived_ms is not None:
        found = create_project(session, actor, project)
    return found.id


def get_project(session: Session, project_id: str, *, is_locked: bool = False) -> Project:
    """A project by its id alone, archived or not. Raises NotFoundError."""
    row = queries.project(session, project_id, is_locked=is_locked)
    if row is None:
        raise NotFoundError(f"There is no project {project_id}.", code="project_not_found", param="project_id")
    return row


def active_project(session: Session, project_id: str) -> Project:
    """A project that can be changed, locked till the transaction ends. Raises NotFoundError, and InvalidRequestError
    for an archived one."""
    row = get_project(session, project_id, is_locked=True)
    if row.archived_ms is not None:
        raise InvalidRequestError(
            f"{project_id} is archived: nothing of it can be changed.", code="project_archived", param="project_id"
        )
    return row


def change_project(session: Session, actor: Actor, project: str, changes: Mapping[str, Any]) -> Project:
    """Change name, weight, quota or limits of a project that is given by id or by name."""
    row = active_project(session, service.existing_project(session, project).id)
    if "name" in changes:
        service.check_name(changes["name"])
    for field, value in changes.items():
        setattr(row, field, value)
    session.flush()
    kinds = {
        Action.PROJECT_UPDATED: {name: value for name, value in changes.items() if name not in LIMITS},
        Action.RATE_LIMIT_UPDATED: {name: value for name, value in changes.items() if name in LIMITS},
    }
    for action, details in kinds.items():
        if details:
            record(session, actor, action, row.id, project_id=row.id, details=details)
    return row


def archive_project(session: Session, actor: Actor, project_id: str) -> Project:
    """End a project and its twin for tests: their keys are refused from the next call on; batches that they have run
    to their end. Again, it changes nothing.

    Raises InvalidRequestError while an admin key belongs to it, because that would be refused, too.
    """
    row = get_project(session, project_id, is_locked=True)
    twin = queries.project(session, mode.twin_of(row.id), is_locked=True)
    now_ms = database_now_ms(session)
    admin_keys = queries.working_admin_keys(session, project_id, now_ms)
    if admin_keys and row.archived_ms is None:
        raise InvalidRequestError(
            f"{project_id} has the admin key {admin_keys[0].id}, which would end with it: make one in another project, "
            "and delete this one first.",
            code="project_has_admin_keys",
            param="project_id",
        )
    for one in (row, twin):  # a twin has no other
        if one is not None and one.archived_ms is None:
            one.archived_ms = now_ms
            session.flush()
            record(session, actor, Action.PROJECT_ARCHIVED, one.id, project_id=one.id)
    return row
