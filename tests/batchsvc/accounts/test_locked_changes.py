"""Changes of keys, service accounts and projects are decided by rows that are locked, as the database has them then."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import pytest
from sqlalchemy.orm import Session

from batchsvc.accounts import administration, key_administration
from batchsvc.accounts.tables import ApiKey, Project, ServiceAccount
from batchsvc.audit.actor import Actor, ActorKind
from batchsvc.db.session import Database
from batchsvc.errors import InvalidRequestError, NotFoundError, ServiceError

ACTOR = Actor(kind=ActorKind.CLI, id="op@host")


class Made(NamedTuple):
    """Rows as they were read before somebody else has changed them."""

    project: Project
    account: ServiceAccount
    key: ApiKey


@pytest.fixture
def db(migrated_url: str) -> Iterator[Database]:
    database = Database(migrated_url)
    yield database
    database.dispose()


def made(session: Session) -> Made:
    project = administration.create_project(session, ACTOR, "acme")
    account = key_administration.create_account(session, ACTOR, project.id, "robot", key_administration.MEMBER)
    return Made(project, account, key_administration.create_account_key(session, ACTOR, account, None).row)


def archive(session: Session, stale: Made) -> None:
    session.get_one(Project, stale.project.id).archived_ms = 1


def leave(session: Session, stale: Made) -> None:
    session.get_one(ServiceAccount, stale.account.id).deleted_ms = 1


def rotate(session: Session, stale: Made) -> None:
    session.get_one(ApiKey, stale.key.id).replaced_by_id = "other"


def revoke(session: Session, stale: Made) -> None:
    session.get_one(ApiKey, stale.key.id).revoked_ms = 1


@pytest.mark.parametrize(
    ("meanwhile", "change", "error"),
    [
        (rotate, lambda s, m: key_administration.rotate_key(s, ACTOR, m.key), InvalidRequestError),
        (revoke, lambda s, m: key_administration.rotate_key(s, ACTOR, m.key), NotFoundError),
        (leave, lambda s, m: key_administration.rotate_key(s, ACTOR, m.key), NotFoundError),
        (revoke, lambda s, m: key_administration.change_key(s, ACTOR, m.key, {"scopes": []}), NotFoundError),
        (leave, lambda s, m: key_administration.create_account_key(s, ACTOR, m.account, None), NotFoundError),
        (leave, lambda s, m: key_administration.change_account(s, ACTOR, m.account, {"role": "none"}), NotFoundError),
        (leave, lambda s, m: key_administration.delete_account(s, ACTOR, m.account), NotFoundError),
        (archive, lambda s, m: administration.change_project(s, ACTOR, m.project.id, {"weight": 2}), ServiceError),
        (archive, lambda s, m: key_administration.rotate_key(s, ACTOR, m.key), InvalidRequestError),
    ],
)
def test_what_another_has_changed_meanwhile_counts(
    db: Database,
    meanwhile: Callable[[Session, Made], None],
    change: Callable[[Session, Made], object],
    error: type[ServiceError],
) -> None:
    with db.transaction() as session:
        known = made(session)
    with db.transaction() as other:
        meanwhile(other, known)
    with db.transaction() as session:
        session.add_all(known)  # read before the other change: the session has them as they were
        with pytest.raises(error):
            change(session, known)


@pytest.mark.parametrize("migrated_url", ["postgresql"], indirect=True)  # on SQLite writers are one by one
@pytest.mark.parametrize("table", ["project", "account", "key"])
def test_a_row_that_decides_is_locked(db: Database, table: str) -> None:
    """Who has changed it and hasn't committed yet is waited for."""
    with db.transaction() as session:
        known = made(session)
    row = getattr(known, table)
    with db.transaction() as first:
        key_administration.rotate_key(first, ACTOR, first.get_one(ApiKey, known.key.id))
        with db.transaction() as second:
            free = second.get(type(row), row.id, with_for_update={"skip_locked": True, "key_share": True})
            assert free is None
