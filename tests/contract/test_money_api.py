"""Prices, movements and limits over HTTP: who may, what is refused, what is answered twice; and that asking writes
nothing."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from sqlalchemy import select

from batchsvc.tables import metadata
from tests.contract.conftest import MODEL, Api


def call(api: Api, method: str, path: str, body: Any = None, *, key: str | None = None) -> tuple[int, dict[str, Any]]:
    headers = {"Authorization": f"Bearer {key or api.admin_key}"}
    answer = api.http.request(method, f"{api.url}/v1{path}", json=body, headers=headers)
    return answer.status_code, answer.json()


def test_money_is_moved_once_a_key(api: Api) -> None:
    path = f"/admin/projects/{api.project_id}"
    body = {"amount": "12.50", "reason": "wire 4711", "key": "w1"}
    status, first = call(api, "POST", f"{path}/topups", body)
    assert (status, first["amount_nanos"], first["amount"], first["is_new"]) == (200, 12_500_000_000, "$12.50", True)
    assert (first["available_nanos"], first["reason"], first["key"]) == (12_500_000_000, "wire 4711", "w1")
    status, again = call(api, "POST", f"{path}/topups", body)
    assert (status, again) == (200, first | {"is_new": False})
    status, wrong = call(api, "POST", f"{path}/topups", body | {"amount": 13})
    assert (status, wrong["error"]["code"]) == (422, "idempotency_key_reused")
    status, wrong = call(api, "POST", f"{path}/refunds", {"amount": 1, "reason": "r", "key": "r1"})
    assert (status, wrong["error"]["code"], wrong["error"]["param"]) == (400, "refund_too_large", "amount")
    assert call(api, "POST", f"{path}/credits", {"amount": 0.1, "reason": "r", "key": "c"})[1]["amount"] == "$0.10"
    status, found = call(api, "GET", f"{path}/balance")
    assert (status, found["available_nanos"], found["room_nanos"]) == (200, 12_600_000_000, None)
    call(api, "POST", path, {"is_prepaid": True, "budget_nanos": 5})
    assert call(api, "GET", f"{path}/balance")[1]["room_nanos"] == 5


@pytest.mark.parametrize("amount", [0, -1, "1e400", "NaN", "0.0000000001", True, None, "", "1,5", 10**12])
def test_amounts_that_cannot_be_are_refused(api: Api, amount: Any) -> None:
    body = {"amount": amount, "reason": "r", "key": "k"}
    status, answer = call(api, "POST", f"/admin/projects/{api.project_id}/topups", body)
    assert (status, answer["error"]["param"].split(".")[0]) == (400, "amount")


def test_prices_are_set_listed_and_refused(api: Api) -> None:
    row = {"model": "m", "tier": "batch_24h", "input": 1, "cached_input": 1, "output": 2}
    status, book = call(api, "POST", "/admin/prices/rows", row)
    assert status == 200 and book["models"]["m"] == {"batch_24h": {"input": 1, "cached_input": 1, "output": 2}}
    status, listed = call(api, "GET", "/admin/prices")
    assert [row["version"] for row in listed["data"] if row["is_in_force"]] == [book["version"]]
    assert call(api, "GET", "/admin/prices/current")[1] == call(api, "GET", f"/admin/prices/{book['version']}")[1]
    assert call(api, "GET", "/admin/prices/99")[0] == call(api, "GET", "/admin/prices/x")[0] == 404
    for wrong in ({"output": -2}, {"output": 1.5}, {"from": "2001-01-01"}):
        assert call(api, "POST", "/admin/prices/rows", row | wrong)[0] == 400
    exported = call(api, "GET", "/admin/prices/1")[1]
    status, copied = call(api, "POST", "/admin/prices", {"models": exported["models"]})
    assert (status, copied["version"]) == (200, book["version"] + 1)


def test_a_clients_key_may_do_none_of_it(api: Api) -> None:
    movement = {"amount": 1, "reason": "r", "key": "k"}
    for method, path, body in (
        ("GET", "/admin/prices", None),
        ("POST", "/admin/prices", {"models": {}}),
        ("GET", f"/admin/projects/{api.project_id}/balance", None),
        *(("POST", f"/admin/projects/{api.project_id}/{kind}s", movement) for kind in ("topup", "refund", "credit")),
    ):
        assert call(api, method, path, body, key=api.key)[0] == 403, path


@pytest.mark.parametrize("max_cost", [0, -1, "a lot", "0.0000000001", True, [1]])
def test_a_max_cost_that_cannot_be_is_refused(api: Api, max_cost: Any) -> None:
    body = {"input_file_id": "file-x", "endpoint": "/v1/chat/completions", "completion_window": "24h"}
    status, answer = call(api, "POST", "/batches", body | {"max_cost": max_cost}, key=api.key)
    assert (status, answer["error"]["param"].split(".")[0]) == (400, "max_cost")


def test_a_batch_shows_its_max_cost_and_keeps_its_prices(api: Api) -> None:
    line = b'{"custom_id":"1","method":"POST","url":"/v1/chat/completions","body":{"model":"%s","messages":[]}}\n'
    client = api.client()
    file = client.files.create(file=("a.jsonl", line % MODEL.encode()), purpose="batch")
    wanted = {"input_file_id": file.id, "endpoint": "/v1/chat/completions", "completion_window": "24h"}
    batch = client.batches.create(**wanted, extra_body={"max_cost": "0.000000123"})
    assert batch.model_extra["max_cost_nanos"] == 123
    assert client.batches.create(**wanted, extra_body={"max_cost": 0.1}).model_extra["max_cost_nanos"] == 10**8
    before = _everything(api)
    paths = [f"/batches/{batch.id}", "/batches", f"/files/{file.id}", f"/files/{file.id}/content", "/models"]
    admin = ["/admin/prices", "/admin/prices/current", f"/admin/projects/{api.project_id}/balance", "/admin/projects"]
    with ThreadPoolExecutor(20) as polls:
        asked = [polls.submit(_status, api, path, api.key) for path in paths * 10]
        asked += [polls.submit(_status, api, path, api.admin_key) for path in (*admin, "/admin/keys") * 10]
        assert {answer.result() for answer in asked} == {200} and len(asked) == 100
    assert _everything(api) == before, "polls write no row"


def _status(api: Api, path: str, key: str) -> int:
    return api.http.get(f"{api.url}/v1{path}", headers={"Authorization": f"Bearer {key}"}).status_code


def _everything(api: Api) -> dict[str, list[Any]]:
    with api.db.reading() as session:
        return {
            name: sorted(repr(row) for row in session.execute(select(table))) for name, table in metadata.tables.items()
        }
