"""Batches whose requests come in the call itself."""

from __future__ import annotations

from typing import Any

import httpx
import openai
import orjson
import pytest

from batchsvc.batches.schemas import MOST_REQUESTS
from batchsvc.store import keys
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
    for bad in (b"", b"[]", b'{"requests": [{"a": NaN}]}', b'{"a": "\\ud800"}', b"\xff"):
        assert envelope(api.call("POST", "/v1/batches", content=bad, headers=kind), 400)["code"] == "invalid_json"


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


def test_another_projects_key_sees_neither(api: Api) -> None:
    made = create(api).json()
    _, key = api.new_project()
    with pytest.raises(openai.NotFoundError):
        api.client(key).files.retrieve(made["input_file_id"])
