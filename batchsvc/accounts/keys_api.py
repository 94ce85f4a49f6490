"""Keys in our own shapes as routes and commands ask for them: checked bodies in, objects out."""

from __future__ import annotations

from typing import Any

from sqlalchemy.orm import Session

from batchsvc.accounts import administration, key_administration, service
from batchsvc.accounts.schemas import ChangeKeyAndLimits, CreateKey, RotateKey, key_object
from batchsvc.audit.actor import Actor
from batchsvc.errors import InvalidRequestError


def create(session: Session, actor: Actor, body: CreateKey, *, own_project_id: str | None) -> dict[str, Any]:
    """A new key; the field `key` holds its text this once. Without a project in the body, it is the caller's own."""
    project_id = own_project_id
    if body.project is not None:
        project_id = administration.project_of(session, actor, body.project)
    if project_id is None:
        raise InvalidRequestError("Missing required parameter: 'project'.", param="project")
    if body.is_test:
        administration.active_project(session, project_id)
        project_id = service.test_twin(session, project_id).id
    row, text = key_administration.create_key(
        session,
        actor,
        project_id,
        body.name,
        is_admin=body.is_admin,
        wanted=body.scopes,
        expires_in_s=body.expires_in_seconds,
    )
    return {**key_object(row), "key": text}


def change(session: Session, actor: Actor, key_id: str, body: ChangeKeyAndLimits) -> dict[str, Any]:
    """Other scopes, another expiry or other limits for a key that works."""
    row = key_administration.get_key(session, key_id)
    return key_object(key_administration.change_key(session, actor, row, body.model_dump(exclude_unset=True)))


def rotate(session: Session, actor: Actor, key_id: str, body: RotateKey) -> dict[str, Any]:
    """A successor, whose text is in `key` this once, and what became of the old key in `replaces`."""
    old = key_administration.get_key(session, key_id)
    row, text = key_administration.rotate_key(session, actor, old, body.overlap_seconds)
    return {**key_object(row), "key": text, "replaces": key_object(old)}


def revoke(session: Session, actor: Actor, key_id: str) -> dict[str, Any]:
    """The end of a key, but not of the admin key that asks. Its row stays, because bills name it."""
    if key_id == actor.id and key_administration.get_key(session, key_id).is_admin:
        raise InvalidRequestError(
            f"{key_id} makes this call: revoke it with another admin key.", code="key_in_use", param="key_id"
        )
    return key_object(key_administration.revoke_key(session, actor, key_id))
