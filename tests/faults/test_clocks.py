"""Rows 55 and 56: hosts whose clocks are off, and a database whose clock steps."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
from sqlalchemy import create_engine, text

from batchsvc.clock import now_ms
from batchsvc.db.session import database_now_ms
from tests.faults.cluster import Cluster
from tests.faults.judge import Verdict

Judge = Callable[..., Verdict]
pytestmark = pytest.mark.faults

HOUR_S = 3_600


@pytest.mark.parametrize(
    ("where", "shift_s"),
    [
        pytest.param("everywhere", HOUR_S, marks=pytest.mark.quick_faults),
        ("everywhere", -HOUR_S),
        ("one worker", HOUR_S),
        ("one worker", -HOUR_S),
    ],
)
def test_row_55_a_clock_that_is_an_hour_off(cluster: Cluster, judge: Judge, shift_s: int, where: str) -> None:
    """The window is the hour by which the clock is off: by the wrong clock the batch is over, or not yet created."""
    off = {"TEST_CLOCK_SHIFT_S": shift_s}
    cluster.serve(**(off if where == "everywhere" else {}))
    cluster.start("control", **(off if where == "everywhere" else {}))
    job = cluster.submit(100)
    cluster.wait(job, "in_progress")
    cluster.change_batch(job, expires_ms=now_ms() + HOUR_S // 2 * 1000)
    cluster.start("engine", **off)
    cluster.start("engine", **(off if where == "everywhere" else {}))
    cluster.wait(job, "completed")
    verdict = judge(job)
    assert len(verdict.output) == 100
    assert abs((cluster.batch(job).ended_ms or 0) - now_ms()) < 600_000, "the end is told by the database's clock"


_CLOCK = """
CREATE TABLE clock (shift interval NOT NULL);
INSERT INTO clock VALUES ('0');
CREATE FUNCTION public.clock_timestamp() RETURNS timestamptz LANGUAGE sql VOLATILE AS
  'SELECT pg_catalog.clock_timestamp() + (SELECT shift FROM public.clock)';
"""


@pytest.mark.parametrize("database_url", ["postgresql"], indirect=True)
def test_row_56_the_database_clock_steps(cluster: Cluster, judge: Judge) -> None:
    """Back by ten seconds, forward again, and a second forward as after a leap: more than three leases each."""
    url = cluster.services.database_url
    name = url.partition("?")[0].rpartition("/")[2]
    engine = create_engine(url.replace("postgresql://", "postgresql+psycopg://"), isolation_level="AUTOCOMMIT")
    with engine.connect() as connection:
        connection.execute(text(_CLOCK))
        connection.execute(text(f"ALTER DATABASE {name} SET search_path = public, pg_catalog"))
    cluster.db.dispose()  # connections from now on read this clock

    def step(shift_s: int) -> None:
        with engine.connect() as connection:
            connection.execute(text(f"UPDATE clock SET shift = '{shift_s} seconds'"))

    step(100)
    with cluster.db.reading() as session:
        assert database_now_ms(session) - now_ms() > 90_000, "the service reads this clock"
    step(0)
    cluster.start("control")
    job = cluster.submit(500)
    victim = cluster.start("engine")
    for _ in range(2):
        cluster.start("engine")
    cluster.until(lambda: cluster.holds(victim, job), "the victim works")
    step(-10)
    victim.kill()  # its leases look ten seconds longer than they are
    cluster.until(lambda: not cluster.holds(victim, job), "they are freed all the same")
    for shift_s in (0, 1):
        done = cluster.num_done(job)
        step(shift_s)
        cluster.until(
            lambda seen=done: cluster.num_done(job) > seen or cluster.batch(job).status == "completed", "it goes on"
        )
        time.sleep(1)
    cluster.wait(job, "completed")
    assert len(judge(job).output) == 500
    engine.dispose()
