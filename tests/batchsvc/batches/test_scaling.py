"""The signal for autoscalers: what may run wants workers, what may not wants none, and Redis has no say in it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
import redis
from fastapi.testclient import TestClient

from batchsvc import ids
from batchsvc.batches import models
from batchsvc.batches.tables import Part, Unit, Worker
from batchsvc.clock import now_ms
from batchsvc.settings import Settings
from tests.batchsvc.batches.door import DIGEST, HOUR_MS, MODEL, Door, hours


@pytest.fixture
def door(settings: Settings) -> Iterator[Door]:
    made = Door(settings)
    yield made
    made.close()


def signal(client: TestClient) -> tuple[int, float]:
    """Claimable units and backlog seconds of the model; JSON and Prometheus' text must agree."""
    shown = client.get("/v1/scaling", params={"model": MODEL}).json()
    (listed,) = client.get("/v1/scaling").json()["data"]
    assert listed == {**shown, "backlog_seconds": pytest.approx(shown["backlog_seconds"], rel=0.05)}  # rates age
    text = client.get("/metrics").text
    found: dict[str, Any] = {}
    for name in ("units_claimable", "backlog_seconds"):
        label = f'batchsvc_{name}{{model="{MODEL}",model_digest="{DIGEST}"}} '
        (found[name],) = [float(line[len(label) :]) for line in text.splitlines() if line.startswith(label)]
        assert found[name] == pytest.approx(shown[name], rel=0.05)
    return shown["units_claimable"], shown["backlog_seconds"]


def test_a_thousand_units_outside_the_night_want_no_worker(door: Door, redis_url: str) -> None:
    by_day, by_night = door.client(offpeak=hours(3, 5)), door.client(offpeak=hours(-1, 2))
    batch_id = door.create(by_day).json()["id"]
    assert signal(by_day) == (0, 0)
    door.start(batch_id, 1_000)
    assert signal(by_day) == (0, 0)
    units, seconds = signal(by_night)
    assert units == 1_000 and seconds > 0
    with redis.Redis.from_url(redis_url) as client:
        client.flushall()
    assert signal(by_night) == (units, seconds) and signal(by_day) == (0, 0), "a wiped Redis changes nothing"
    door.set(batch_id, latest_start_ms=now_ms() - 1)
    assert signal(by_day) == (units, seconds), "a deadline needs the day"


def test_what_may_not_run_wants_no_worker(door: Door) -> None:
    client = door.client()
    batch_id = door.create(client).json()["id"]
    door.start(batch_id, 7)
    usual = {"is_paused": False, "has_quota": True, "expires_ms": now_ms() + HOUR_MS, "status": "in_progress"}
    for change in (
        {"is_paused": True},
        {"has_quota": False},
        {"expires_ms": 1},
        {"status": "cancelling"},
        {"status": "completed"},
    ):
        door.set(batch_id, **usual)
        assert signal(client)[0] == 7
        door.set(batch_id, **change)
        assert signal(client) == (0, 0), change


def test_units_that_run_keep_their_worker(door: Door) -> None:
    """Nothing is claimable any more, but whoever runs the last units is still needed."""
    client = door.client()
    batch_id = door.create(client).json()["id"]
    door.start(batch_id, 3, est_tokens=2_000, state="leased")
    units, seconds = signal(client)
    assert units == 0 and seconds == pytest.approx(6, rel=0.01), "at the rate that is assumed of an unknown model"
    with door.db.transaction() as session:
        for unit in session.query(Unit):
            unit.state = "done"
    assert signal(client) == (0, 0)


def test_the_rate_is_what_one_worker_did_lately(door: Door) -> None:
    client = door.client()
    batch_id = door.create(client).json()["id"]
    door.start(batch_id, 10, est_tokens=999)
    now = now_ms()
    with door.db.transaction() as session:
        for no in range(2):
            session.add(Worker(id=f"w{no}", model_digest=DIGEST, beat_ms=now))
        unit_id = session.query(Unit).first().id
        for age_s, tokens, unit in ((200, 30_000, unit_id), (100, 30_000, unit_id), (10, 9, None), (3600, 9, unit_id)):
            part_id = ids.part_id()
            session.add(
                Part(
                    id=part_id,
                    batch_id=batch_id,
                    unit_id=unit,
                    window_no=0,
                    s3_key=part_id,
                    sha256="x",
                    est_tokens=tokens,
                    created_ms=now - age_s * 1000,
                )
            )
    units, seconds = signal(client)
    assert units == 10
    assert seconds == pytest.approx(10_000 / (60_000 / 200 / 2), rel=0.05), "two workers did 60,000 tokens in 200 s"


def test_a_scaler_asks_by_any_name(door: Door) -> None:
    client = door.client()
    with door.db.transaction() as session:
        models.alias(session, "gpt-x", MODEL)
        models.register(session, "other", "/models/other", digest="cd" * 32, context_tokens=8)
    assert client.get("/v1/scaling?model=gpt-x").json()["model"] == MODEL
    assert client.get("/v1/scaling?model=other").json()["backlog_seconds"] == 0
    missing = client.get("/v1/scaling?model=nope")
    assert missing.status_code == 404 and missing.json()["error"]["code"] == "model_not_found"
    assert re.search(r'batchsvc_backlog_seconds\{model="other"[^}]*\} 0\.0', client.get("/metrics").text)
