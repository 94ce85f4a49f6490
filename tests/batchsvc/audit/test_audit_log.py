"""Audit rows stand or fall with the change that they tell of, and nothing changes, deletes or replaces one."""

from __future__ import annotations

import pytest
from sqlalchemy import select, text
from sqlalchemy.exc import DBAPIError

from batchsvc.audit.actions import Action
from batchsvc.audit.actor import Actor, ActorKind, at_command_line, service
from batchsvc.audit.service import record
from batchsvc.audit.tables import AuditRow
from batchsvc.db.session import Database
from batchsvc.errors import InvalidRequestError

KEY = Actor(kind=ActorKind.API_KEY, id="abcd1234", project_id="proj_1", address="192.0.2.7")


@pytest.fixture
def db(migrated_url: str):
    database = Database(migrated_url)
    yield database
    database.dispose()


def test_a_row_says_who_what_on_what_when_and_from_where(db: Database) -> None:
    with db.transaction() as session:
        record(
            session,
            KEY,
            Action.PROJECT_UPDATED,
            "proj_2",
            project_id="proj_2",
            details={"weight": 3, "alerts": [50, "x" * 300]},
        )
        record(session, at_command_line(), Action.CLAIMS_PAUSED, "claims")
        record(session, service("reaper"), Action.RESOURCE_DELETED, "file-1", project_id="proj_1")
    with db.reading() as session:
        rows = {row.actor_kind: row for row in session.scalars(select(AuditRow))}
    row = rows["api_key"]
    assert (row.actor_id, row.actor_project_id, row.address) == ("abcd1234", "proj_1", "192.0.2.7")
    assert (row.action, row.target_id, row.project_id) == ("project.updated", "proj_2", "proj_2")
    assert row.details == {"weight": 3, "alerts": [50, "x" * 255]}
    assert row.effective_ms > 1_700_000_000_000
    assert "@" in rows["cli"].actor_id and rows["cli"].address is None
    assert rows["service"].actor_id == "reaper"


def test_a_change_that_is_rolled_back_leaves_no_row(db: Database) -> None:
    def give_up() -> None:
        with db.transaction() as session:
            record(session, KEY, Action.KEY_DELETED, "abcd1234")
            raise RuntimeError

    with pytest.raises(RuntimeError):
        give_up()
    with db.reading() as session:
        assert not session.scalars(select(AuditRow)).all()


def test_nothing_changes_deletes_or_replaces_a_row(db: Database) -> None:
    statements = ["UPDATE audit_log SET actor_id = 'somebody else'", "DELETE FROM audit_log"]
    if db.is_sqlite:
        columns = "actor_kind, actor_id, actor_project_id, address, project_id, target_id, details, effective_ms"
        statements.append(
            f"INSERT OR REPLACE INTO audit_log (id, action, {columns}) SELECT id, 'other', {columns} FROM audit_log"
        )
    else:
        statements.append("TRUNCATE audit_log")
    with db.transaction() as session:
        record(session, KEY, Action.KEY_DELETED, "abcd1234")
    for statement in statements:
        with pytest.raises(DBAPIError, match="append-only"), db.transaction() as session:
            session.execute(text(statement))
    with db.reading() as session:
        found = [(row.action, row.actor_id) for row in session.scalars(select(AuditRow))]
    assert found == [("api_key.deleted", "abcd1234")]


@pytest.mark.parametrize(
    "secret", ["sk_abcdefgh_" + "a" * 49, "whsec_MTIz", "postgresql://batchsvc:password@127.0.0.1/batchsvc"]
)
def test_a_secret_is_refused(db: Database, secret: str) -> None:
    for field, target, details in (
        ("note", "abcd1234", {"note": f"made {secret}"}),
        ("notes", "abcd1234", {"notes": ["made", secret]}),
        ("target_id", secret, {}),
    ):
        with (
            pytest.raises(InvalidRequestError, match=f"^{field} holds a secret") as caught,
            db.transaction() as session,
        ):
            record(session, KEY, Action.KEY_CREATED, target, details=details)
        assert caught.value.param == field and secret not in caught.value.message


def test_rows_of_one_millisecond_stay_in_their_order(db: Database) -> None:
    with db.transaction() as session:
        for num in range(20):
            record(session, KEY, Action.KEY_UPDATED, f"key{num}")
        session.flush()
    with db.reading() as session:
        found = [row.target_id for row in session.scalars(select(AuditRow).order_by(AuditRow.id))]
    assert found == [f"key{num}" for num in range(20)]
