"""What /metrics shows an operator of the deployment: each number moves with what it is about, on both databases."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families
from sqlalchemy import update

from batchsvc import ids
from batchsvc.accounts import service as accounts
from batchsvc.batches import hold_queries, tally_queries, worker_queries
from batchsvc.batches.tables import Export, Model, Unit
from batchsvc.clock import now_ms
from batchsvc.settings import Settings
from batchsvc.webhooks.tables import WebhookDelivery, WebhookEndpoint, WebhookEvent
from tests.batchsvc.batches.door import DIGEST, HOUR_MS, MODEL, Door, hours


@pytest.fixture
def door(settings: Settings) -> Iterator[Door]:
    made = Door(settings)
    yield made
    made.close()


class Shown:
    """One scrape."""

    def __init__(self, client: Any) -> None:
        self._samples = [
            sample
            for family in text_string_to_metric_families(client.get("/metrics").text)
            for sample in family.samples
        ]

    def __call__(self, name: str, **labels: str) -> float:
        found = [
            sample.value
            for sample in self._samples
            if sample.name == f"batchsvc_{name}" and labels.items() <= sample.labels.items()
        ]
        assert len(found) == 1, f"{name} {labels}: {found}"
        return float(found[0])


def running(door: Door, client: Any, num_units: int, **values: Any) -> str:
    """A batch in progress with so many ready units of one line each."""
    batch_id = str(door.create(client).json()["id"])
    door.start(batch_id, num_units)
    door.set(batch_id, total=num_units, **values)
    return batch_id


def test_units_that_are_leased_or_suspect_and_the_age_of_what_waits(door: Door) -> None:
    client = door.client()
    empty = Shown(client)
    for name in ("units_leased", "units_suspect", "claimable_age_seconds"):
        assert empty(name, model=MODEL, model_digest=DIGEST) == 0
    batch_id = running(door, client, 5, in_progress_ms=now_ms() - HOUR_MS)
    running(door, client, 1)
    with door.db.transaction() as session:
        for no, change in ((0, {"state": "leased"}), (1, {"state": "leased"}), (2, {"is_suspect": True})):
            session.execute(update(Unit).where(Unit.batch_id == batch_id, Unit.no == no).values(change))
    shown = Shown(client)
    assert (shown("units_leased", model=MODEL), shown("units_suspect", model=MODEL)) == (2, 1)
    assert shown("claimable_age_seconds", model=MODEL) == pytest.approx(3600, abs=120), "the oldest one counts"
    door.set(batch_id, is_paused=True)
    assert Shown(client)("claimable_age_seconds", model=MODEL) < 600, "what is paused doesn't wait for a worker"


def test_a_model_of_one_project_has_no_name_here(door: Door) -> None:
    client = door.client()
    running(door, client, 1)
    with door.db.transaction() as session:
        session.get_one(Model, MODEL).project_id = door.project_id
    shown = Shown(client)
    for name in ("units_claimable", "workers_live", "workers_serving", "units_leased"):
        assert shown(name, model="private", model_digest=DIGEST) == (name == "units_claimable")
    assert MODEL not in client.get("/metrics").text


def test_workers_that_serve_a_model_in_turn_count_as_its_workers(door: Door) -> None:
    client = door.client(renew_s=600)  # however long this takes, they are alive
    assert Shown(client)("workers_serving", model=MODEL) == 0
    place = worker_queries.Place(name="w", models=("f" * 64, DIGEST))
    door.db.run(lambda session: worker_queries.register(session, "w:1:a", "f" * 64, place))
    shown = Shown(client)
    assert (shown("workers_live", model=MODEL), shown("workers_serving", model=MODEL)) == (0, 1), "it has its turn"
    door.db.run(lambda session: hold_queries.hold(session, hold_queries.WORKER + "w", "new disks"))
    door.db.run(
        lambda session: worker_queries.beat(session, "w:1:a", "f" * 64, is_draining=False, stats={}, place=place)
    )
    assert Shown(client)("workers_serving", model=MODEL) == 1, "nobody has to be woken to start one"


def test_work_that_waits_for_the_night_has_no_age(door: Door) -> None:
    by_day = door.client(offpeak=hours(3, 5))
    running(door, by_day, 2, in_progress_ms=now_ms() - HOUR_MS)
    assert Shown(by_day)("claimable_age_seconds", model=MODEL) == 0


def test_slack_is_that_of_the_nearest_deadline_by_tier_and_model(door: Door) -> None:
    client = door.client(windows="24h")
    assert Shown(client)("deadline_slack_seconds") > 1e6, "nothing to fear"
    near = running(door, client, 1, latest_start_ms=now_ms() + HOUR_MS)
    running(door, client, 1, latest_start_ms=now_ms() + 5 * HOUR_MS)
    mixed = running(door, client, 1, latest_start_ms=now_ms() - HOUR_MS)
    door.set(mixed, model_digest=None)
    shown = Shown(client)
    assert shown("deadline_slack_seconds", tier="batch_24h", model=MODEL) == pytest.approx(3600, abs=120)
    assert shown("deadline_slack_seconds", tier="batch_24h", model="") == pytest.approx(-3600, abs=120)
    for change in ({"is_paused": True}, {"has_quota": False}, {"has_budget": False}, {"completed": 1}):
        door.set(near, is_paused=False, has_quota=True, has_budget=True, completed=0)
        door.set(near, **change)
        assert Shown(client)("deadline_slack_seconds", model=MODEL) > 4 * 3600, f"nobody waits for it: {change}"


def test_batches_of_test_keys_wake_nobody(door: Door) -> None:
    client = door.client()
    late = running(door, client, 1, latest_start_ms=now_ms() - HOUR_MS, in_progress_ms=now_ms() - HOUR_MS)
    stuck = running(door, client, 1)
    door.set(stuck, status="validating", created_ms=now_ms() - HOUR_MS)
    overdue = running(door, client, 1, expires_ms=now_ms() - HOUR_MS)
    with door.db.transaction() as session:
        twin = accounts.test_twin(session, door.project_id).id
    for batch_id in (late, stuck, overdue):
        door.set(batch_id, project_id=twin)
    shown = Shown(client)
    assert shown("deadline_slack_seconds") > 1e6, "nothing to fear"
    assert shown("claimable_age_seconds", model=MODEL) == 0
    assert shown("state_age_seconds", state="validating") == shown("state_age_seconds", state="finalizing") == 0


def test_batches_that_should_have_passed_a_state(door: Door) -> None:
    client = door.client()
    for state in ("validating", "finalizing", "cancelling"):
        assert Shown(client)("state_age_seconds", state=state) == 0
    batch_id = running(door, client, 1)
    door.set(batch_id, status="finalizing", finalizing_ms=now_ms() - HOUR_MS)
    assert Shown(client)("state_age_seconds", state="finalizing") == pytest.approx(3600, abs=120)
    door.set(batch_id, status="in_progress", expires_ms=now_ms() - 2 * HOUR_MS)
    assert Shown(client)("state_age_seconds", state="finalizing") == pytest.approx(7200, abs=120), "nobody ended it"
    door.set(batch_id, status="expired", ended_ms=now_ms())
    assert Shown(client)("state_age_seconds", state="finalizing") == 0


def test_what_waits_outside(door: Door) -> None:
    client = door.client()
    assert (Shown(client)("outbox_age_seconds"), Shown(client)("export_age_seconds")) == (0, 0)
    ended = running(door, client, 1)
    door.set(ended, status="completed", ended_ms=now_ms() - 2 * HOUR_MS)
    event, endpoint = ids.event_id(), "we_1"
    with door.db.transaction() as session:
        session.add(Export(batch_id=ended, project_id=door.project_id, state="pending", uploads=[]))
        session.add(
            WebhookEvent(
                id=event, project_id=door.project_id, type="batch.completed", data={}, key="k",
                created_ms=now_ms() - HOUR_MS, is_spread=False,
            )
        )  # fmt: skip
        session.add(
            WebhookEndpoint(
                id=endpoint, project_id=door.project_id, name="n", url="https://x", event_types=[], secret="s",
                old_secrets=[], created_ms=1, updated_ms=1, failures=0,
            )
        )  # fmt: skip
    shown = Shown(client)
    assert shown("outbox_age_seconds") == pytest.approx(3600, abs=120), "nobody has spread it"
    assert shown("export_age_seconds") == pytest.approx(7200, abs=120)
    with door.db.transaction() as session:
        session.get_one(WebhookEvent, event).is_spread = True
        session.add(
            WebhookDelivery(
                id="wd_1", endpoint_id=endpoint, event_id=event, state="pending", created_ms=now_ms() - HOUR_MS,
                due_ms=1, attempts=[],
            )
        )  # fmt: skip
        session.get_one(Export, ended).state = "done"
    shown = Shown(client)
    assert shown("outbox_age_seconds") == pytest.approx(3600, abs=120), "it is on its way"
    assert shown("export_age_seconds") == 0
    with door.db.transaction() as session:
        session.get_one(WebhookDelivery, "wd_1").state = "delivered"
    assert Shown(client)("outbox_age_seconds") == 0


def test_paused_batches_are_those_that_an_operator_has_to_think_of(door: Door) -> None:
    client = door.client()
    batch_id = running(door, client, 1)
    for change, count in (
        ({"is_paused": True, "is_own_pause": True}, 0),
        ({"pause_reason": "engines crashed"}, 1),
        ({"status": "expired"}, 0),
    ):
        door.set(batch_id, **change)
        assert Shown(client)("batches_paused") == count, change


def test_orders_that_nothing_is_claimed_are_seen(door: Door) -> None:
    client = door.client()
    assert [Shown(client)("claim_holds", kind=kind) for kind in ("everything", "model", "worker")] == [0, 0, 0]
    for target in (hold_queries.EVERYTHING, hold_queries.MODEL + DIGEST, hold_queries.WORKER + "a", "worker:b:1"):
        door.db.run(lambda session, target=target: hold_queries.hold(session, target, "r"))
    assert [Shown(client)("claim_holds", kind=kind) for kind in ("everything", "model", "worker")] == [1, 1, 2]


def test_tallies_grow_and_say_when(door: Door) -> None:
    client = door.client()
    shown = Shown(client)
    assert shown("leases_lost_total") == shown("reaper_last_tick_timestamp_seconds") == 0, "there from the start"
    for num in (2, 3):
        door.db.run(lambda session, num=num: tally_queries.add(session, "leases_lost", num))
    door.db.run(lambda session: tally_queries.add(session, "reaper_ticks"))
    shown = Shown(client)
    assert (shown("leases_lost_total"), shown("reaper_ticks_total")) == (5, 1)
    assert shown("lines_quarantined_total") == shown("parts_damaged_total") == 0
    assert shown("reaper_last_tick_timestamp_seconds") == pytest.approx(now_ms() / 1000, abs=120)
