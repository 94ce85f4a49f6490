"""Rows 46 to 49, 51 and 54: a PostgreSQL that drops connections, loses answers, dies, is away, or refuses."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
from sqlalchemy import create_engine, func, select, text

from batchsvc.batches.claim_rank import VTIME_PER_TOKEN
from batchsvc.batches.tables import Part, Share
from batchsvc.clock import monotonic_s
from batchsvc.db import migrate
from tests.faults import judge as judging
from tests.faults.cluster import Cluster
from tests.faults.judge import Verdict
from tests.faults.proxy import POSTGRES_COMMIT, Connection, Direction, Tripwire
from tests.faults.restartable import own_postgres
from tests.faults.targets import database_proxied

Judge = Callable[..., Verdict]
pytestmark = [pytest.mark.faults, pytest.mark.parametrize("database_url", ["postgresql"], indirect=True)]

_VICTIM = "victim"  # what processes call themselves towards PostgreSQL, so that the test kills none of its own


@contextmanager
def administrator(cluster: Cluster) -> Iterator[Callable[[str], list[tuple[object, ...]]]]:
    """Runs statements outside of any transaction of the service."""
    url = cluster.services.database_url.replace("postgresql://", "postgresql+psycopg://")
    engine = create_engine(url, isolation_level="AUTOCOMMIT")
    with engine.connect() as connection:

        def run(statement: str) -> list[tuple[object, ...]]:
            result = connection.execute(text(statement))
            return [tuple(row) for row in result] if result.returns_rows else []

        yield run
    engine.dispose()


def test_row_46_connections_killed_inside_transactions(cluster: Cluster, judge: Judge) -> None:
    """First the server ends them, a few at a time; then each message may be the last of its connection."""
    with database_proxied(cluster) as proxy, administrator(cluster) as run:
        cluster.env["DATABASE_URL"] += f"?application_name={_VICTIM}"
        cluster.start("control")
        cluster.serve()
        job = cluster.submit(600)
        workers = [cluster.start("engine") for _ in range(2)]
        cluster.until(lambda: all(cluster.holds(worker, job) for worker in workers), "both work")
        killed, began = 0, monotonic_s()
        while killed < 60 and cluster.batch(job).status == "in_progress" and monotonic_s() - began < 60:
            backends = run(f"SELECT pid FROM pg_stat_activity WHERE application_name = '{_VICTIM}' AND state <> 'idle'")
            for (pid,) in backends[:2]:
                killed += len(run(f"SELECT pg_terminate_backend({pid})"))
        assert killed > 0

        def last_words(connection: Connection, direction: Direction, _data: bytes) -> None:
            if direction == "up" and cluster.rng.random() < 0.01:
                connection.cut(reset=True)

        proxy.tripwire = last_words
        cluster.until(lambda: cluster.batch(job).status == "completed" or monotonic_s() - began > 90, "some bad time")
        proxy.heal()
        cluster.wait(job, "completed")
        assert all(worker.is_alive for worker in workers)
        assert len(judge(job).output) == 600


@pytest.mark.quick_faults
def test_row_47_a_commit_whose_answer_is_lost_counts_once(cluster: Cluster, judge: Judge) -> None:
    cluster.serve()
    with database_proxied(cluster) as proxy:
        cluster.start("control")
        job = cluster.submit(200)
        cluster.wait(job, "in_progress")
        for _ in range(2):
            cluster.start("engine")
        cluster.until(lambda: cluster.num_done(job) > 0, "a part counts")
        proxy.tripwire = lost = Tripwire(POSTGRES_COMMIT, lambda passes: passes % 4 == 0)
        cluster.wait(job, "completed")
        proxy.heal()
        assert lost.num_lost > 5, "answers were lost"
        assert len(judge(job).output) == 200


def test_row_48_postgresql_killed_and_recovered(cluster: Cluster) -> None:
    with own_postgres() as server:
        migrate.upgrade(server.url)
        mine = cluster.with_services(database_url=server.url)
        try:
            mine.start("control")
            job = mine.submit(400)
            workers = [mine.start("engine") for _ in range(2)]
            mine.until(lambda: mine.num_done(job) > 40, "parts count")
            acknowledged = {part.id for part in mine.parts(job)}
            server.kill()
            server.start()
            with mine.db.reading() as session:
                found = set(session.scalars(select(Part.id).where(Part.batch_id == job.id)))
            assert acknowledged <= found, "what was acknowledged is there"
            mine.wait(job, "completed")
            assert all(worker.is_alive for worker in workers)
            assert len(judging.judge(mine, job).output) == 400
        except BaseException:
            mine.show_logs()
            raise
        finally:
            mine.close()


def test_row_49_postgresql_is_away_for_longer_than_a_lease(cluster: Cluster, judge: Judge) -> None:
    with database_proxied(cluster) as proxy:
        cluster.start("control")
        cluster.serve()
        job = cluster.submit(400)
        workers = [cluster.start("engine") for _ in range(2)]
        cluster.until(lambda: cluster.num_done(job) > 20, "parts count")
        proxy.refuse()
        began = monotonic_s()
        refused = cluster.call("GET", f"/v1/batches/{job.id}")
        assert refused.status_code == 503, refused.text
        assert refused.json()["error"]["code"] == "database_unavailable"
        assert float(refused.headers["retry-after"]) > 0
        assert cluster.http.get(f"{cluster.url}/livez").status_code == 200
        cluster.until(lambda: monotonic_s() - began > 4, "more than a lease")
        done, claimed = cluster.num_done(job), sum(unit.epoch for unit in cluster.units(job))
        cluster.until(lambda: monotonic_s() - began > 10, "much more than a lease")
        after = (cluster.num_done(job), sum(unit.epoch for unit in cluster.units(job)))
        assert after == (done, claimed), "nothing is claimed, nothing counts"
        assert all("lease.fenced" in worker.text() for worker in workers), "self-fence"
        proxy.heal()
        cluster.wait(job, "completed")
        assert all(worker.is_alive for worker in workers), "they recovered alone"
        assert cluster.get(job)["status"] == "completed"
        assert len(judge(job).output) == 400


_INJECT = """
CREATE SEQUENCE injected;
CREATE FUNCTION inject() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
  IF random() < {chance} THEN
    PERFORM nextval('injected');
    RAISE EXCEPTION 'injected' USING ERRCODE = (ARRAY['40001', '40P01'])[1 + floor(random() * 2)::int];
  END IF;
  RETURN NEW;
