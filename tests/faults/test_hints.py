"""Rows 31 to 34: messages that come three times, half the time, while they run, or from somebody else."""

from __future__ import annotations

import base64
import json
import pickle
from collections.abc import Callable

import pytest
import redis

from batchsvc.dispatch import CONTROL_QUEUE, queue_of
from tests.faults.cluster import Cluster
from tests.faults.judge import Verdict

pytestmark = pytest.mark.faults
Judge = Callable[..., Verdict]
KEY_PREFIX = "batchsvc:"


def run_all(cluster: Cluster, count: int = 100, **changes: object) -> None:
    cluster.serve(**changes)
    for role in ("control", "control", "engine", "engine"):
        cluster.start(role, **changes)
    cluster.submit(count)
    cluster.wait(cluster.jobs[-1], "completed")


@pytest.mark.parametrize("database_url", ["sqlite", "postgresql"], indirect=True)
def test_row_31_every_message_three_times(cluster: Cluster, judge: Judge) -> None:
    run_all(cluster, TEST_HINTS=3, BATCHSVC_WINDOW_LINES=25)
    verdict = judge(cluster.jobs[0])
    assert verdict.needless == 0
    assert cluster.batch(cluster.jobs[0]).fin_epoch >= 1


def test_row_32_half_of_the_messages_lost(cluster: Cluster, judge: Judge) -> None:
    run_all(cluster, TEST_HINTS=0.5, TEST_SEED=cluster.rng.random())
    assert judge(cluster.jobs[0]).needless == 0


def test_row_33_tasks_delivered_again_while_they_run(cluster: Cluster, judge: Judge) -> None:
    slow = "window.stored=sleep:2.5;batch.publishing=sleep:2.5"
    cluster.serve()
    impatient = {"failpoints": slow, "TEST_VISIBILITY_S": 1, "BATCHSVC_WINDOW_LINES": 50}
    planners = [cluster.start("control", **impatient) for _ in range(2)]
    cluster.start("engine", BATCHSVC_LEASE_S=60)  # no lease is lost to a busy machine
    job = cluster.submit(100)
    cluster.wait(job, "completed")
    assert any("message.delivered_again" in planner.text() for planner in planners), "a task came while it ran"
    assert judge(job).needless == 0


def test_row_34_messages_of_somebody_else(cluster: Cluster, judge: Judge) -> None:
    control, engine = cluster.start("control"), cluster.start("engine")
    cluster.until(lambda: "ready." in control.text() and "ready." in engine.text(), "they listen")
    secret = "canary-in-a-message"
    cluster.secrets.append(secret)

    def message(task: str, body: bytes, kind: str) -> bytes:
        headers = {"lang": "py", "task": task, "id": secret, "root_id": None, "parent_id": None, "group": None}
        properties = {
            "correlation_id": "x",
            "delivery_mode": 2,
            "delivery_info": {"exchange": "", "routing_key": CONTROL_QUEUE},
            "priority": 0,
            "body_encoding": "base64",
            "delivery_tag": "tag",
        }
        envelope = {"body": base64.b64encode(body).decode(), "content-encoding": "utf-8", "content-type": kind}
        return json.dumps({**envelope, "headers": headers, "properties": properties}).encode()

    good = json.dumps([[secret], {}, {}]).encode()
    foreign = [
        b"this is no JSON " + secret.encode(),
        b"{}",
        b'{"body": 5, "properties": {}}',
        message("batch.plan", pickle.dumps(([secret], {}, {})), "application/x-python-serialize"),
        message("no.such_task", good, "application/json"),
        message("batch.plan", b"[[" + secret.encode(), "application/json"),
        message("batch.plan", json.dumps([[secret, 1, 2, 3], {}, {}]).encode(), "application/json"),
        message("batch.finalize", good, "application/json"),
        message("unit.run", good, "application/json"),
    ]
    with redis.Redis.from_url(cluster.services.redis_url) as client:
        for queue in (CONTROL_QUEUE, queue_of(cluster.model.digest)):
            for body in foreign:
                client.lpush(KEY_PREFIX + queue, body)
    job = cluster.submit(60)
    cluster.wait(job, "completed")
    with redis.Redis.from_url(cluster.services.redis_url) as client:
        queues = [KEY_PREFIX + CONTROL_QUEUE, KEY_PREFIX + queue_of(cluster.model.digest)]
        cluster.until(lambda: not any(client.llen(queue) for queue in queues), "all of them are taken")
    assert control.is_alive
    assert engine.is_alive
    later = cluster.submit(20)
    cluster.wait(later, "completed")
    judge(job)
    judge(later)
