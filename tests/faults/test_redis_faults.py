"""Rows 26 to 30: a Redis that is wiped, restarted empty, away, a black hole, or full. Nothing but time may be lost."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest

from tests.faults.cluster import Cluster
from tests.faults.judge import Verdict, judge
from tests.faults.own_valkey import OwnValkey
from tests.faults.proxy import FaultProxy

pytestmark = pytest.mark.faults
Judge = Callable[..., Verdict]


@pytest.fixture
def valkey(tmp_path: Path) -> Iterator[OwnValkey]:
    server = OwnValkey(tmp_path)
    server.start()
    yield server
    server.kill()


@pytest.fixture
def lonely(cluster: Cluster, valkey: OwnValkey) -> Iterator[Cluster]:
    """A cluster with that Valkey to itself."""
    with closing(cluster.with_services(redis_url=valkey.url)) as own:
        yield own
        own.show_logs()


def test_row_26_wiped_again_and_again(cluster: Cluster, judge: Judge) -> None:
    cluster.start("control")
    for _ in range(2):
        cluster.start("engine", BATCHSVC_FAKE_TOKENS_PER_S=200)
    job = cluster.submit(300)
    for _ in range(20):
        time.sleep(cluster.rng.uniform(0.05, 0.4))
        cluster.wipe_redis()
    cluster.wait(job, "completed")
    assert judge(job).needless == 0


def test_row_27_killed_and_started_empty(lonely: Cluster, valkey: OwnValkey) -> None:
    worker = lonely.start("engine", BATCHSVC_FAKE_TOKENS_PER_S=400, BATCHSVC_POLL_S=600)  # tickets alone feed it
    lonely.start("control")
    job = lonely.submit(200)
    lonely.until(lambda: lonely.num_done(job), "the first part")
    valkey.kill()
    time.sleep(1)
    valkey.start()
    lonely.wait(job, "completed")
    assert worker.is_alive, "it connects again"
    assert judge(lonely, job).needless == 0


def test_row_28_refused_then_a_black_hole(cluster: Cluster, judge: Judge, valkey: OwnValkey) -> None:
    """A create call answers at once, and workers find their work in SQL."""
    host, port = "127.0.0.1", int(valkey.url.rpartition(":")[2].partition("/")[0])
    with FaultProxy((host, port)) as proxy:
        url = valkey.url.replace(f":{port}/", f":{proxy.port}/")
        cluster.serve(REDIS_URL=url)
        cluster.start("control", REDIS_URL=url)
        cluster.start("engine", REDIS_URL=url)
        file_id = cluster.upload(lines := cluster.lines(20))
        for weather in (proxy.refuse, proxy.black_hole):
            weather()
            took, jobs = [], []
            for _ in range(5):
                began = time.monotonic()
                answer = cluster.create(file_id)
                took.append(time.monotonic() - began)
                jobs.append(cluster.adopt(answer.json()["id"], lines))
            assert min(took) < 0.5, f"create waits for Redis: {took}"
            for job in jobs:
                cluster.wait(job, "completed")
            proxy.heal()
    for job in cluster.jobs:
        judge(job)


@pytest.mark.quick_faults
def test_row_29_never_there(cluster: Cluster, judge: Judge) -> None:
    nowhere = {"REDIS_URL": "redis://127.0.0.1:1/0"}
    cluster.serve(**nowhere)
    ready = cluster.http.get(f"{cluster.url}/readyz")
    assert (ready.status_code, ready.json()["status"]) == (200, "degraded")
    cluster.start("control", **nowhere)
    cluster.start("engine", **nowhere)
    job = cluster.submit(60)
    cluster.wait(job, "completed")
    assert judge(job).needless == 0


def test_row_30_full(lonely: Cluster, valkey: OwnValkey) -> None:
    valkey.fill()
    api = lonely.serve()
    lonely.start("control")
    lonely.start("engine")
    job = lonely.submit(60)
    lonely.wait(job, "completed")
    lonely.until(lambda: "dispatch.failed" in api.text(), "it says that a hint was dropped")
    assert judge(lonely, job).needless == 0
