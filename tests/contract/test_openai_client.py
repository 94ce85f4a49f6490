"""The official client, unmodified, against a real server: objects, pages, errors."""

from __future__ import annotations

import hashlib
import time
from concurrent.futures import ThreadPoolExecutor

import openai
import pytest
from openai.types import Batch

from batchsvc.batches import lifecycle
from batchsvc.batches.lifecycle import Status
from batchsvc.clock import now_ms
from tests.contract.conftest import DIGEST, MODEL, Api

ENDPOINT = "/v1/chat/completions"
LINES = b'{"custom_id":"1","method":"POST","url":"/v1/chat/completions","body":{"messages":[]}}\n'


def make_batch(client: openai.OpenAI, **arguments: object) -> Batch:
    file = client.files.create(file=("in.jsonl", LINES), purpose="batch")
    return client.batches.create(
        input_file_id=file.id,
        endpoint=ENDPOINT,
        completion_window="24h",
        **arguments,
    )


def move(api: Api, batch_id: str, to: Status, **values: object) -> None:
    with api.db.transaction() as session:
        assert lifecycle.move(session, batch_id, to, now_ms=now_ms(), values=values)


def test_life_of_a_file(api: Api) -> None:
    client = api.client()
    made = client.files.create(file=("téléchargé.jsonl", LINES), purpose="batch")
    assert (made.object, made.bytes, made.filename, made.purpose) == ("file", len(LINES), "téléchargé.jsonl", "batch")
    assert made.status == "processed"
    assert made.expires_at == made.created_at + 30 * 86_400
    assert abs(made.created_at - time.time()) < 600
    assert made.to_dict()["sha256"] == hashlib.sha256(LINES).hexdigest()
    assert client.files.retrieve(made.id) == made
    assert client.files.wait_for_processing(made.id) == made
    assert client.files.content(made.id).content == LINES
    with client.files.with_streaming_response.content(made.id) as streamed:
        assert streamed.headers["content-length"] == str(len(LINES))
        assert b"".join(streamed.iter_bytes()) == LINES
    assert client.files.list().data == [made]
    gone = client.files.delete(made.id)
    assert (gone.id, gone.object, gone.deleted) == (made.id, "file", True)
    assert client.files.list().data == []
    for call in (client.files.retrieve, client.files.content, client.files.delete):
        with pytest.raises(openai.NotFoundError):
            call(made.id)


def test_a_file_says_when_it_expires(api: Api) -> None:
    client = api.client()
    made = client.files.create(
        file=("a.jsonl", LINES), purpose="batch", expires_after={"anchor": "created_at", "seconds": 3600}
    )
    assert made.expires_at == made.created_at + 3600
    for seconds in (3599, 2_592_001):
        with pytest.raises(openai.BadRequestError) as refused:
            client.files.create(
                file=("a.jsonl", LINES), purpose="batch", expires_after={"anchor": "created_at", "seconds": seconds}
            )
        assert refused.value.param == "expires_after[seconds]"


def test_pages_hold_every_object_once_in_order(api: Api) -> None:
    client = api.client()
    made = [client.files.create(file=(f"{number}.jsonl", LINES), purpose="batch").id for number in range(5)]
    for limit in (1, 2, 5, 6):
        assert [file.id for file in client.files.list(limit=limit)] == made[::-1]
        assert [file.id for file in client.files.list(limit=limit, order="asc")] == made
    first = client.files.list(limit=2)
    assert first.has_more
    client.files.delete(first.data[-1].id)  # the cursor itself goes away between two pages
    assert [file.id for file in first.get_next_page().data] == made[2:0:-1]
    assert client.files.list(purpose="batch_output").data == []
    batches = [
        client.batches.create(input_file_id=made[0], endpoint=ENDPOINT, completion_window="24h").id for _ in range(3)
    ]
    assert [batch.id for batch in client.batches.list(limit=1)] == batches[::-1]
    page = api.call("GET", "/v1/batches?limit=2").json()
    assert (page["first_id"], page["last_id"], page["has_more"]) == (batches[2], batches[1], True)


