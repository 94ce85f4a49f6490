"""The API while a service behind it is away: without Redis all goes on, without the database it says when to retry."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import httpx
import pytest

from batchsvc.dispatch import CeleryDispatcher
from tests.contract.conftest import Api
from tests.contract.test_http import envelope, upload
from tests.dispatchers import NullDispatcher
from tests.faults.proxy import FaultProxy
from tests.faults.targets import postgres_target, tcp_target, through
from tests.serving import serving

CREATES = 6
DEADLINE_S = 10.0  # a client of Redis gives up after 2 s: six calls that waited for it would take longer


@contextmanager
def api_on(api: Api, redis_url: str | None = None, **changes: str) -> Iterator[httpx.Client]:
    """A client of another API process with these settings changed, with the key of the test's project."""
    dispatcher = CeleryDispatcher(redis_url) if redis_url else NullDispatcher()
    changes |= {"redis_url": redis_url} if redis_url else {}
    with (
        serving(api.settings.model_copy(update=changes), dispatcher) as url,
        httpx.Client(
            base_url=url, headers={"Authorization": f"Bearer {api.key}"}, timeout=60, trust_env=False
        ) as client,
    ):
        yield client


@pytest.mark.parametrize("weather", ["black_hole", "refuse"])
def test_creates_do_not_wait_for_redis(api: Api, weather: str) -> None:
    file = upload(api).json()["id"]
    body = {"input_file_id": file, "endpoint": "/v1/chat/completions", "completion_window": "24h"}
    with FaultProxy(tcp_target(api.settings.redis_url)) as proxy:
        getattr(proxy, weather)()
        redis_url = through(api.settings.redis_url, proxy)
        with api_on(api, redis_url) as call:
            started = time.monotonic()
            for _ in range(CREATES):
                made = call.post("/v1/batches", json=body)
                assert made.status_code == 200
                assert call.post(f"/v1/batches/{made.json()['id']}/cancel").json()["status"] == "cancelled"
            assert time.monotonic() - started < DEADLINE_S, "every call waited for Redis"
            ready = call.get("/readyz")
            assert (ready.status_code, ready.json()["status"]) == (200, "degraded")
            assert ready.json()["parts"]["redis"].startswith("Redis doesn't answer")


@pytest.mark.parametrize("server", ["postgresql"], indirect=True)
def test_a_database_that_is_away_is_a_503_and_comes_back(api: Api) -> None:
    file = upload(api).json()["id"]
    body = {"input_file_id": file, "endpoint": "/v1/chat/completions", "completion_window": "24h"}
    with FaultProxy(postgres_target(api.settings.database_url)) as proxy:
        database_url = through(api.settings.database_url, proxy)
        with api_on(api, database_url=database_url) as call:
            named = {"Idempotency-Key": "through the outage"}
            first = call.post("/v1/batches", json=body, headers={"Idempotency-Key": "before"})
            assert first.status_code == 200
            proxy.refuse()
            for answer in (
                call.get("/v1/batches"),
                call.post("/v1/batches", json=body, headers=named),
                call.post(f"/v1/batches/{first.json()['id']}/cancel"),
                call.get("/v1/scaling"),
            ):
                assert envelope(answer, 503)["code"] == "database_unavailable"
                assert 1 <= int(answer.headers["retry-after"]) <= 120, "the official client gives up above"
            assert call.get("/readyz").status_code == 503 and call.get("/livez").status_code == 200
            assert 'batchsvc_part_up{part="database"} 0.0' in call.get("/metrics").text
            proxy.heal()
            assert call.get("/v1/batches").status_code == 200
            assert call.post("/v1/batches", json=body, headers=named).status_code == 200
            assert call.get("/readyz").json()["status"] == "ready"
            proxy.cut_all(reset=True)  # connections that the pool holds are dead, the server isn't
            assert call.get(f"/v1/batches/{first.json()['id']}").json()["status"] == "validating"


@pytest.mark.parametrize("server", ["postgresql"], indirect=True)
def test_a_commit_whose_answer_is_lost_makes_one_batch(api: Api) -> None:
    """The call is done again inside the API; it finds what the first attempt has made."""
    file = upload(api).json()["id"]
    body = {"input_file_id": file, "endpoint": "/v1/chat/completions", "completion_window": "24h"}
    with FaultProxy(postgres_target(api.settings.database_url)) as proxy:
        database_url = through(api.settings.database_url, proxy)
        with api_on(api, database_url=database_url) as call:
            for headers in ({}, {"Idempotency-Key": "k"}):
                lost: list[int] = []

                def lose_one(connection: object, direction: str, data: bytes, lost: list[int] = lost) -> None:
                    wrote = direction == "up" and b"INSERT INTO batches" in data
                    if wrote:
                        lost.append(0)
                    elif direction == "up" and b"COMMIT" in data and lost == [0]:
                        lost.append(1)
                        connection.is_answer_lost = True

                before = len(call.get("/v1/batches").json()["data"])
                proxy.tripwire = lose_one
                made = call.post("/v1/batches", json=body, headers=headers)
                proxy.tripwire = None
                assert lost == [0, 1], "the fault did happen"
                assert made.status_code == 200, made.text
                found = call.get("/v1/batches").json()["data"]
                assert len(found) == before + 1 and found[0]["id"] == made.json()["id"]
