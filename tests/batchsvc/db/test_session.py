"""Transactions that meet: a deadlock is broken by running the whole of one again, a bounded number of times."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest
from sqlalchemy import text
from sqlalchemy.exc import DBAPIError
from sqlalchemy.orm import Session

from batchsvc.db.session import Database


@pytest.fixture
def db(database_url: str) -> Iterator[Database]:
    database = Database(database_url)
    with database.transaction() as session:
        session.execute(text("CREATE TABLE counts (id INTEGER PRIMARY KEY, n INTEGER NOT NULL)"))
        session.execute(text("INSERT INTO counts VALUES (1, 0), (2, 0)"))
    yield database
    database.dispose()


def add(session: Session, row: int) -> None:
    session.execute(text("UPDATE counts SET n = n + 1 WHERE id = :id"), {"id": row})


@pytest.mark.parametrize("how", ["run", "once"])
def test_a_deadlock_costs_nothing_but_time(db: Database, how: str) -> None:
    met = threading.Barrier(2, timeout=60)
    attempts: list[int] = []
    errors: list[BaseException] = []

    def work(first: int, second: int) -> None:
        is_again = False

        def both(session: Session) -> None:
            nonlocal is_again
            attempts.append(first)
            add(session, first)
            if not is_again and not db.is_sqlite:  # SQLite has one writer: the other hasn't even begun
                is_again = True
                met.wait()
            add(session, second)

        try:
            getattr(db, how)(both)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=pair) for pair in ((1, 2), (2, 1))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    assert len(attempts) == 2 if db.is_sqlite else len(attempts) > 2, "one of the two ran again"
    with db.reading() as session:
        assert session.execute(text("SELECT n FROM counts ORDER BY id")).scalars().all() == [2, 2]


def test_retries_are_bounded_and_an_error_of_ours_has_none(db: Database) -> None:
    attempts = 0

    class Deadlock(Exception):  # as psycopg names it: SQLSTATE 40P01
        sqlstate = "40P01"

    def fail(_session: Session) -> None:
        nonlocal attempts
        attempts += 1
        raise DBAPIError("UPDATE", None, Deadlock())

    for run in (db.run, db.once):
        attempts = 0
        with pytest.raises(DBAPIError):
            run(fail, attempts=4)
        assert attempts == 4
    with pytest.raises(DBAPIError, match="nowhere"):
        db.run(lambda session: session.execute(text("SELECT * FROM nowhere")))


def test_what_may_have_happened_is_done_again_only_if_it_may_happen_twice(db: Database) -> None:
    attempts = 0

    def lose(_session: Session) -> None:
        nonlocal attempts
        attempts += 1
        raise DBAPIError("COMMIT", None, Exception("the server closed the connection"), connection_invalidated=True)

    for run, expected in ((db.run, 3), (db.once, 1)):
        attempts = 0
        with pytest.raises(DBAPIError):
            run(lose)
        assert attempts == expected


def test_who_stops_in_the_middle_of_a_transaction_loses_it(db: Database) -> None:
    """On PostgreSQL by the server's own watch; `run` then does it again."""
    if db.is_sqlite:
        return
    with db.reading() as session:
        assert session.execute(text("SHOW idle_in_transaction_session_timeout")).scalar_one() == "15s"
    sleeps = [1.0, 0.0]

    def dawdle(session: Session) -> None:
        session.execute(text("SET LOCAL idle_in_transaction_session_timeout = 100"))
        add(session, 1)
        time.sleep(sleeps.pop(0))
        add(session, 2)

    db.run(dawdle)
    with db.reading() as session:
        assert not sleeps
        assert session.execute(text("SELECT n FROM counts")).scalars().all() == [1, 1]
