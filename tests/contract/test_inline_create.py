"""Batches whose requests come in the call itself."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import openai
import orjson
import pytest
from sqlalchemy import func, select

from batchsvc.batches.schemas import MOST_REQUESTS
from batchsvc.batches.tables import Batch
from batchsvc.files.tables import File
from batchsvc.store import keys
from batchsvc.store.s3 import ObjectStore
from tests.contract.conftest import MODEL, Api
from tests.contract.test_http import envelope

ENDPOINT = "/v1/chat/completions"
BODY = {"model": MODEL, "messages": [{"role": "user", "content": "héllo"}], "max_tokens": 3}


def create(api: Api, headers: dict[str, str] | None = None, **changes: Any) -> httpx.Response:
    body = {"endpoint": ENDPOINT, "completion_window": "24h", "requests": [{"custom_id": "a", "body": BODY}]}
    return api.call("POST", "/v1/batches", json={**body, **changes}, headers=headers or {})


def test_the_official_client_sends_requests_and_no_file(api: Api) -> None:
    client = api.client()
    requests = [
        {"custom_id": "a", "body": BODY},
        {"custom_id": "b", "method": "POST", "url": ENDPOINT, "body": BODY},
    ]
    made = client.batches.create(
        input_file_id="", endpoint=ENDPOINT, completion_window="24h", extra_body={"requests": requests}
    )
    assert made.status == "validating" and api.sent.planned[-1] == made.id
    file = client.files.retrieve(made.input_file_id)
    assert (file.filename, file.purpose) == ("requests.jsonl", "batch")
    lines = [orjson.loads(line) for line in client.files.content(file.id).content.splitlines()]
    assert lines == [{"method": "POST", "url": ENDPOINT, **request} for request in requests]
    assert file.bytes == len(client.files.content(file.id).content)


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"requests": []}, "requests"),
        ({"requests": None}, "input_file_id"),
        ({"input_file_id": "file-x"}, "requests"),
        ({"requests": ["x"]}, "requests.0"),
        ({"requests": {"custom_id": "a"}}, "requests"),
        ({"model": "nope"}, "model"),
        ({"completion_window": "1h"}, "completion_window"),
    ],
)
def test_what_is_refused_leaves_nothing(api: Api, changes: dict[str, Any], param: str) -> None:
    assert envelope(create(api, **changes), 400)["param"] == param
    assert list(api.store.list_keys(f"{keys.INPUTS}{api.project_id}/")) == []
    assert api.call("GET", "/v1/files").json()["data"] == []


def test_a_call_is_bounded(api: Api) -> None:
    limit = api.settings.max_inline_bytes
    head = b'{"endpoint": "/v1/chat/completions", "completion_window": "24h", "requests": [{"custom_id": "'
    kind = {"content-type": "application/json"}
    answer = api.call("POST", "/v1/batches", content=head + b"x" * limit, headers=kind)
    assert envelope(answer, 413)["code"] == "body_too_large"
    answer = create(api, requests=[{}] * (MOST_REQUESTS + 1))
    assert envelope(answer, 400)["param"] == "requests"
    deep = b'{"requests": ' + b"[" * 100_000 + b"}"
    assert envelope(api.call("POST", "/v1/batches", content=deep, headers=kind), 400)["code"] == "invalid_json"
    twice = b'{"requests": [{"custom_id": "a", "custom_id": "b", "body": {}}]}'
    for bad in (b"", b"[]", b'{"requests": [{"a": NaN}]}', b"\xff", twice):
        assert envelope(api.call("POST", "/v1/batches", content=bad, headers=kind), 400)["code"] == "invalid_json"
    for unheld in (b"1e999", b'"\\ud800"'):
        body = b'{"requests": [{"custom_id": "a", "body": {"seed": ' + unheld + b"}}]}"
        refused = envelope(api.call("POST", "/v1/batches", content=body, headers=kind), 400)
        assert refused["param"] == "requests[0].body.seed"


def test_a_call_that_arrives_twice_makes_one_batch_and_one_file(api: Api) -> None:
    for headers in ({"Idempotency-Key": "k"}, {"x-stainless-retry-count": "1"}):
        first = create(api, headers if "Idempotency-Key" in headers else None).json()
        again = create(api, headers).json()
        assert again["id"] == first["id"]
        objects = [key for key, _ in api.store.list_keys(f"{keys.INPUTS}{api.project_id}/")]
        stored = {file["id"] for file in api.call("GET", "/v1/files").json()["data"]}
        assert {key.rsplit("/", 1)[1] for key in objects} == stored
    other = create(api, {"Idempotency-Key": "k"}, requests=[{"custom_id": "b", "body": BODY}])
    assert envelope(other, 422)["code"] == "idempotency_key_reused"


def test_a_repeated_create_is_never_answered_with_a_deleted_batch(api: Api) -> None:
    """A call is known by what it says only as long as its batch is there; a caller's own key names it for ever."""
    for shape, path in (("batches", "/v1/batches"), ("messages", "/v1/messages/batches")):
        first = send(api, shape, 0).json()["id"]
        with api.db.transaction() as session:
            session.get_one(Batch, first).status = "cancelled"
        assert api.call("DELETE", f"{path}/{first}").status_code == 200
        again = send(api, shape, 1).json()["id"]
        assert again != first and send(api, shape, 1).json()["id"] == again
    file_id = api.client().files.create(file=("a.jsonl", b"{}\n"), purpose="batch").id
    body: dict[str, Any] = {"input_file_id": file_id, "endpoint": ENDPOINT, "completion_window": "24h"}
    first = api.call("POST", "/v1/batches", json=body).json()["id"]
    with api.db.transaction() as session:
        session.get_one(Batch, first).status = "cancelled"
    assert api.call("DELETE", f"/v1/batches/{first}").status_code == 200
    headers = {"x-stainless-retry-count": "1"}
    assert api.call("POST", "/v1/batches", json=body, headers=headers).json()["id"] != first


