"""Row 72: four processes migrate one database at once, and one of them is killed in the middle."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from sqlalchemy import inspect, text

from batchsvc.db import migrate
from batchsvc.db.session import Database
from batchsvc.tables import metadata
from tests import servers

pytestmark = pytest.mark.faults
LIVENESS_S = 120
EARLY, LATE = 5, 40  # after how many statements the victim waits to be killed

# a migration that says where it is: before it begins, and, where asked, after a number of statements, where it waits
_MIGRATE = """
import sys
from sqlalchemy import Engine, event
from batchsvc.db import migrate
url, stop_after = sys.stdin.readline().strip(), int(sys.argv[1])
count = 0
def look(*_):
    global count
    count += 1
    if count == stop_after:
        print("inside", flush=True)
        sys.stdin.readline()
event.listen(Engine, "after_cursor_execute", look)
print("begins", flush=True)
migrate.upgrade(url)
"""


@pytest.fixture
def empty_database(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    if request.param == "sqlite":
        yield f"sqlite:///{tmp_path / 'new.sqlite3'}"
        return
    with servers.fresh_database(request.getfixturevalue("postgres_url")) as url:
        yield url


class Migrating:
    """One process that migrates."""

    def __init__(self, url: str, cwd: Path, stop_after: int = 0) -> None:
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        command = [sys.executable, "-P", "-c", _MIGRATE, str(stop_after)]
        self.process = subprocess.Popen(command, cwd=cwd, text=True, **pipes)
        assert self.process.stdin is not None
        self.process.stdin.write(url + "\n")
        self.process.stdin.flush()

    def says(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def end(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.communicate()


@pytest.mark.parametrize(
    ("empty_database", "stop_after"),
    [
        ("sqlite", EARLY),
        pytest.param("sqlite", LATE, marks=pytest.mark.quick_faults),
        ("postgresql", EARLY),
        ("postgresql", LATE),
    ],
    indirect=["empty_database"],
)
def test_row_72_one_of_four_migrations_is_killed(empty_database: str, tmp_path: Path, stop_after: int) -> None:
    with ExitStack() as stack:

        def start(stop_after: int = 0) -> Migrating:
            started = Migrating(empty_database, tmp_path, stop_after)
            stack.callback(started.end)
            assert started.says() == "begins"
            return started

        victim = start(stop_after)
        assert victim.says() == "inside", "it holds the lock, and part of the schema is there"
        others = [start() for _ in range(3)]
        victim.process.kill()
        for other in others:
            _, said = other.process.communicate(timeout=LIVENESS_S)
            assert other.process.returncode == 0, said
    database = Database(empty_database)
    with database.reading() as session:
        assert session.execute(text("SELECT count(*) FROM alembic_version")).scalar_one() == 1
    assert set(inspect(database.engine).get_table_names()) == {*metadata.tables, "alembic_version"}
    database.dispose()


@pytest.mark.parametrize("empty_database", ["sqlite", "postgresql"], indirect=True)
def test_row_72_killed_alone_it_leaves_nothing(empty_database: str, tmp_path: Path) -> None:
    victim = Migrating(empty_database, tmp_path, LATE)
    try:
        assert [victim.says(), victim.says()] == ["begins", "inside"]
    finally:
        victim.end()
    database = Database(empty_database)
    assert inspect(database.engine).get_table_names() == [], "not applied at all"
    database.dispose()
    migrate.upgrade(empty_database)
    assert migrate.current(empty_database) is not None