def test_life_of_a_batch(api: Api) -> None:
    client = api.client()
    made = make_batch(client, metadata={"team": "night"})
    assert made.id in api.sent.planned
    assert (made.object, made.status, made.endpoint, made.completion_window) == ("batch", "validating", ENDPOINT, "24h")
    assert made.metadata == {"team": "night"}
    assert made.expires_at == made.created_at + 86_400
    assert made.usage is None and "usage" not in made.to_dict()
    assert made.request_counts is not None and made.request_counts.total == 0
    assert made.output_file_id is None and made.error_file_id is None and made.errors is None
    assert client.batches.retrieve(made.id) == made
    move(api, made.id, Status.IN_PROGRESS, total=7, completed=4, failed=1, model_id=MODEL, model_digest=DIGEST)
    seen = client.batches.retrieve(made.id)
    assert seen.status == "in_progress" and seen.in_progress_at is not None
    assert seen.request_counts is not None
    assert (seen.request_counts.total, seen.request_counts.completed, seen.request_counts.failed) == (7, 4, 1)
    assert seen.usage is not None
    assert (seen.usage.input_tokens_details.cached_tokens, seen.usage.output_tokens_details.reasoning_tokens) == (0, 0)
    assert (seen.usage.input_tokens, seen.usage.output_tokens, seen.usage.total_tokens) == (0, 0, 0)
    assert seen.to_dict()["usage"]["cost_nanos"] == 0
    assert seen.to_dict()["waiting_for"] == f"no worker for model {MODEL}"
    assert seen.to_dict()["progress"] == {"phase": "running", "share": None}
    assert seen.to_dict()["estimated_completion_at"] is None and seen.to_dict()["at_risk"] is False


def test_cancel(api: Api) -> None:
    client = api.client()
    early = client.batches.cancel(make_batch(client).id)
    assert early.status == "cancelled" and early.cancelled_at is not None
    assert client.batches.cancel(early.id) == early
    running = make_batch(client)
    move(api, running.id, Status.IN_PROGRESS)
    cancelled = client.batches.cancel(running.id)
    assert cancelled.status == "cancelling" and cancelled.cancelling_at is not None
    assert running.id in api.sent.finalized
    assert client.batches.cancel(running.id) == cancelled
    move(api, running.id, Status.FINALIZING, why=Status.CANCELLED)
    assert client.batches.cancel(running.id).status == "cancelling"
    move(api, running.id, Status.CANCELLED)
    assert client.batches.cancel(running.id).status == "cancelled"
    done = make_batch(client)
    for status in (Status.IN_PROGRESS, Status.FINALIZING, Status.COMPLETED):
        move(api, done.id, status)
    with pytest.raises(openai.BadRequestError, match="completed"):
        client.batches.cancel(done.id)
    assert client.batches.retrieve(done.id).status == "completed"


def test_errors_of_a_failed_batch(api: Api) -> None:
    client = api.client()
    made = make_batch(client)
    problems = [{"code": "invalid_json_line", "line": 2, "message": "Line 2 is not JSON.", "param": None}]
    move(api, made.id, Status.FAILED, errors=problems, errors_total=1)
    failed = client.batches.retrieve(made.id)
    assert failed.status == "failed" and failed.failed_at is not None
    assert failed.errors is not None and failed.errors.object == "list" and failed.errors.data is not None
    assert (failed.errors.data[0].code, failed.errors.data[0].line) == ("invalid_json_line", 2)


@pytest.mark.parametrize(
    ("arguments", "param"),
    [
        ({"endpoint": "/v1/nope"}, "endpoint"),
        ({"endpoint": "/v1/moderations"}, "endpoint"),
        ({"completion_window": "1h"}, "completion_window"),
        ({"input_file_id": "file-nope"}, "input_file_id"),
        ({"metadata": {str(number): "x" for number in range(17)}}, "metadata"),
        ({"metadata": {"k" * 65: "x"}}, "metadata"),
        ({"metadata": {"k": "x" * 513}}, "metadata"),
        ({"metadata": {"k": "\0"}}, "metadata"),
        ({"metadata": {"k": 1}}, "metadata.k"),
        ({"output_expires_after": {"anchor": "created_at", "seconds": 3599}}, "output_expires_after.seconds"),
        ({"output_expires_after": {"anchor": "now", "seconds": 3600}}, "output_expires_after.anchor"),
        ({"extra_body": {"model": "gpt-nope"}}, "model"),
        ({"extra_body": {"on_invalid": "ignore"}}, "on_invalid"),
        ({"extra_body": {"name": ""}}, "name"),
        ({"extra_body": {"on_invald": "skip"}}, "on_invald"),
    ],
)
def test_a_wrong_create_names_its_parameter(api: Api, arguments: dict[str, object], param: str) -> None:
    client = api.client()
    file = client.files.create(file=("in.jsonl", LINES), purpose="batch")
    call: dict[str, object] = {"input_file_id": file.id, "endpoint": ENDPOINT, "completion_window": "24h", **arguments}
    with pytest.raises(openai.BadRequestError) as refused:
        client.batches.create(**call)
    assert refused.value.param == param
    assert refused.value.code and refused.value.message and refused.value.request_id
    assert client.batches.list().data == []


