"""Completion windows that a deployment offers, and the night: what may be asked for, and when it runs."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchsvc.batches import completion
from batchsvc.billing import pricing
from batchsvc.billing import service as billing
from batchsvc.clock import now_ms
from batchsvc.settings import Settings
from tests.batchsvc.batches.door import HOUR_MS, MODEL, Door, hours


@pytest.fixture
def door(settings: Settings) -> Iterator[Door]:
    made = Door(settings)
    yield made
    made.close()


@given(st.lists(st.tuples(st.integers(1, 9999), st.sampled_from("mhd")), min_size=1, max_size=6))
def test_the_usual_window_is_always_offered(named: list[tuple[int, str]]) -> None:
    names = [f"{number}{unit}" for number, unit in named]
    offered = completion.offered(",".join(names))
    assert set(offered) == {"24h", *names} and next(iter(offered)) == "24h"
    assert offered["24h"].length_ms == 24 * HOUR_MS
    for number, unit in named:
        window = offered[f"{number}{unit}"]
        assert window.length_ms == number * {"m": HOUR_MS // 60, "h": HOUR_MS, "d": 24 * HOUR_MS}[unit]
        assert window.tier == f"batch_{number}{unit}"


def test_a_window_needs_to_be_offered_and_priced(door: Door) -> None:
    refused = door.create(door.client(), completion_window="1h").json()["error"]
    assert (refused["param"], refused["message"]) == ("completion_window", "completion_window: it must be 24h.")
    wider = door.client(windows="24h,1h,7d")
    refused = door.create(wider, completion_window="1h").json()["error"]
    assert (refused["code"], refused["param"]) == ("window_not_priced", "completion_window")
    assert "tier batch_1h" in refused["message"]
    book = pricing.shipped_book()
    dearer = book.rates["smollm2-135m", "standard"]
    rates = {**book.rates, ("default", "batch_1h"): dearer, ("smollm2-135m", "batch_7d"): dearer}
    with door.db.transaction() as session:
        billing.publish_book(session, pricing.PriceBook(2, rates))
    made = door.create(wider, completion_window="1h").json()
    assert made["completion_window"] == "1h" and made["expires_at"] - made["created_at"] == 3600
    assert (door.row(made["id"]).tier, door.row(made["id"]).price_version) == ("batch_1h", 2)
    assert door.create(wider, completion_window="7d").status_code == 200, "some model has a price: the planner judges"
    refused = door.create(wider, completion_window="7d", model=MODEL).json()["error"]
    assert refused["code"] == "model_not_priced"
    usual = door.create(wider).json()
    assert usual["expires_at"] - usual["created_at"] == 86_400


def test_priority_is_bounded(door: Door) -> None:
    client = door.client()
    for priority in (-10, 0, 10):
        assert door.create(client, priority=priority).json()["priority"] == priority
    for priority in (-11, 11, 1.5, "1", True):
        assert door.create(client, priority=priority).json()["error"]["param"] == "priority"
    assert door.create(client, on_quota="maybe").json()["error"]["param"] == "on_quota"


def test_a_batch_waits_for_the_night(door: Door) -> None:
    by_day, by_night = door.client(offpeak=hours(3, 5)), door.client(offpeak=hours(-1, 2))
    batch_id = door.create(by_day).json()["id"]
    path = f"/v1/batches/{batch_id}"
    scheduled = by_day.get(path).json()["scheduled_for"]
    assert scheduled % 60 == 0 and 2.9 * HOUR_MS < scheduled * 1000 - now_ms() < 3.1 * HOUR_MS
    assert by_night.get(path).json()["scheduled_for"] is None
    door.start(batch_id, 1)
    shown = by_day.get(path).json()
    assert shown["scheduled_for"] == scheduled
    assert shown["waiting_for"] == f"off-peak until {hours(3, 5)[:5]}"
    no_worker = f"no worker for model {MODEL}"
    assert by_night.get(path).json()["waiting_for"] == no_worker
    assert door.client().get(path).json()["waiting_for"] == no_worker, "the hours were unset: nothing to wait for"
    soon = now_ms() + HOUR_MS
    door.set(batch_id, latest_start_ms=soon)
    assert by_day.get(path).json()["scheduled_for"] == soon // 1000, "its deadline needs the day"
    door.set(batch_id, latest_start_ms=now_ms() - 1)
    assert by_day.get(path).json()["scheduled_for"] is None
    assert by_day.get(path).json()["waiting_for"] == no_worker
    assert by_day.post(f"{path}/cancel").json()["scheduled_for"] is None


def test_without_hours_nothing_is_off_peak(door: Door) -> None:
    made = door.create(door.client()).json()
    assert made["scheduled_for"] is None and not door.row(made["id"]).is_offpeak
    door.start(made["id"], 1)
    assert door.client(offpeak=hours(3, 5)).get(f"/v1/batches/{made['id']}").json()["scheduled_for"] is None


def test_what_comes_first_is_said(door: Door) -> None:
    """Paused, claims, quota, night, worker: the first that must change before it can run."""
    client = door.client(offpeak=hours(3, 5))
    path = f"/v1/batches/{door.create(client).json()['id']}"
    batch_id = path.rsplit("/", 1)[1]
    door.start(batch_id, 1)
    door.set(batch_id, has_quota=False)
    assert client.post(f"/v1/admin/batches/{batch_id}/pause").json()["waiting_for"] == "paused: by the operator"
    assert client.get(path).json()["pause_reason"] == "by the operator"
    resumed = client.post(f"/v1/admin/batches/{batch_id}/resume").json()
    assert (resumed["waiting_for"], resumed["pause_reason"]) == ("quota", None)
    client.post("/v1/admin/claims/pause", json={"reason": "acme's key leaked"}).raise_for_status()
    assert client.get(path).json()["waiting_for"] == "claims, which the operator has paused", (
        "why isn't a tenant's matter"
    )
    client.post("/v1/admin/claims/resume", json={}).raise_for_status()
    door.set(batch_id, has_quota=True)
    assert client.get(path).json()["waiting_for"].startswith("off-peak until ")
    client.post(f"{path}/cancel")
    assert client.get(path).json()["waiting_for"] is None
    door.set(batch_id, status="cancelled", ended_ms=now_ms())
    refused = client.post(f"/v1/admin/batches/{batch_id}/resume")
    assert refused.status_code == 400 and "cancelled" in refused.json()["error"]["message"]
    assert client.post("/v1/admin/batches/batch_nope/resume").status_code == 404


def test_weights_and_quotas_are_the_operators(door: Door) -> None:
    client = door.client()
    path = f"/v1/admin/projects/{door.project_id}"
    changed = client.post(path, json={"weight": 5, "quota_tokens": 1000}).json()
    assert (changed["weight"], changed["quota_tokens"], changed["object"]) == (5, 1000, "project")
    assert client.post("/v1/admin/projects/p", json={"quota_tokens": None}).json() == {**changed, "quota_tokens": None}
    assert client.get("/v1/admin/projects").json()["data"] == [{**changed, "quota_tokens": None}]
    for wrong in ({"weight": 0}, {"weight": None}, {"weight": 1001}, {"quota_tokens": 0}, {"salt": "x"}):
        assert client.post(path, json=wrong).status_code == 400, wrong
    assert client.post("/v1/admin/projects/nobody", json={"weight": 2}).status_code == 404
