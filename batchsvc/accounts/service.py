"""What can be done with projects and keys, and who a key stands for."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from sqlalchemy.orm import Session

from batchsvc import ids, mode
from batchsvc.accounts import keys, queries
from batchsvc.accounts.limits import NO_LIMITS, Limits
from batchsvc.accounts.tables import ApiKey, Project
from batchsvc.audit.actor import Actor, ActorKind
from batchsvc.clock import now_ms
from batchsvc.errors import AuthenticationError, InvalidRequestError, NotFoundError, PermissionDeniedError

_NAME_CHARS = 128


@dataclass(frozen=True, slots=True)
class Caller:
    """Who makes a call: a key of a project. An admin key may also manage keys and models."""

    project_id: str
    api_key_id: str
    is_admin: bool
    address: str | None = None  # the IP address that the call came from
    service_account_id: str | None = None
    scopes: tuple[str, ...] | None = None  # None: it may do all that a key of its kind may
    limits: Limits = NO_LIMITS  # of the key alone
    project_limits: Limits = NO_LIMITS  # of all keys of the project; None in them: the setting's
    now_ms: int = 0  # the database's time at which the key was looked at

    @property
    def actor(self) -> Actor:
        """The caller as the audit log names it."""
        return Actor(kind=ActorKind.API_KEY, id=self.api_key_id, project_id=self.project_id, address=self.address)


def create_project(session: Session, name: str) -> Project:
    """A new tenant with a salt of its own."""
    made = Project(id=ids.project_id(), name=check_name(name), salt=ids.random_text(32), weight=1, created_ms=now_ms())
    session.add(made)
    session.flush()
    return made


def test_twin(session: Session, project_id: str) -> Project:
    """The project for tests that belongs to a project, made on first use. Raises NotFoundError."""
    twin_id = mode.twin_of(project_id)
    found = queries.project(session, twin_id)
    if found is not None:
        return found
    live = existing_project(session, project_id)
    queries.add_project(session, twin_id, f"{live.name[: _NAME_CHARS - 7]} (test)", ids.random_text(32), now_ms())
    return existing_project(session, twin_id)


def has_test_project(session: Session) -> bool:
    """Whether anybody has made a key of test mode."""
    return queries.has_test_project(session)


def project_named(session: Session, name: str) -> Project | None:
    """The project of this name, if there is one."""
    return queries.project_named(session, name)


def existing_project(session: Session, project: str) -> Project:
    """A project that is given by id or by name. Raises NotFoundError."""
    row = queries.project(session, project) or queries.project_named(session, project)
    if row is None:
        raise NotFoundError(f"There is no project {project}.", param="project")
    return row


def has_project(session: Session, project_id: str) -> bool:
    """Whether there is a project of this id."""
    return queries.project(session, project_id) is not None


def list_projects(session: Session) -> list[Project]:
    """All projects, oldest first."""
    return queries.projects(session)


def locked_project(session: Session, project_id: str) -> Project:
    """A project, held until the transaction ends: what is decided about its batches is decided one by one."""
    return queries.locked_project(session, project_id)


def money_limits(session: Session, project_id: str) -> tuple[int | None, bool]:
    """The monthly budget of a project in nano-dollars, if it has one, and whether it spends only what was topped up."""
    return queries.money_limits(session, project_id)


def limited_projects(session: Session, project_ids: Iterable[str]) -> list[Project]:
    """Those of the projects that have a budget or are prepaid."""
    return queries.limited(session, set(project_ids))


def alert_percents(session: Session, project_ids: Iterable[str]) -> dict[str, list[int] | None]:
    """The shares of a limit that these projects want to be told of; None: the usual ones."""
    return queries.alert_percents(session, set(project_ids))


def salts(session: Session, project_ids: Iterable[str]) -> dict[str, str]:
    """The salts that separate the prefix caches of these projects, by project."""
    return queries.salts(session, set(project_ids))


def create_key(session: Session, project_id: str, name: str, is_admin: bool = False) -> tuple[ApiKey, str]:
    """A new key of a project: its row, and the text that is shown this once."""
    if queries.project(session, project_id) is None:
        raise NotFoundError(f"There is no project {project_id}.", param="project_id")
    is_test = mode.is_test(project_id)
    if is_test and is_admin:
        raise InvalidRequestError("A key of test mode can't be an admin key: it manages nothing.", param="is_admin")
    new = keys.make(is_test=is_test)
    row = ApiKey(
        id=new.id,
        project_id=project_id,
        name=check_name(name),
        hash=new.hash,
        is_admin=is_admin,
        created_ms=now_ms(),
        revoked_ms=None,
    )
    session.add(row)
    session.flush()
    return row, new.text


def revoke_key(session: Session, key_id: str) -> ApiKey:
    """End a key at once; revoking it again changes nothing."""
    row = queries.key(session, key_id)
    if row is None:
        raise NotFoundError(f"There is no key {key_id}.", param="key_id")
    queries.revoke(session, key_id, now_ms())
    session.refresh(row)
    return row


def list_keys(session: Session, project_id: str | None = None) -> list[ApiKey]:
    """Keys of one project, or of all; never their texts, which nobody has."""
    return queries.keys(session, project_id)


def caller(session: Session, secret: str, address: str | None = None) -> Caller:
    """Who this key stands for. Raises AuthenticationError for a key that is wrong, revoked, expired or of a deleted
    service account, and PermissionDeniedError for one of an archived project."""
    key_id = keys.id_of(secret)
    known = queries.known_key(session, key_id) if key_id else None
    is_its = known is not None and keys.matches(secret, known.key.hash)
    if known is None or not is_its or known.key.revoked_ms is not None or known.is_owner_deleted:
        raise AuthenticationError("This API key is not valid: check it, or ask for a new one.", code="invalid_api_key")
    row = known.key
    if row.expires_ms is not None and row.expires_ms <= known.now_ms:
        raise AuthenticationError("This API key has expired: ask for a new one.", code="expired_api_key")
    if known.project.archived_ms is not None:
        raise PermissionDeniedError("The project of this API key is archived.", code="project_archived")
    return Caller(
        project_id=row.project_id,
        api_key_id=row.id,
        is_admin=row.is_admin,
        address=address,
        service_account_id=row.service_account_id,
        scopes=None if row.scopes is None else tuple(row.scopes),
        limits=limits_of(row),
        project_limits=limits_of(known.project),
        now_ms=known.now_ms,
    )


def limits_of(row: ApiKey | Project) -> Limits:
    """The limits that are kept with a key or a project."""
    return Limits(
        requests_per_minute=row.requests_per_minute,
        max_open_batches=row.max_open_batches,
        max_stored_bytes=row.max_stored_bytes,
    )


def check_name(name: str) -> str:
    """The name, if a project, a key or a service account may have it. Raises InvalidRequestError."""
    if not name.strip() or len(name) > _NAME_CHARS or not name.isprintable():
        raise InvalidRequestError(f"name must be 1 to {_NAME_CHARS} printable characters.", param="name")
    return name