def test_extensions_of_create(api: Api) -> None:
    client = api.client()
    made = make_batch(
        client,
        output_expires_after={"anchor": "created_at", "seconds": 3600},
        extra_body={"model": MODEL, "on_invalid": "skip", "name": "nightly"},
    )
    shown = made.to_dict()
    assert (shown["model"], shown["on_invalid"], shown["name"]) == (MODEL, "skip", "nightly")
    make_batch(client)
    assert [batch["id"] for batch in api.call("GET", "/v1/batches?name=nightly").json()["data"]] == [made.id]
    assert api.call("GET", "/v1/batches?name=other").json()["data"] == []


def test_a_repeated_create_makes_one_batch(api: Api) -> None:
    """The client sends no idempotency key, but says when it sends a call again."""
    client = api.client()
    made = make_batch(client, metadata={"a": "b"})
    body = {
        "input_file_id": made.input_file_id,
        "endpoint": ENDPOINT,
        "completion_window": "24h",
        "metadata": {"a": "b"},
    }
    again = api.call("POST", "/v1/batches", json=body, headers={"x-stainless-retry-count": "1"})
    assert again.json()["id"] == made.id
    for other, count in ((body, "0"), ({**body, "metadata": {"a": "c"}}, "1"), ({**body, "on_invalid": "skip"}, "2")):
        answer = api.call("POST", "/v1/batches", json=other, headers={"x-stainless-retry-count": count})
        assert answer.status_code == 200 and answer.json()["id"] != made.id


def test_a_file_that_a_batch_reads_is_not_deleted(api: Api) -> None:
    client = api.client()
    made = make_batch(client)
    with pytest.raises(openai.BadRequestError, match=made.id) as refused:
        client.files.delete(made.input_file_id)
    assert refused.value.code == "file_in_use"
    client.batches.cancel(made.id)
    assert client.files.delete(made.input_file_id).deleted


def test_no_batch_begins_on_a_file_that_is_deleted_at_the_same_time(api: Api) -> None:
    client = api.client()
    for _ in range(12):
        file = client.files.create(file=("in.jsonl", LINES), purpose="batch")
        body = {"input_file_id": file.id, "endpoint": ENDPOINT, "completion_window": "24h"}
        with ThreadPoolExecutor(2) as pool:
            created = pool.submit(api.call, "POST", "/v1/batches", json=body)
            deleted = pool.submit(api.call, "DELETE", f"/v1/files/{file.id}")
            assert sorted([created.result().status_code, deleted.result().status_code]) == [200, 400]


def test_an_output_file_is_no_input(api: Api) -> None:
    from batchsvc.files import service as files

    with api.db.transaction() as session:
        row = files.add_result(
            session,
            project_id=api.project_id,
            filename="out.jsonl",
            s3_key=f"test/{api.project_id}",
            etag="",
            sha256="0" * 64,
            size_bytes=1,
            created_ms=now_ms(),
            expires_ms=now_ms() + 10_000,
        )
    client = api.client()
    assert [file.id for file in client.files.list(purpose="batch_output")] == [row.id]
    with pytest.raises(openai.BadRequestError, match="batch_output"):
        client.batches.create(input_file_id=row.id, endpoint=ENDPOINT, completion_window="24h")


def test_models(api: Api) -> None:
    client = api.client()
    first = client.models.list().data[0]
    assert (first.id, first.object, first.owned_by) == (MODEL, "model", "batchsvc")
    assert first.to_dict()["digest"] == DIGEST
    assert first.to_dict()["context_tokens"] == 2048
    assert client.models.retrieve(MODEL) == first
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("gpt-nope")


def test_error_classes(api: Api) -> None:
    client = api.client()
    with pytest.raises(openai.AuthenticationError) as unknown:
        api.client("sk-wrong").batches.list()
    assert unknown.value.code == "invalid_api_key"
    with pytest.raises(openai.NotFoundError) as missing:
        client.batches.retrieve("batch_nope")
    assert missing.value.type == "invalid_request_error"
    with pytest.raises(openai.BadRequestError) as batch_only:
        client.embeddings.create(model=MODEL, input="x")
    assert batch_only.value.code == "batch_only"
    assert "/v1/files" in batch_only.value.message and "/v1/batches" in batch_only.value.message
    for call in (  # answered directly, where there are workers: tests/batchsvc/interactive
        lambda: client.chat.completions.create(model="gpt-nope", messages=[{"role": "user", "content": "hi"}]),
        lambda: client.completions.create(model="gpt-nope", prompt="x"),
        lambda: client.responses.create(model="gpt-nope", input="x"),
    ):
        with pytest.raises(openai.NotFoundError) as refused:
            call()
        assert refused.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError, match="purpose"):
        client.files.create(file=("a.jsonl", LINES), purpose="assistants")
    with pytest.raises(openai.BadRequestError, match="Invalid file format"):
        client.files.create(file=("a.txt", LINES), purpose="batch")
