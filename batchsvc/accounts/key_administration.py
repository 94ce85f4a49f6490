"""What an operator changes about API keys and the service accounts that own some; each change with its audit row.

A key's text is shown when it is made, and never again. A rotated key works on beside its successor until the overlap is
over; a revoked one is refused from the next call on, in every process, because each call asks the database.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from sqlalchemy.orm import Session

from batchsvc import ids
from batchsvc.accounts import administration, scopes, service
from batchsvc.accounts import organization_queries as queries
from batchsvc.accounts.administration import LIMITS
from batchsvc.accounts.tables import ApiKey, ServiceAccount
from batchsvc.audit.actions import Action
from batchsvc.audit.actor import Actor
from batchsvc.audit.queries import newest_detail
from batchsvc.audit.service import record
from batchsvc.db.session import database_now_ms
from batchsvc.errors import AuthenticationError, InvalidRequestError, NotFoundError

OVERLAP_S = 86_400
MOST_LIFE_S = 10 * 365 * 86_400
MEMBER, NONE = "member", "none"
_EXPIRES = "expires_in_seconds"  # in a change of a key, and so in its audit row


class MadeKey(NamedTuple):
    """A key that was just made, and its text, which is shown this once."""

    row: ApiKey
    text: str


def create_key(
    session: Session,
    actor: Actor,
    project_id: str,
    name: str,
    *,
    is_admin: bool = False,
    wanted: Sequence[str] = (),
    expires_in_s: int | None = None,
    account: ServiceAccount | None = None,
) -> MadeKey:
    """A new key of a project. `wanted` scopes: none of them is no restriction."""
    administration.active_project(session, project_id)
    allowed = scopes.parse(wanted)
    if is_admin and allowed not in (None, [scopes.READ_ALL]):
        raise InvalidRequestError(
            f"An admin key is unrestricted, or has the one scope {scopes.READ_ALL}.", param="scopes"
        )
    row, text = service.create_key(session, project_id, name, is_admin)
    row.scopes = allowed
    row.expires_ms = None if expires_in_s is None else database_now_ms(session) + expires_in_s * 1000
    row.service_account_id = None if account is None else account.id
    session.flush()
    _record(session, actor, Action.KEY_CREATED, row, {"name": name, "is_admin": is_admin, "scopes": allowed or []})
    return MadeKey(row, text)


def get_key(
    session: Session,
    key_id: str,
    *,
    project_id: str | None = None,
    is_admin: bool | None = None,
    is_locked: bool = False,
) -> ApiKey:
    """A key that wasn't revoked: of this project, or of this kind. Raises NotFoundError."""
    row = queries.key(session, key_id, is_locked=is_locked)
    is_it = row is not None and row.revoked_ms is None
    if row is None or not is_it or project_id not in (None, row.project_id) or is_admin not in (None, row.is_admin):
        raise NotFoundError(f"There is no key {key_id[:64]}.", code="api_key_not_found", param="key_id")
    return row


def change_key(session: Session, actor: Actor, row: ApiKey, changes: Mapping[str, Any]) -> ApiKey:
    """Change `scopes`, `expires_in_seconds` (None: it never expires) or limits of a key that works."""
    row = get_key(session, row.id, is_locked=True)
    _require_unexpired(session, row)
    if "scopes" in changes:
        row.scopes = scopes.parse(changes["scopes"] or ())
        if row.is_admin and row.scopes not in (None, [scopes.READ_ALL]):
            raise InvalidRequestError(
                f"An admin key is unrestricted, or has the one scope {scopes.READ_ALL}.", param="scopes"
            )
    if _EXPIRES in changes:
        life_s = changes[_EXPIRES]
        row.expires_ms = None if life_s is None else database_now_ms(session) + life_s * 1000
    for name in LIMITS:
        if name in changes:
            setattr(row, name, changes[name])
    session.flush()
    limits = {name: changes[name] for name in LIMITS if name in changes}
    others = {name: value for name, value in changes.items() if name not in LIMITS}
    if others:
        _record(session, actor, Action.KEY_UPDATED, row, others)
    if limits:
        _record(session, actor, Action.RATE_LIMIT_UPDATED, row, limits)
    return row


def rotate_key(session: Session, actor: Actor, row: ApiKey, overlap_s: int = OVERLAP_S) -> MadeKey:
    """A successor that may do what the key may, for the life that the key was given; the key itself works on for
    `overlap_s` seconds, if it lives as long.

    Raises InvalidRequestError for a key that has expired, or was rotated before.
    """
    administration.active_project(session, row.project_id)
    if row.service_account_id is not None:
        get_account(session, row.project_id, row.service_account_id, is_locked=True)
    row = get_key(session, row.id, is_locked=True)
    _require_unexpired(session, row)
    if row.replaced_by_id is not None:
        raise InvalidRequestError(
            f"{row.id} was rotated before: rotate {row.replaced_by_id}, or revoke that and make a new key.",
            code="key_already_rotated",
            param="key_id",
        )
    now_ms = database_now_ms(session)
    made, text = service.create_key(session, row.project_id, row.name, row.is_admin)
    for name in ("scopes", "service_account_id", *LIMITS):
        setattr(made, name, getattr(row, name))
    if row.expires_ms is not None:
        made.expires_ms = now_ms + _life_ms(session, row, row.expires_ms)
    ends_ms = now_ms + overlap_s * 1000
    row.expires_ms = ends_ms if row.expires_ms is None else min(ends_ms, row.expires_ms)
    row.replaced_by_id = made.id
    session.flush()
    _record(session, actor, Action.KEY_CREATED, made, {"name": made.name, "replaces": row.id})
    _record(session, actor, Action.KEY_UPDATED, row, {"replaced_by": made.id, "overlap_seconds": overlap_s})
    return MadeKey(made, text)


