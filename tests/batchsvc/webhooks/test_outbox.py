"""The outbox on both databases: an event where a batch ends, deliveries, leases, retries, the breaker."""

from __future__ import annotations

import threading
from functools import partial

import pytest
from sqlalchemy.orm import Session

from batchsvc.accounts import service as accounts
from batchsvc.batches import lifecycle
from batchsvc.batches import service as batches
from batchsvc.batches.lifecycle import Status
from batchsvc.db.session import database_now_ms
from batchsvc.webhooks import delivery_queries as sql
from batchsvc.webhooks import retry, service
from batchsvc.webhooks.delivery_queries import Outcome, Sending
from batchsvc.webhooks.tables import WebhookEndpoint
from tests.batchsvc.webhooks.conftest import Hooks

OK, BROKEN, SILENT = Outcome(status=200, took_ms=3), Outcome(status=500), Outcome(error="no answer within 10 s")


def end(hooks: Hooks, batch_id: str, status: Status) -> bool:
    return hooks.db.run(lambda session: lifecycle.move(session, batch_id, status, now_ms=database_now_ms(session)))


def attempt(hooks: Hooks, outcome: Outcome) -> tuple[Sending, str | None] | None:
    """Claim, make one attempt, record it, let go."""
    claimed = hooks.db.run(partial(sql.claim, owner="w", lease_s=30))
    if claimed is None:
        return None
    sending = hooks.db.run(partial(sql.next_due, claimed=claimed, lease_s=30))
    state = None
    if sending is not None:
        state = hooks.db.run(partial(sql.record, claimed=claimed, sending=sending, outcome=outcome, chance=0))
    hooks.db.run(partial(sql.release, claimed=claimed))
    return None if sending is None else (sending, state)


@pytest.mark.parametrize(
    ("before", "status"),
    [
        (Status.FINALIZING, Status.COMPLETED),
        (Status.FINALIZING, Status.EXPIRED),
        (Status.FINALIZING, Status.CANCELLED),
        (Status.VALIDATING, Status.FAILED),
        (Status.VALIDATING, Status.EXPIRED),
    ],
)
def test_whoever_ends_a_batch_writes_its_event_with_it(hooks: Hooks, before: Status, status: Status) -> None:
    hooks.add_endpoint()
    batch_id = hooks.add_batch(before)
    with Session(hooks.db.engine) as session:
        assert lifecycle.move(session, batch_id, status, now_ms=database_now_ms(session))
        session.rollback()  # the end doesn't count, and neither does its event
    assert hooks.events() == []
    assert end(hooks, batch_id, status) and not end(hooks, batch_id, status)
    (event,) = hooks.events()
    assert (event.type, event.data, event.project_id) == (f"batch.{status}", {"id": batch_id}, hooks.project_id)
    assert event.id == batch_id.replace("batch_", "evt_") and not event.is_spread
    with hooks.db.reading() as session:
        assert event.created_ms == batches.get(session, hooks.project_id, batch_id).ended_ms


def test_a_cancel_by_the_api_writes_its_event(hooks: Hooks) -> None:
    hooks.add_endpoint()
    validating, running = hooks.add_batch(Status.VALIDATING), hooks.add_batch(Status.IN_PROGRESS)
    for batch_id in (validating, running):
        hooks.db.run(lambda session, batch_id=batch_id: batches.cancel(session, hooks.project_id, batch_id))
    (event,) = hooks.events()
    assert (event.type, event.data["id"]) == ("batch.cancelled", validating), "the other one hasn't ended yet"


def test_a_project_without_receivers_writes_nothing(hooks: Hooks) -> None:
    with hooks.db.transaction() as session:
        other = accounts.create_project(session, "other").id
    hooks.add_endpoint(project_id=other)
    end(hooks, hooks.add_batch(Status.FINALIZING), Status.COMPLETED)
    assert hooks.events() == []


def test_an_event_goes_to_those_who_want_it_from_their_time_on(hooks: Hooks) -> None:
    wants = hooks.add_endpoint(types=["batch.completed", "batch.failed"])
    hooks.add_endpoint(types=["batch.failed"])
    end(hooks, hooks.add_batch(Status.FINALIZING), Status.COMPLETED)
    late = hooks.add_endpoint()
    hooks.set("webhook_events", created_ms=late.created_ms - 1)
    hooks.set("webhook_endpoints", created_ms=late.created_ms - 2)
    with hooks.db.transaction() as session:
        session.get_one(WebhookEndpoint, late.id).created_ms = late.created_ms
    assert hooks.db.run(sql.spread) == 1 and hooks.db.run(sql.spread) == 0
    (delivery,) = hooks.deliveries()
    assert (delivery.endpoint_id, delivery.state, delivery.attempts) == (wants.id, "pending", [])


