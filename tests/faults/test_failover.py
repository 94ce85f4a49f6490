"""Row 50: PostgreSQL fails over to a copy that lacks the last commits, under the hands of live workers.

What may be lost is what was committed since the copy: parts that the database has forgotten are orphans, and their
lines run again. Who was told of such a part, or of a batch that had ended, was told something that is no longer so;
the bill is that of the second run alone, so that nothing is billed twice.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
from sqlalchemy import Connection, create_engine, text

from tests.faults.cluster import Cluster
from tests.faults.judge import Verdict

Judge = Callable[..., Verdict]
pytestmark = [pytest.mark.faults, pytest.mark.parametrize("database_url", ["postgresql"], indirect=True)]


class Standby:
    """A copy of the cluster's database, and the moment at which it takes the place of the original."""

    def __init__(self, admin: Connection, name: str) -> None:
        self._admin, self._name, self._copy = admin, name, f"{name}_copy"

    def copy(self) -> None:
        with self._shut(self._name):
            self._do(f"CREATE DATABASE {self._copy} TEMPLATE {self._name}")

    def fail_over(self) -> None:
        with self._shut(self._name):
            self._do(f"DROP DATABASE {self._name} WITH (FORCE)")
            self._do(f"ALTER DATABASE {self._copy} RENAME TO {self._name}")

    @contextmanager
    def _shut(self, name: str) -> Iterator[None]:
        """While nobody is connected, nor can be."""
        self._do(f"ALTER DATABASE {name} ALLOW_CONNECTIONS false")
        self._do(f"SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = '{name}'")
        deadline = time.monotonic() + 60
        while self._do(f"SELECT 1 FROM pg_stat_activity WHERE datname = '{name}'"):
            assert time.monotonic() < deadline, "somebody stays connected"
            time.sleep(0.02)
        yield
        self._do(f"ALTER DATABASE {self._name} ALLOW_CONNECTIONS true")

    def _do(self, statement: str) -> bool:
        result = self._admin.execute(text(statement))
        return result.returns_rows and bool(result.all())


@pytest.fixture
def standby(cluster: Cluster, postgres_url: str) -> Iterator[Standby]:
    name = cluster.services.database_url.partition("?")[0].rpartition("/")[2]
    url = postgres_url.replace("postgresql://", "postgresql+psycopg://")
    admin = create_engine(url, isolation_level="AUTOCOMMIT")
    with admin.connect() as connection:
        yield Standby(connection, name)
    admin.dispose()


def test_row_50_parts_that_are_forgotten_run_again(cluster: Cluster, judge: Judge, standby: Standby) -> None:
    cluster.start("control")
    job = cluster.submit(600)
    workers = [cluster.start("engine") for _ in range(2)]
    cluster.until(lambda: cluster.num_done(job) > 60, "parts count")
    standby.copy()
    copied = cluster.num_done(job)
    cluster.until(lambda: cluster.num_done(job) > copied + 100, "more parts count")
    standby.fail_over()
    forgotten = copied + 100 - cluster.num_done(job)
    assert forgotten > 0, "the last commits are gone"
    cluster.wait(job, "completed")
    assert all(worker.is_alive for worker in workers)
    assert len(judge(job, history_was_lost=True).output) == 600


def test_row_50_an_end_that_is_forgotten_comes_again(cluster: Cluster, judge: Judge, standby: Standby) -> None:
    cluster.start("control")
    job = cluster.submit(100)
    cluster.start("engine")
    cluster.until(lambda: cluster.num_done(job) > 50, "it is nearly done")
    standby.copy()
    cluster.wait(job, "completed")
    first = cluster.batch(job)
    standby.fail_over()
    assert cluster.batch(job).status != "completed", "the database has forgotten its end"
    cluster.wait(job, "completed")
    assert cluster.batch(job).output_file_id != first.output_file_id
    assert len(judge(job, history_was_lost=True).output) == 100
