"""Rows 64 and 65: receivers that misbehave, addresses that must not be reached, and a sender that is killed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from sqlalchemy import select, update

from batchsvc.webhooks import retry
from batchsvc.webhooks.tables import WebhookDelivery, WebhookEndpoint
from tests.faults.cluster import Cluster
from tests.faults.judge import Verdict
from tests.receiver import Receiver, receiving

pytestmark = pytest.mark.faults
Judge = Callable[..., Verdict]
LOOPBACK = {"BATCHSVC_EGRESS_ALLOW": "127.0.0.0/8", "BATCHSVC_WEBHOOK_TIMEOUT_S": 0.5}
METADATA = "http://169.254.169.254/latest/meta-data/"


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    with receiving() as made:
        yield made


def listen(cluster: Cluster, url: str, **changes: Any) -> dict[str, Any]:
    """An endpoint that wants to know how batches end, and an API that permits its address."""
    cluster.serve(**LOOPBACK | changes)
    body = {"name": "n", "url": url, "event_types": ["batch.completed"]}
    answer = cluster.call("POST", "/v1/webhook_endpoints", json=body)
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


def delivery(cluster: Cluster) -> WebhookDelivery | None:
    with cluster.db.reading() as session:
        return session.scalars(select(WebhookDelivery)).first()


def attempts(cluster: Cluster) -> list[dict[str, Any]]:
    made = delivery(cluster)
    return made.attempts if made else []


def hurry(cluster: Cluster, **endpoint: int) -> None:
    """What waits for its time is due now; `endpoint` changes the receiver's row."""
    with cluster.db.transaction() as session:
        session.execute(update(WebhookDelivery).where(WebhookDelivery.state == "pending").values(due_ms=1))
        session.execute(update(WebhookEndpoint).values(open_until_ms=0, **endpoint))


def run_a_batch(cluster: Cluster, judge: Judge) -> str:
    """Whatever its receivers do, a batch ends as ever."""
    cluster.start("engine")
    job = cluster.submit(20)
    cluster.wait(job, "completed")
    judge(job)
    return job.id


@pytest.mark.parametrize("mischief", ["500", "silent", "redirect"])
def test_row_64_a_receiver_that_misbehaves(cluster: Cluster, judge: Judge, receiver: Receiver, mischief: str) -> None:
    """It is tried again, a limited number of times, and once it answers well nothing more is sent."""
    if mischief == "silent":
        receiver.gate.clear()
    else:
        receiver.statuses += [500 if mischief == "500" else 302] * 3
        receiver.location = METADATA if mischief == "redirect" else ""
    listen(cluster, receiver.url)
    cluster.start("control", **LOOPBACK)
    batch_id = run_a_batch(cluster, judge)
    for count in (1, 2, 3):
        cluster.until(lambda count=count: len(attempts(cluster)) >= count, f"attempt {count}")
        hurry(cluster)
    receiver.gate.set()

    def has_arrived() -> bool:
        hurry(cluster)
        made = delivery(cluster)
        return made is not None and made.state == "delivered"

    cluster.until(has_arrived, "it arrives")
    told = {
        "500": (500, ""),
        "silent": (None, "no answer"),
        "redirect": (302, "redirect"),
    }[mischief]
    for attempt in attempts(cluster)[:3]:
        assert attempt["status"] == told[0] and told[1] in (attempt["error"] or "")
    assert len({got.id for got in receiver.received}) == 1 and batch_id.encode() in receiver.received[-1].body


def test_row_64_a_receiver_that_never_answers_well_is_given_up(
    cluster: Cluster, judge: Judge, receiver: Receiver
) -> None:
    receiver.statuses += [503] * 100
    listen(cluster, receiver.url)
    cluster.start("control", **LOOPBACK)
    run_a_batch(cluster, judge)

    def is_given_up() -> bool:
        hurry(cluster)
        made = delivery(cluster)
        return made is not None and made.state == "failed"

    cluster.until(is_given_up, "it is given up")
    assert len(attempts(cluster)) == retry.MAX_ATTEMPTS == len(receiver.received)


@pytest.mark.parametrize("allowed", ["", "10.0.0.0/8"])
def test_row_64_an_address_that_turned_private_is_never_reached(
    cluster: Cluster, judge: Judge, receiver: Receiver, allowed: str
) -> None:
    """As if the name had been bound anew after the endpoint was made: what is judged is where the call would go."""
    listen(cluster, receiver.url)
    cluster.start("control", BATCHSVC_EGRESS_ALLOW=allowed, BATCHSVC_WEBHOOK_TIMEOUT_S=0.5)
    run_a_batch(cluster, judge)
    cluster.until(lambda: attempts(cluster), "the first attempt")
    hurry(cluster)
    cluster.until(lambda: len(attempts(cluster)) >= 2, "the second attempt")
    assert all(attempt["status"] is None and attempt["error"] for attempt in attempts(cluster))
    assert receiver.received == []


def test_row_64_metadata_addresses_are_refused_at_the_door(cluster: Cluster) -> None:
    cluster.serve(**LOOPBACK | {"BATCHSVC_EGRESS_ALLOW": "169.254.0.0/16"})
    body = {"name": "n", "url": METADATA, "event_types": ["batch.completed"]}
    assert cluster.call("POST", "/v1/webhook_endpoints", json=body).status_code == 400


@pytest.mark.parametrize("database_url", ["sqlite", "postgresql"], indirect=True)
def test_row_65_a_sender_killed_after_the_answer(cluster: Cluster, judge: Judge, receiver: Receiver) -> None:
    """The receiver has it, and nobody knows: it comes again under the same id, so that the receiver can tell."""
    endpoint = listen(cluster, receiver.url)
    victim = cluster.start("control", failpoints="webhook.sent=kill", **LOOPBACK)
    cluster.start("engine")
    job = cluster.submit(20)
    victim.died()
    assert len(receiver.received) == 1 and attempts(cluster) == []
    cluster.start("control", **LOOPBACK)
    hurry(cluster, lease_ms=1)  # the dead sender's lease
    cluster.until(lambda: (made := delivery(cluster)) and made.state == "delivered", "it is sent again")
    first, second = receiver.received
    assert (first.id, first.body) == (second.id, second.body)
    assert second.unwrap(endpoint["signing_secret"]).id == first.id
    assert len(attempts(cluster)) == 1
    judge(job)
