"""Sending to real receivers: signed, at least once under one id, through kill -9, and past those that are slow."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from batchsvc.batches import lifecycle
from batchsvc.batches.lifecycle import Status
from batchsvc.db.session import database_now_ms
from batchsvc.settings import Settings
from batchsvc.webhooks import service
from tests.batchsvc.webhooks.conftest import Hooks
from tests.receiver import Receiver, receiving
from workers.webhooks import Courier

_SEND = (
    "from batchsvc.settings import Settings; from batchsvc.db.session import Database;"
    " from workers.webhooks import Courier; s = Settings.from_env(); Courier(s, Database(s.database_url)).send_due()"
)


def environment(hooks: Hooks) -> dict[str, str]:
    return {
        "DATABASE_URL": hooks.db.url,
        "REDIS_URL": "redis://127.0.0.1:1/0",
        "BATCHSVC_EGRESS_ALLOW": "127.0.0.0/8",
        "BATCHSVC_WEBHOOK_TIMEOUT_S": "20",
    }


def courier(hooks: Hooks, **changes: object) -> Courier:
    return Courier(Settings.from_env(environment(hooks)).model_copy(update=changes), hooks.db)


def end_batch(hooks: Hooks) -> str:
    batch_id = hooks.add_batch(Status.FINALIZING)
    hooks.db.run(lambda session: lifecycle.move(session, batch_id, Status.COMPLETED, now_ms=database_now_ms(session)))
    return batch_id


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    with receiving() as made:
        yield made


def test_the_official_client_unwraps_what_a_receiver_gets(hooks: Hooks, receiver: Receiver) -> None:
    endpoint = hooks.add_endpoint(receiver.url)
    batch_id = end_batch(hooks)
    here = courier(hooks)
    assert here.send_due() == 1 and here.send_due() == 0
    (got,) = receiver.received
    event = got.unwrap(endpoint.secret)
    assert (event.type, event.data.id) == ("batch.completed", batch_id)
    assert event.id == got.id and got.path == "/hook?a=1" and got.headers["content-type"] == "application/json"
    (delivery,) = hooks.deliveries()
    (attempt,) = delivery.attempts
    assert (delivery.state, attempt["status"], attempt["error"]) == ("delivered", 204, None)


def test_a_retry_has_the_same_id_and_body_and_its_own_time_and_both_secrets(hooks: Hooks, receiver: Receiver) -> None:
    endpoint = hooks.add_endpoint(receiver.url)
    receiver.statuses = [500, 302]
    end_batch(hooks)
    here = courier(hooks)
    assert here.send_due() == 1, "and not at once again"
    hours_ago = hooks.db.run(database_now_ms) - 7_200_000
    for _ in range(2):
        hooks.set("webhook_deliveries", due_ms=hours_ago)
        hooks.set("webhook_events", created_ms=hours_ago)
        new = hooks.db.run(lambda session: service.rotate(session, hooks.project_id, endpoint.id, is_old_kept=True))
        assert here.send_due() == 1
    assert len({got.id for got in receiver.received}) == 1
    last = receiver.received[-1]
    assert last.unwrap(new.secret) == last.unwrap(endpoint.secret) == last.unwrap(new.old_secrets[0][0])
    assert abs(int(last.headers["webhook-timestamp"]) - time.time()) < 100
    assert [attempt["status"] for attempt in hooks.deliveries()[0].attempts] == [500, 302, 204]
    assert "redirect" in hooks.deliveries()[0].attempts[1]["error"]


def test_kill_9_between_sending_and_writing_it_down_sends_it_again(hooks: Hooks, receiver: Receiver) -> None:
    endpoint = hooks.add_endpoint(receiver.url)
    end_batch(hooks)
    env = {**os.environ, **environment(hooks), "BATCHSVC_FAILPOINTS": "webhook.sent=kill"}
    killed = subprocess.run([sys.executable, "-c", _SEND], env=env, timeout=120, capture_output=True)
    assert killed.returncode == -9, killed.stderr
    (first,) = receiver.received
    assert hooks.deliveries()[0].state == "pending" and hooks.deliveries()[0].attempts == []
    here = courier(hooks)
    assert here.send_due() == 0, "the dead process has the lease"
    hooks.set("webhook_endpoints", lease_ms=1)
    assert here.send_due() == 1
    second = receiver.received[1]
    assert second.id == first.id and second.body == first.body
    assert second.unwrap(endpoint.secret).id == first.id and hooks.deliveries()[0].state == "delivered"


def test_a_slow_receiver_delays_nobody_else(hooks: Hooks, receiver: Receiver) -> None:
    hooks.add_endpoint(receiver.url)
    receiver.gate.clear()
    with receiving() as fast:
        hooks.add_endpoint(fast.url)
        here = courier(hooks)
        here.start()
        for _ in range(3):
            end_batch(hooks)
        here.wake()
        fast.wait_for(3)
        assert len(receiver.wait_for(1)) == 1, "it still has the first one"
        end_batch(hooks)
        here.wake()
        fast.wait_for(4)
        receiver.gate.set()
        receiver.wait_for(3)
        deadline = time.monotonic() + 20
        while {delivery.state for delivery in hooks.deliveries()} != {"delivered"}:
            assert time.monotonic() < deadline
            here.wake()
            time.sleep(0.05)
        here.stop()
    assert len(receiver.received) == 4 == len({got.id for got in receiver.received})


def test_an_address_that_is_refused_is_never_connected_to(hooks: Hooks, receiver: Receiver) -> None:
    """It was permitted, or public, when the endpoint was made."""
    hooks.add_endpoint(receiver.url)
    end_batch(hooks)
    assert courier(hooks, egress_allow="").send_due() == 1
    (attempt,) = hooks.deliveries()[0].attempts
    assert attempt["status"] is None and "refused" in attempt["error"] and not receiver.received