END $$;
CREATE TRIGGER inject_units BEFORE UPDATE ON units FOR EACH ROW EXECUTE FUNCTION inject();
CREATE TRIGGER inject_parts BEFORE INSERT ON parts FOR EACH ROW EXECUTE FUNCTION inject();
"""


def test_row_51_deadlocks_and_serialization_failures_are_retried(cluster: Cluster, judge: Judge) -> None:
    with administrator(cluster) as run:
        cluster.start("control")
        job = cluster.submit(200)
        cluster.wait(job, "in_progress")
        run(_INJECT.format(chance=0.15))
        for _ in range(2):
            cluster.start("engine")
        cluster.wait(job, "completed")
        ((injected,),) = run("SELECT last_value FROM injected")
        run("DROP TRIGGER inject_units ON units; DROP TRIGGER inject_parts ON parts; DROP FUNCTION inject")
    assert isinstance(injected, int) and injected > 5
    assert len(judge(job).output) == 200
    assert_charged_once(cluster, job.id)


def assert_charged_once(cluster: Cluster, batch_id: str) -> None:
    """The project's virtual time is what its parts ran, by its weight of 1, however often a commit was tried."""
    with cluster.db.reading() as session:
        vtime = session.scalar(select(Share.vtime).where(Share.project_id == cluster.project_id))
        ran = select(func.sum(Part.input_tokens - Part.cached_tokens + Part.output_tokens))
        assert vtime == session.scalar(ran.where(Part.batch_id == batch_id)) * VTIME_PER_TOKEN


def test_row_54_the_heartbeat_has_a_connection_of_its_own(cluster: Cluster, judge: Judge) -> None:
    """The pool has one connection, and a part's commit waits in it for a lock, for longer than a lease."""
    cluster.start("control")
    job = cluster.submit(60)
    engine = cluster.start("engine", TEST_POOL_SIZE=1, BATCHSVC_LEASE_S=6)
    cluster.until(lambda: cluster.num_done(job) > 0, "a part counts")
    done, crashes = cluster.num_done(job), sum(unit.crash_count for unit in cluster.units(job))
    with administrator(cluster) as run:
        run("BEGIN")
        run(f"SELECT 1 FROM batches WHERE id = '{job.id}' FOR UPDATE")
        waiting = (
            "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND datname = current_database()"
        )
        cluster.until(lambda: run(waiting) != [(0,)], "a commit waits for the batch's row")
        began = monotonic_s()
        while monotonic_s() - began < 8:
            cluster.until(lambda: cluster.silence_s() < 5, "the heart beats on")
        run("ROLLBACK")
    assert engine.is_alive
    assert sum(unit.crash_count for unit in cluster.units(job)) == crashes, "no lease was lost"
    assert cluster.num_done(job) >= done
    cluster.wait(job, "completed")
    assert len(judge(job).output) == 60
