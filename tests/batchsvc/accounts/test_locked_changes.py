"""Changes of keys, service accounts and projects are decided by rows that are locked, as the database has them then."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import pytest
from sqlalchemy.orm import Session

from batchsvc.accounts import administration, key_administration, service
from batchsvc.accounts.tables import ApiKey, Project, ServiceAccount
from batchsvc.audit.actor import Actor, ActorKind
from batchsvc.db.session import Database
from batchsvc.errors import AuthenticationError, InvalidRequestError, NotFoundError, ServiceError

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


def admins(session: Session) -> list[Actor]:
    project = administration.create_project(session, ACTOR, "acme")
    rows = [service.create_key(session, project.id, name, is_admin=True)[0] for name in "ab"]
    return [Actor(kind=ActorKind.API_KEY, id=row.id) for row in rows]


def test_of_two_admin_keys_that_end_each_other_one_is_left(db: Database) -> None:
    """Both were valid when their calls came."""
    with db.transaction() as session:
        a, b = admins(session)
    with ThreadPoolExecutor(2) as pool:
        calls = [
            pool.submit(db.run, lambda session, by=by, key=key: key_administration.revoke_key(session, by, key.id))
            for by, key in ((a, b), (b, a))
        ]
    (error,) = [call.exception() for call in calls if call.exception() is not None]
    assert isinstance(error, AuthenticationError)
    with db.reading() as session:
        assert [session.get_one(ApiKey, actor.id).revoked_ms is None for actor in (a, b)].count(True) == 1


@pytest.mark.parametrize("migrated_url", ["postgresql"], indirect=True)
def test_who_ends_a_key_holds_its_own(db: Database) -> None:
    with db.transaction() as session:
        a, b = admins(session)
    with db.transaction() as first:
        key_administration.revoke_key(first, a, b.id)
        with db.transaction() as second:
            locked = {"skip_locked": True, "key_share": True}
            assert [second.get(ApiKey, actor.id, with_for_update=locked) for actor in (a, b)] == [None, None]


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
