"""A call that arrives again has one effect and one answer: creates by key or by retry count, uploads likewise."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any

import httpx
import pytest
from sqlalchemy import func, select, update

from batchsvc import ids
from batchsvc.accounts import idempotency
from batchsvc.accounts import service as accounts
from batchsvc.accounts.tables import IdempotentAnswer
from batchsvc.batches import service
from batchsvc.batches.schemas import CreateBatch
from batchsvc.batches.tables import Batch
from batchsvc.files.tables import File
from batchsvc.store import keys
from tests.contract.conftest import Api
from tests.contract.test_http import envelope, upload

DAY_MS = 86_400_000


def create(api: Api, file_id: str, key: str = "", headers: dict[str, str] | None = None, **more: Any) -> httpx.Response:
    body = {"input_file_id": file_id, "endpoint": "/v1/chat/completions", "completion_window": "24h", **more}
    return api.call("POST", "/v1/batches", key, json=body, headers=headers or {})


def send(api: Api, data: bytes, headers: dict[str, str], name: str = "in.jsonl") -> httpx.Response:
    return api.call("POST", "/v1/files", files={"file": (name, data)}, data={"purpose": "batch"}, headers=headers)


def count(api: Api, table: type[Any]) -> int:
    with api.db.reading() as session:
        return int(session.scalar(select(func.count()).where(table.project_id == api.project_id)) or 0)


def objects(api: Api) -> int:
    return len(list(api.store.list_keys(keys.input_file(api.project_id, ""))))


def test_a_key_has_one_batch_and_one_answer(api: Api) -> None:
    file = upload(api).json()["id"]
    named = {"Idempotency-Key": "job-42"}
    first = create(api, file, headers=named, metadata={"b": "2", "a": "1"})
    again = create(api, file, headers=named, metadata={"a": "1", "b": "2"}, on_invalid="fail")
    assert (again.status_code, again.text) == (200, first.text), "defaults and the order of keys change nothing"
    api.call("POST", f"/v1/batches/{first.json()['id']}/cancel")
    assert create(api, file, headers=named, metadata={"a": "1", "b": "2"}).text == first.text
    assert count(api, Batch) == 1


def test_a_key_means_one_call(api: Api) -> None:
    file, other_file = (upload(api).json()["id"] for _ in range(2))
    named = {"Idempotency-Key": "k"}
    first = create(api, file, headers=named).json()
    for changed in ({"metadata": {"a": "1"}}, {"priority": 1}, {"on_quota": "fail"}, {"input_file_id": other_file}):
        assert envelope(create(api, file, headers=named, **changed), 422)["code"] == "idempotency_key_reused"
    assert api.call("GET", f"/v1/batches/{first['id']}").json() == first
    assert count(api, Batch) == 1
    assert create(api, file, headers={"Idempotency-Key": "K"}).json()["id"] != first["id"]


def test_a_refused_call_leaves_its_key_free(api: Api) -> None:
    named = {"Idempotency-Key": "k"}
    envelope(create(api, "file-nope", headers=named), 400)
    assert create(api, upload(api).json()["id"], headers=named).status_code == 200


def test_keys_of_projects_are_apart(api: Api) -> None:
    named = {"Idempotency-Key": "k"}
    mine = create(api, upload(api).json()["id"], headers=named).json()
    _, key = api.new_project()
    theirs = create(api, upload(api, key).json()["id"], key, headers=named)
    assert theirs.status_code == 200 and theirs.json()["id"] != mine["id"]


@pytest.mark.parametrize("bad", ["", "a\tb", "x" * 201])
def test_a_key_that_can_not_be_one_is_refused(api: Api, bad: str) -> None:
    refused = create(api, upload(api).json()["id"], headers={"Idempotency-Key": bad})
    assert envelope(refused, 400)["code"] == "invalid_idempotency_key"


def test_a_number_that_nobody_can_store_is_refused(api: Api) -> None:
    upload_call = {"bytes": 10**30, "filename": "a.jsonl", "mime_type": "", "purpose": "batch"}
    for headers in ({}, {"Idempotency-Key": "k"}):
        envelope(api.call("POST", "/v1/uploads", json=upload_call, headers=headers), 400)


def test_twenty_at_once_make_one(api: Api) -> None:
    file = upload(api).json()["id"]
    together = threading.Barrier(20)

    def call(_: int) -> tuple[int, str]:
        together.wait()
        answer = httpx.post(
            f"{api.url}/v1/batches",
            json={"input_file_id": file, "endpoint": "/v1/chat/completions", "completion_window": "24h"},
            headers={"Authorization": f"Bearer {api.key}", "Idempotency-Key": "same"},
            timeout=60,
            trust_env=False,
        )
        return answer.status_code, answer.text

    with ThreadPoolExecutor(20) as pool:
        answers = set(pool.map(call, range(20)))
    assert len(answers) == 1 and answers.pop()[0] == 200
    assert count(api, Batch) == 1


def test_a_retry_at_the_same_time_waits_for_the_first(api: Api) -> None:
    """Without a key: creates of one file go one by one, so a retry sees what the first one is about to make."""
    file = upload(api).json()["id"]
    body = {"input_file_id": file, "endpoint": "/v1/chat/completions", "completion_window": "24h"}
    with api.db.reading() as session:
        caller = accounts.caller(session, api.key)
    with ThreadPoolExecutor(4) as pool:
        with api.db.transaction() as session:
            call = CreateBatch.model_validate(body)
            first = service.create_batch(session, caller, call, api.settings, batch_id=ids.batch_id()).id
            retries = [pool.submit(create, api, file, headers={"x-stainless-retry-count": "1"}) for _ in range(4)]
            assert not wait(retries, timeout=1).done, "the first one isn't committed"
        assert {retry.result().json()["id"] for retry in retries} == {first}


def test_an_upload_with_a_key_is_one_file(api: Api) -> None:
    named = {"Idempotency-Key": "same"}
    first = send(api, b'{"a":1}\n', named)
    again = send(api, b'{"a":1}\n', named)
    assert (again.status_code, again.text) == (200, first.text)
    assert envelope(send(api, b'{"a":2}\n', named), 422)["code"] == "idempotency_key_reused"
    assert envelope(send(api, b'{"a":1}\n', named, name="b.jsonl"), 422)
    assert count(api, File) == 1 and objects(api) == 1, "what came twice is not kept twice"
    assert create(api, first.json()["id"], headers=named).status_code == 200, "another call may have the same key"


def test_a_retried_upload_is_one_file(api: Api) -> None:
    first = send(api, b'{"a":1}\n', {})
    for data, name, retry_count, is_same in (
        (b'{"a":1}\n', "in.jsonl", "1", True),
        (b'{"a":1}\n', "in.jsonl", "0", False),
        (b'{"a":2}\n', "in.jsonl", "1", False),
        (b'{"a":1}\n', "b.jsonl", "2", False),
    ):
        answer = send(api, data, {"x-stainless-retry-count": retry_count}, name=name)
        assert answer.status_code == 200
        assert (answer.json()["id"] == first.json()["id"]) == is_same
    assert count(api, File) == objects(api) == 4
    api.call("DELETE", f"/v1/files/{first.json()['id']}")
    again = send(api, b'{"a":1}\n', {"x-stainless-retry-count": "1"}).json()["id"]
    assert again != first.json()["id"] and api.call("GET", f"/v1/files/{again}").status_code == 200


def test_a_retried_upload_in_parts_is_begun_once(api: Api) -> None:
    call = {"bytes": 8, "filename": "a.jsonl", "mime_type": "application/jsonl", "purpose": "batch"}

    def begin(retry_count: str, **changes: Any) -> str:
        headers = {"x-stainless-retry-count": retry_count}
        answer = api.call("POST", "/v1/uploads", json=call | changes, headers=headers)
        assert answer.status_code == 200, answer.text
        return str(answer.json()["id"])

    first = begin("0")
    assert begin("1") == begin("2") == first != begin("1", bytes=9)
    second = begin("0")
    assert second != first, "two calls that say the same are two"
    assert begin("1") == second
    assert api.call("POST", f"/v1/uploads/{second}/parts", files={"data": b'{"a":1}\n'}).status_code == 200
    assert begin("1") not in (first, second), "that was another call: something has come into its upload"


def test_answers_are_kept_for_a_day_and_not_for_ever(api: Api) -> None:
    file = upload(api).json()["id"]
    first = create(api, file, headers={"Idempotency-Key": "k"}).json()["id"]

    def age(days: float) -> None:
        mine = update(IdempotentAnswer).where(IdempotentAnswer.project_id == api.project_id)
        older = IdempotentAnswer.created_ms - int(days * DAY_MS)
        api.db.run(lambda session: session.execute(mine.values(created_ms=older)))
        api.db.run(idempotency.forget_old)

    age(1.5)
    assert create(api, file, headers={"Idempotency-Key": "k"}).json()["id"] == first
    age(30)
    assert create(api, file, headers={"Idempotency-Key": "k"}).json()["id"] != first