def test_two_processes_spread_an_event_once(hooks: Hooks) -> None:
    for _ in range(3):
        hooks.add_endpoint()
    for _ in range(5):
        end(hooks, hooks.add_batch(Status.FINALIZING), Status.COMPLETED)
    threads = [threading.Thread(target=hooks.db.run, args=(sql.spread,)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(hooks.deliveries()) == 15


def test_a_receiver_has_one_sender_at_a_time(hooks: Hooks) -> None:
    hooks.add_endpoint()
    for _ in range(2):
        end(hooks, hooks.add_batch(Status.FINALIZING), Status.COMPLETED)
    hooks.db.run(sql.spread)
    first = hooks.db.run(partial(sql.claim, owner="a", lease_s=30))
    assert first is not None and hooks.db.run(partial(sql.claim, owner="b", lease_s=30)) is None
    sending = hooks.db.run(partial(sql.next_due, claimed=first, lease_s=30))
    assert sending is not None
    hooks.set("webhook_endpoints", lease_ms=1)  # the first sender died, or hangs
    second = hooks.db.run(partial(sql.claim, owner="b", lease_s=30))
    assert second is not None and second.epoch == first.epoch + 1
    assert hooks.db.run(partial(sql.next_due, claimed=first, lease_s=30)) is None
    again = hooks.db.run(partial(sql.next_due, claimed=second, lease_s=30))
    assert again is not None and again.event_id == sending.event_id, "nothing was written of the attempt"
    lost = partial(sql.record, claimed=first, sending=sending, chance=0)
    assert hooks.db.run(partial(lost, outcome=BROKEN)) is None, "a failure counts under its own epoch alone"
    assert hooks.db.run(partial(lost, outcome=OK)) == "delivered", "and a success always"
    assert hooks.db.run(partial(lost, outcome=OK)) is None


def test_a_failure_is_tried_again_later_and_given_up_in_the_end(hooks: Hooks) -> None:
    hooks.add_endpoint()
    end(hooks, hooks.add_batch(Status.FINALIZING), Status.COMPLETED)
    hooks.db.run(sql.spread)
    for number in range(1, retry.MAX_ATTEMPTS + 1):
        made = attempt(hooks, SILENT)
        assert made is not None and made[1] == ("failed" if number == retry.MAX_ATTEMPTS else "pending")
        assert attempt(hooks, SILENT) is None, "it isn't due yet"
        hooks.set("webhook_deliveries", due_ms=1)
        hooks.set("webhook_endpoints", open_until_ms=0)
    (delivery,) = hooks.deliveries()
    assert len(delivery.attempts) == retry.MAX_ATTEMPTS and delivery.ended_ms
    assert delivery.attempts[0]["error"] == "no answer within 10 s" and delivery.attempts[0]["status"] is None


def test_the_breaker_lets_a_broken_receiver_alone_and_one_success_closes_it(hooks: Hooks) -> None:
    hooks.add_endpoint()
    for _ in range(8):
        end(hooks, hooks.add_batch(Status.FINALIZING), Status.COMPLETED)
    hooks.db.run(sql.spread)
    for _ in range(5):
        assert attempt(hooks, BROKEN) is not None
    assert attempt(hooks, BROKEN) is None, "three are due, and nothing is sent"
    assert hooks.db.run(sql.num_due) == 0 and hooks.db.run(partial(sql.claim, owner="w", lease_s=30)) is None
    assert sum(len(delivery.attempts) for delivery in hooks.deliveries()) == 5
    hooks.set("webhook_endpoints", open_until_ms=1)
    assert attempt(hooks, BROKEN) is not None and attempt(hooks, BROKEN) is None, "one tells that it isn't back"
    hooks.set("webhook_endpoints", open_until_ms=1)
    assert attempt(hooks, OK) is not None
    assert attempt(hooks, OK) is not None, "and one that it is"
    (endpoint,) = hooks.rows(WebhookEndpoint)
    assert (endpoint.failures, endpoint.open_until_ms) == (0, 0)


def test_rotation_signs_with_both_for_a_day(hooks: Hooks) -> None:
    made = hooks.add_endpoint()
    rotate = partial(service.rotate, project_id=hooks.project_id, endpoint_id=made.id)
    now = hooks.db.run(database_now_ms)
    kept = hooks.db.run(partial(rotate, is_old_kept=True))
    assert sql.secrets_of(kept, now) == [kept.secret, made.secret]
    assert sql.secrets_of(kept, now + 86_500_000) == [kept.secret]
    again = hooks.db.run(partial(rotate, is_old_kept=True))
    assert sql.secrets_of(again, now) == [again.secret, kept.secret, made.secret], "nobody may have seen the second"
    ended = hooks.db.run(partial(rotate, is_old_kept=False))
    assert sql.secrets_of(ended, now) == [ended.secret]
    assert len({made.secret, kept.secret, again.secret, ended.secret}) == 4


def test_deleting_a_receiver_forgets_what_is_on_its_way(hooks: Hooks) -> None:
    made = hooks.add_endpoint()
    end(hooks, hooks.add_batch(Status.FINALIZING), Status.COMPLETED)
    hooks.db.run(sql.spread)
    claimed = hooks.db.run(partial(sql.claim, owner="a", lease_s=30))
    assert claimed is not None
    sending = hooks.db.run(partial(sql.next_due, claimed=claimed, lease_s=30))
    assert sending is not None
    hooks.db.run(lambda session: service.delete(session, hooks.project_id, made.id))
    assert hooks.deliveries() == [] and hooks.rows(WebhookEndpoint) == []
    assert hooks.db.run(partial(sql.record, claimed=claimed, sending=sending, outcome=OK, chance=0)) is None
    hooks.db.run(partial(sql.release, claimed=claimed))


def test_old_events_are_given_up_and_then_forgotten(hooks: Hooks) -> None:
    hooks.add_endpoint()
    end(hooks, hooks.add_batch(Status.FINALIZING), Status.COMPLETED)
    hooks.db.run(sql.spread)
    assert hooks.db.run(sql.give_up_old) == 0 == hooks.db.run(sql.forget_old)
    now = hooks.db.run(database_now_ms)
    hooks.set("webhook_deliveries", created_ms=now - 4 * 86_400_000)
    assert hooks.db.run(sql.give_up_old) == 1 and hooks.deliveries()[0].state == "failed"
    hooks.set("webhook_events", created_ms=now - 31 * 86_400_000)
    assert hooks.db.run(sql.forget_old) == 1 and hooks.deliveries() == [] and hooks.events() == []
