"""A key is looked up by one statement with each call; when it was used is written later, for all keys together."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
from sqlalchemy import event
from sqlalchemy.orm import Session
from structlog.testing import capture_logs

from batchsvc.accounts import queries, service
from batchsvc.accounts.last_use import LastUse
from batchsvc.accounts.tables import ApiKey
from batchsvc.db.session import Database


@pytest.fixture
def db(migrated_url: str) -> Iterator[Database]:
    made = Database(migrated_url)
    yield made
    made.dispose()


def make_key(db: Database) -> tuple[str, str]:
    with db.transaction() as session:
        row, text = service.create_key(session, service.create_project(session, "p").id, "k")
        return row.id, text


def last_used_ms(db: Database, key_id: str) -> int | None:
    with db.reading() as session:
        return session.get_one(ApiKey, key_id).last_used_ms


def statements(db: Database) -> list[str]:
    """The list of what is sent from now on."""
    sent: list[str] = []

    def note(_connection: Any, _cursor: Any, statement: str, *_: Any) -> None:
        sent.append(statement)

    event.listen(db.engine, "before_cursor_execute", note)
    return sent


def test_a_call_asks_once_for_its_key(db: Database) -> None:
    key_id, text = make_key(db)
    sent = statements(db)
    with db.reading() as session:
        found = service.caller(session, text, "192.0.2.1")
    assert (found.api_key_id, found.address) == (key_id, "192.0.2.1") and found.now_ms > 1_700_000_000_000
    assert (
        len([one for one in sent if one.startswith("SELECT")]) == len([one for one in sent if "BEGIN" not in one]) == 1
    )


def test_many_uses_are_one_write_that_never_goes_back(db: Database) -> None:
    key_id, _ = make_key(db)
    uses = LastUse(db, every_s=3_600)
    for at_ms in range(1_000, 2_000):
        uses.note(key_id, at_ms)
    assert last_used_ms(db, key_id) is None
    sent = statements(db)
    uses.write()
    assert last_used_ms(db, key_id) == 1_999
    assert len([one for one in sent if one.startswith("UPDATE")]) == 1
    uses.write()  # nothing new
    assert len([one for one in sent if one.startswith("UPDATE")]) == 1
    uses.note(key_id, 1_500)  # another process was later
    uses.close()
    assert last_used_ms(db, key_id) == 1_999


def test_what_could_not_be_written_is_written_later(db: Database, migrated_url: str) -> None:
    key_id, _ = make_key(db)
    uses = LastUse(db, every_s=3_600)
    uses.note(key_id, 1_000)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(uses, "_db", Database("sqlite:////nowhere/none.sqlite3"))
        uses.write()
    uses.close()
    assert last_used_ms(db, key_id) == 1_000


def test_it_writes_by_itself(db: Database) -> None:
    key_id, _ = make_key(db)
    uses = LastUse(db, every_s=0.01)
    uses.note(key_id, 1_000)
    while last_used_ms(db, key_id) is None:  # until the test's own limit of time
        pass
    uses.close()


def test_a_defect_is_logged_and_the_next_notes_are_written(db: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    key_id, _ = make_key(db)
    write, failed = queries.note_uses, threading.Event()

    def note_uses(session: Session, used_ms: Mapping[str, int]) -> None:
        if not failed.is_set():
            failed.set()
            raise ValueError("a defect")
        write(session, used_ms)

    monkeypatch.setattr(queries, "note_uses", note_uses)
    with capture_logs() as logged:
        uses = LastUse(db, every_s=0.01)
        uses.note(key_id, 1_000)
        assert failed.wait(10)
        uses.note(key_id, 2_000)
        while last_used_ms(db, key_id) != 2_000:  # until the test's own limit of time
            pass
        uses.close()
    assert [line["error"] for line in logged if line["event"] == "last_use.crashed"] == ["ValueError"]
