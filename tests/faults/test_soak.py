"""Row 77: random faults, one every two seconds, for SOAK_S seconds; then one judge for all, and nothing has grown.

`FAULT_SEED` repeats the order of the faults; the moment at which each meets the work is the machine's.
"""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import httpx
import psutil
import pytest
import redis
from sqlalchemy import func, select

from batchsvc.batches import poison_queries
from batchsvc.batches.lifecycle import TERMINAL
from batchsvc.batches.tables import Garbage, Segment, Unit, Worker
from batchsvc.clock import monotonic_s
from tests.faults.cluster import Cluster, Process
from tests.faults.havoc import Havoc
from tests.faults.judge import Verdict
from tests.faults.targets import database_proxied, redis_proxied, s3_proxied

Judge = Callable[..., Verdict]
pytestmark = [
    pytest.mark.soak,
    pytest.mark.timeout(0),
    pytest.mark.parametrize("database_url", ["postgresql"], indirect=True),
]

SOAK_S = float(os.environ.get("SOAK_S", "120"))
FAULT_EVERY_S = 2.0
AT_ONCE = 3  # batches that are kept running
END_S = 600.0  # for all of them to end, once the faults are over
MIB = 1 << 20


@dataclass(frozen=True)
class Reading:
    """What a cluster takes up at a quiet moment. Of objects, the judge says that none is left over (I12)."""

    rss_bytes: dict[str, int]
    handles: dict[str, int]
    redis_keys: int
    transient_rows: dict[str, int]

    def assert_not_grown(self, before: Reading) -> None:
        for name, rss in self.rss_bytes.items():
            assert rss <= before.rss_bytes[name] * 1.3 + 32 * MIB, f"{name}: {before.rss_bytes[name]} -> {rss} bytes"
            grown = self.handles[name] - before.handles[name]
            assert grown <= 12, f"{name}: {grown} more handles"  # the pools may be fuller than before
        assert self.redis_keys <= before.redis_keys + 8, f"Redis keys: {before.redis_keys} -> {self.redis_keys}"
        assert self.transient_rows["segments"] == 0, "no upload is left open"
        assert self.transient_rows["leases"] == 0
        assert self.transient_rows["workers"] <= before.transient_rows["workers"] + 40, "the dead are forgotten in time"


def fill_pools(cluster: Cluster) -> None:
    """As many calls at once as the API has threads, so that its pools are as full at each reading."""
    paths = [f"/v1/batches/{job.id}" for job in cluster.jobs] + ["/v1/files", "/v1/batches", "/readyz"]
    with ThreadPoolExecutor(40) as pool:
        list(pool.map(lambda number: cluster.call("GET", paths[number % len(paths)]), range(400)))


def handles(process: psutil.Process, api_port: int) -> int:
    """Open files and sockets of a process, without the API's clients: each watch of a batch is one."""
    clients = [one for one in process.net_connections() if one.raddr and one.laddr.port == api_port]
    return process.num_fds() - len(clients)


def read(cluster: Cluster, watched: list[Process]) -> Reading:
    fill_pools(cluster)
    of = {process.name: psutil.Process(process.pid) for process in watched}
    port = int(cluster.url.rpartition(":")[2])
    with redis.Redis.from_url(cluster.services.redis_url) as client:
        redis_keys = client.dbsize()
    with cluster.db.reading() as session:

        def count(*where: object) -> int:
            return int(session.scalar(select(func.count()).select_from(*where)) or 0)

        rows = {
            "segments": count(Segment),
            "workers": count(Worker),
            "garbage": count(Garbage),
            "leases": int(session.scalar(select(func.count()).where(Unit.state == "leased")) or 0),
        }
    return Reading(
        rss_bytes={name: process.memory_info().rss for name, process in of.items()},
        handles={name: handles(process, port) for name, process in of.items()},
        redis_keys=int(redis_keys),
        transient_rows=rows,
    )


def top_up(cluster: Cluster) -> None:
    """Keep a few batches running; an API that is in trouble is asked again next time."""
    running = sum(cluster.batch(job).status not in TERMINAL for job in cluster.jobs)
    if running < AT_ONCE:
        try:
            cluster.submit(cluster.rng.randrange(20, 160), max_tokens=cluster.rng.randrange(4, 24))
        except (httpx.HTTPError, AssertionError):
            return


def finish(cluster: Cluster) -> None:
    """Wait until all batches have ended; an operator resumes what the brake has paused."""
    deadline = time.monotonic() + END_S
    while unfinished := [job for job in cluster.jobs if cluster.batch(job).status not in TERMINAL]:
        assert time.monotonic() < deadline, f"still not ended: {[cluster.batch(job).status for job in unfinished]}"
        for job in unfinished:
            if cluster.batch(job).is_paused:
                with cluster.db.transaction() as session:
                    poison_queries.resume(session, job.id)
        time.sleep(0.2)


def test_row_77_random_faults_lose_nothing_and_leave_nothing(cluster: Cluster, judge: Judge) -> None:
    cluster.http.timeout = httpx.Timeout(20)
    cluster.env["BATCHSVC_FAKE_TOKENS_PER_S"] = "600"
    api = cluster.serve()  # reaches the services directly: it is the client's eye
    with (
        s3_proxied(cluster, cluster.rng.randrange(1 << 30)) as store,
        database_proxied(cluster) as database,
        redis_proxied(cluster) as broker,
    ):
        spared = [cluster.start("control"), cluster.start("engine")]
        havoc = Havoc(cluster, database, broker, store, spared)
        havoc.calm()
        # one that finds no database at its start ends, and a supervisor would start it again; there is none here
        cluster.until(lambda: all(" ready." in process.text() for process in spared), "the spared ones work")
        began = monotonic_s()
        before: Reading | None = None
        while monotonic_s() - began < SOAK_S:
            top_up(cluster)
            if before is None and monotonic_s() - began > SOAK_S / 4:
                havoc.calm()
                finish(cluster)
                before = read(cluster, [api, *spared])
                began += monotonic_s() - began - SOAK_S / 4  # the pause counts for nothing
                continue
            havoc.strike()
            time.sleep(FAULT_EVERY_S * cluster.rng.uniform(0.5, 1.5))
            if cluster.rng.random() < 0.7:
                havoc.calm()  # else the next fault comes on top
        havoc.calm()
        finish(cluster)
        cluster.wait(cluster.submit(20), "completed")  # whatever became of the others, it works when all is well
        after = read(cluster, [api, *spared])
        assert all(process.is_alive for process in spared)
    print(f"{len(cluster.jobs)} batches, faults: {dict(Counter(havoc.done))}")
    print(before, after, sep="\n")
    ends = Counter(judge(job, errors={"poison"}).status for job in cluster.jobs)
    print(dict(ends))
    assert before is not None
    after.assert_not_grown(before)