class Gate:
    """Holds the first input that is stored until it is opened; others pass."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.is_reached, self._is_open = threading.Event(), threading.Event()
        put = ObjectStore.put

        def held(store: ObjectStore, key: str, *arguments: Any, **more: Any) -> Any:
            if key.startswith(keys.INPUTS) and not self.is_reached.is_set():
                self.is_reached.set()
                assert self._is_open.wait(60)
            return put(store, key, *arguments, **more)

        monkeypatch.setattr(ObjectStore, "put", held)

    def open(self) -> None:
        self._is_open.set()


def send(api: Api, shape: str, attempt: int, name: str = "a") -> httpx.Response:
    """A create as the official clients send it, for the first time or again."""
    headers = {"x-stainless-retry-count": str(attempt), "Authorization": f"Bearer {api.key}"}
    if shape == "batches":
        body = {"endpoint": ENDPOINT, "completion_window": "24h", "requests": [{"custom_id": name, "body": BODY}]}
    else:
        body = {"requests": [{"custom_id": name, "params": BODY}]}
    url = f"{api.url}/v1/{shape}" if shape == "batches" else f"{api.url}/v1/messages/batches"
    return httpx.post(url, json=body, headers=headers, timeout=60, trust_env=False)


def made_of(api: Api) -> tuple[int, int, int]:
    """How many batches, files and stored inputs the project has."""
    with api.db.reading() as session:
        counts = [
            session.scalar(select(func.count()).where(table.project_id == api.project_id)) or 0
            for table in (Batch, File)
        ]
    return counts[0], counts[1], len(list(api.store.list_keys(keys.input_file(api.project_id, ""))))


@pytest.mark.parametrize("shape", ["batches", "messages"])
def test_a_call_that_its_own_retry_overtakes_makes_no_second_batch(
    api: Api, monkeypatch: pytest.MonkeyPatch, shape: str
) -> None:
    gate = Gate(monkeypatch)
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(send, api, shape, 0)
        assert gate.is_reached.wait(60)
        other = send(api, shape, 0, "b").json()["id"]
        retried = send(api, shape, 1).json()["id"]
        gate.open()
        assert first.result().json()["id"] == retried != other
    assert made_of(api) == (2, 2, 2)
    assert send(api, shape, 2).json()["id"] == retried, "once more"
    assert send(api, shape, 0).json()["id"] != retried, "a call of its own, though it says the same"
    assert made_of(api) == (3, 3, 3)


@pytest.mark.parametrize("shape", ["batches", "messages"])
def test_a_call_and_its_retries_at_once_make_one_batch(api: Api, monkeypatch: pytest.MonkeyPatch, shape: str) -> None:
    """All four are there before one of them is counted, and from there on they race."""
    together, put = threading.Barrier(4, timeout=60), ObjectStore.put

    def held(store: ObjectStore, key: str, *arguments: Any, **more: Any) -> Any:
        if key.startswith(keys.INPUTS):
            together.wait()
        return put(store, key, *arguments, **more)

    monkeypatch.setattr(ObjectStore, "put", held)
    for number in range(4):
        with ThreadPoolExecutor(4) as pool:
            sent = [pool.submit(send, api, shape, attempt, str(number)) for attempt in range(4)]
            assert len({one.result().json()["id"] for one in sent}) == 1
    assert made_of(api) == (4, 4, 4)


def test_first_attempts_that_say_the_same_are_two_calls(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = Gate(monkeypatch)
    with ThreadPoolExecutor(1) as pool:
        slow = pool.submit(send, api, "batches", 0)
        assert gate.is_reached.wait(60)
        fast = send(api, "batches", 0).json()["id"]
        gate.open()
        assert slow.result().json()["id"] != fast
    assert made_of(api) == (2, 2, 2)


def test_another_projects_key_sees_neither(api: Api) -> None:
    made = create(api).json()
    _, key = api.new_project()
    with pytest.raises(openai.NotFoundError):
        api.client(key).files.retrieve(made["input_file_id"])
