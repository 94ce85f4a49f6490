"""Limits of requests, open batches and stored bytes: 429, when to try again, and how far it is; with the clients."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import anthropic
import openai
import pytest
from sqlalchemy import update

from batchsvc.accounts.tables import ApiKey, Project
from batchsvc.batches.tables import Batch
from batchsvc.cli.client import Client
from batchsvc.cli.exits import ApiError
from batchsvc.files.tables import Upload
from tests.contract.conftest import MODEL, Api, on_sqlite

LINE = json.dumps(
    {
        "custom_id": "1",
        "method": "POST",
        "url": "/v1/chat/completions",
        "body": {"model": MODEL, "messages": [{"role": "user", "content": "hi"}]},
    }
).encode()


def limit(api: Api, *, of_key: bool = False, **limits: int) -> None:
    """Set limits of the project, or of the key that the tests use."""
    statement = (
        update(ApiKey).where(ApiKey.id == api.key[3:11])
        if of_key
        else update(Project).where(Project.id == api.project_id)
    )
    with api.db.transaction() as session:
        session.execute(statement.values(**limits))


def upload(api: Api, data: bytes = LINE) -> str:
    return api.client().files.create(file=("in.jsonl", data), purpose="batch").id


def refusal(caught: pytest.ExceptionInfo[openai.RateLimitError]) -> tuple[str, dict[str, str]]:
    """The code of a refusal, and its headers about limits."""
    headers = caught.value.response.headers
    told = {name: headers[name] for name in headers if name.startswith("x-ratelimit")}
    assert int(headers["retry-after"]) >= 1
    return str(caught.value.code), told


@on_sqlite
@pytest.mark.parametrize("of_key", [False, True])
def test_requests_beyond_the_limit_are_told_when_to_come_again(api: Api, of_key: bool) -> None:
    first = api.call("GET", "/v1/models")
    assert not [name for name in first.headers if name.startswith("x-ratelimit")], "no limit, no header"
    limit(api, of_key=of_key, requests_per_minute=3)
    for remaining in (2, 1, 0):
        headers = api.call("GET", "/v1/models").headers
        assert headers["x-ratelimit-limit-requests"] == "3"
        assert headers["x-ratelimit-remaining-requests"] == str(remaining)
        assert headers["x-ratelimit-reset-requests"][-1] == "s"
    with pytest.raises(openai.RateLimitError, match="limit is 3 a minute") as caught:
        api.client().models.list()
    code, told = refusal(caught)
    assert code == "rate_limit_exceeded" and told["x-ratelimit-remaining-requests"] == "0"
    assert int(caught.value.response.headers["retry-after"]) <= 20
    claude = anthropic.Anthropic(base_url=api.url, api_key=api.key, max_retries=0)
    with pytest.raises(anthropic.RateLimitError) as refused:
        claude.messages.batches.list()
    assert refused.value.body["error"]["type"] == "rate_limit_error"
    assert api.call("GET", "/v1/models", api.admin_key).status_code == 200, "whoever raises the limit gets through"
    limit(api, of_key=of_key, requests_per_minute=6_000)
    assert api.call("GET", "/v1/models").status_code == 200, "at once"


@on_sqlite
def test_a_command_waits_for_its_turn(api: Api) -> None:
    limit(api, requests_per_minute=60)
    while api.call("GET", "/v1/models").status_code == 200:
        pass  # until the bucket is empty
    with Client(f"{api.url}/v1", api.key, is_local=True) as client:
        assert {row["id"] for row in client.models()["data"]} >= {MODEL}
        with pytest.raises(ApiError, match="No such File"):
            list(client.content("file-none").__enter__())


@on_sqlite
def test_the_tighter_of_key_and_project_holds_and_is_told(api: Api) -> None:
    limit(api, requests_per_minute=100)
    limit(api, of_key=True, requests_per_minute=2)
    assert [api.call("GET", "/v1/models").status_code for _ in range(3)] == [200, 200, 429]
    assert api.call("GET", "/v1/models").headers["x-ratelimit-limit-requests"] == "2"


@pytest.mark.parametrize("of_key", [False, True])
def test_open_batches_are_counted_until_they_end(api: Api, of_key: bool) -> None:
    file_id, client = upload(api), api.client()
    limit(api, of_key=of_key, max_open_batches=2)

    def create() -> Any:
        return client.batches.create(input_file_id=file_id, endpoint="/v1/chat/completions", completion_window="24h")

    with ThreadPoolExecutor(4) as pool:
        told = list(pool.map(lambda _: api.call("POST", "/v1/batches", json=body(file_id)).status_code, range(6)))
    assert sorted(told) == [200, 200, 429, 429, 429, 429], "as many as there may be, however many come at once"
    with pytest.raises(openai.RateLimitError, match="may have 2") as caught:
        create()
    assert refusal(caught) == (
        "open_batches_exceeded",
        {"x-ratelimit-limit-batches": "2", "x-ratelimit-remaining-batches": "0"},
    )
    assert caught.value.response.headers["x-should-retry"] == "false", "a batch takes hours, not seconds"
    with api.db.transaction() as session:
        session.execute(update(Batch).where(Batch.project_id == api.project_id).values(status="completed"))
    assert create().status == "validating"


def body(file_id: str) -> dict[str, str]:
    return {"input_file_id": file_id, "endpoint": "/v1/chat/completions", "completion_window": "24h"}


@pytest.mark.parametrize("of_key", [False, True])
def test_stored_bytes_are_counted_until_they_are_deleted(api: Api, of_key: bool) -> None:
    client = api.client()
    first = upload(api, LINE * 1)
    limit(api, of_key=of_key, max_stored_bytes=2 * len(LINE) + 1)
    second = upload(api)
    with pytest.raises(openai.RateLimitError, match="too much") as caught:
        upload(api)
    assert refusal(caught) == (
        "stored_bytes_exceeded",
        {"x-ratelimit-limit-bytes": str(2 * len(LINE) + 1), "x-ratelimit-remaining-bytes": "1"},
    )
    inline = api.call(
        "POST",
        "/v1/batches",
        json={"requests": [json.loads(LINE)], "endpoint": "/v1/chat/completions", "completion_window": "24h"},
    )
    assert (inline.status_code, inline.json()["error"]["code"]) == (429, "stored_bytes_exceeded")
    with pytest.raises(openai.RateLimitError):
        client.uploads.create(bytes=len(LINE), filename="a.jsonl", mime_type="application/jsonl", purpose="batch")
    held = {file.id for file in client.files.list()}
    assert held == {first, second}, "what was refused isn't there"
    client.files.delete(second)
    upload(api)


def begin(api: Api, num_bytes: int) -> str:
    arguments = {"filename": "a.jsonl", "mime_type": "application/jsonl", "purpose": "batch"}
    return api.client().uploads.create(bytes=num_bytes, **arguments).id


def test_pending_uploads_of_a_project_count_until_they_end(api: Api) -> None:
    client, room = api.client(), 3 * len(LINE)
    limit(api, max_stored_bytes=room)
    with ThreadPoolExecutor(4) as pool:
        arguments = {"bytes": len(LINE), "mime_type": "application/jsonl", "purpose": "batch"}
        told = list(
            pool.map(
                lambda no: api.call("POST", "/v1/uploads", json={**arguments, "filename": f"{no}.jsonl"}), range(5)
            )
        )
    assert sorted(answer.status_code for answer in told) == [200, 200, 200, 429, 429], "however many come at once"
    begun = [answer.json()["id"] for answer in told if answer.status_code == 200]
    with pytest.raises(openai.RateLimitError, match="begun uploads") as caught:
        upload(api)
    assert refusal(caught)[1] == {"x-ratelimit-limit-bytes": str(room), "x-ratelimit-remaining-bytes": "0"}
    client.uploads.cancel(begun[0])
    part = client.uploads.parts.create(begun[1], data=LINE)
    assert client.uploads.complete(begun[1], part_ids=[part.id]).status == "completed"
    upload(api, LINE)  # in the place of the one that was cancelled; the completed one counts once
    with api.db.transaction() as session:
        session.execute(update(Upload).where(Upload.id == begun[2]).values(expires_ms=1))
    upload(api, LINE)


@on_sqlite
@pytest.mark.parametrize("of_key", [False, True])
def test_parts_beyond_what_was_announced_count(api: Api, of_key: bool) -> None:
    limit(api, of_key=of_key, max_stored_bytes=2 * len(LINE))
    upload_id, client = begin(api, len(LINE)), api.client()
    client.uploads.parts.create(upload_id, data=LINE)
    client.uploads.parts.create(upload_id, data=LINE)  # sent again because its answer was lost
    with pytest.raises(openai.RateLimitError, match="too much") as caught:
        client.uploads.parts.create(upload_id, data=LINE)
    assert refusal(caught)[0] == "stored_bytes_exceeded"


@on_sqlite
def test_a_file_that_says_its_size_is_refused_before_it_comes(api: Api) -> None:
    limit(api, max_stored_bytes=10)
    sent = 0

    def pieces() -> Any:
        nonlocal sent
        for _ in range(64):
            sent += 65_536
            yield b"x" * 65_536

    headers = {"content-type": "multipart/form-data; boundary=b", "content-length": str(64 * 65_536)}
    answer = api.call("POST", "/v1/files", content=pieces(), headers=headers)
    assert (answer.status_code, answer.json()["error"]["code"]) == (429, "stored_bytes_exceeded")