def revoke_key(session: Session, actor: Actor, key_id: str) -> ApiKey:
    """End a key; revoking it again changes nothing. Its row stays, because bills name it. Raises AuthenticationError
    where the key that asks was ended meanwhile: of two admin keys that end each other at once, one is left."""
    held = {name: queries.key(session, name, is_locked=True) for name in sorted({actor.id, key_id})}
    was, own = held[key_id], held[actor.id]
    if own is not None and own is not was and own.revoked_ms is not None:
        raise AuthenticationError("This API key is not valid any more: ask for a new one.", code="invalid_api_key")
    is_news = was is not None and was.revoked_ms is None
    row = service.revoke_key(session, key_id)
    if is_news:
        _record(session, actor, Action.KEY_DELETED, row, {"name": row.name})
    return row


def create_account(session: Session, actor: Actor, project_id: str, name: str, role: str) -> ServiceAccount:
    """A new service account of a project; one with the role `none` gets no keys until it has another."""
    administration.active_project(session, project_id)
    made = ServiceAccount(
        id=ids.service_account_id(),
        project_id=project_id,
        name=service.check_name(name),
        role=role,
        created_ms=database_now_ms(session),
    )
    session.add(made)
    session.flush()
    details = {"name": name, "role": role}
    record(session, actor, Action.SERVICE_ACCOUNT_CREATED, made.id, project_id=project_id, details=details)
    return made


def get_account(session: Session, project_id: str, account_id: str, *, is_locked: bool = False) -> ServiceAccount:
    """A service account of this project. Raises NotFoundError."""
    row = queries.account(session, account_id, is_locked=is_locked)
    if row is None or row.project_id != project_id or row.deleted_ms is not None:
        raise NotFoundError(
            f"There is no service account {account_id[:64]} in {project_id[:64]}.", param="service_account_id"
        )
    return row


def change_account(session: Session, actor: Actor, row: ServiceAccount, changes: Mapping[str, str]) -> ServiceAccount:
    """Change the name or the role."""
    administration.active_project(session, row.project_id)
    row = get_account(session, row.project_id, row.id, is_locked=True)
    if "name" in changes:
        row.name = service.check_name(changes["name"])
    row.role = changes.get("role", row.role)
    session.flush()
    record(session, actor, Action.SERVICE_ACCOUNT_UPDATED, row.id, project_id=row.project_id, details=changes)
    return row


def create_account_key(
    session: Session,
    actor: Actor,
    account: ServiceAccount,
    name: str | None,
    *,
    wanted: Sequence[str] = (),
    expires_in_s: int | None = None,
) -> MadeKey:
    """A key that belongs to a service account."""
    administration.active_project(session, account.project_id)
    account = get_account(session, account.project_id, account.id, is_locked=True)
    if account.role == NONE:
        raise InvalidRequestError(
            f"{account.id} has the role none: give it the role {MEMBER} first.", param="service_account_id"
        )
    return create_key(
        session,
        actor,
        account.project_id,
        name or account.name,
        wanted=wanted,
        expires_in_s=expires_in_s,
        account=account,
    )


def delete_account(session: Session, actor: Actor, row: ServiceAccount) -> None:
    """End a service account and all of its keys."""
    row = get_account(session, row.project_id, row.id, is_locked=True)
    row.deleted_ms = database_now_ms(session)
    session.flush()
    for key in queries.keys_of_account(session, row.id):
        revoke_key(session, actor, key.id)
    record(session, actor, Action.SERVICE_ACCOUNT_DELETED, row.id, project_id=row.project_id)


def _life_ms(session: Session, row: ApiKey, expires_ms: int) -> int:
    """What a key that expires was given: when it was made, unless the audit log has a later change. No column has it:
    what an older version changes meanwhile counts, too."""
    life_s = newest_detail(session, Action.KEY_UPDATED, row.id, _EXPIRES)
    return expires_ms - row.created_ms if life_s is None else int(life_s) * 1000


def _require_unexpired(session: Session, row: ApiKey) -> None:
    if row.expires_ms is not None and row.expires_ms <= database_now_ms(session):
        raise InvalidRequestError(f"{row.id} has expired: make a new key.", code="expired_api_key", param="key_id")


def _record(session: Session, actor: Actor, action: Action, row: ApiKey, details: Mapping[str, Any]) -> None:
    record(session, actor, action, row.id, project_id=row.project_id, details=details)
