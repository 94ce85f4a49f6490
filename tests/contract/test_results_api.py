"""Results while a batch runs, conditional and redirected downloads, and going on after a stop, over HTTP."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any

import httpx
import openai
import pytest

from batchsvc import ids
from batchsvc.accounts import service as accounts
from batchsvc.batches import continuation, line_set, result_cursor, service
from batchsvc.batches.continuation import Scope
from batchsvc.batches.lifecycle import Status
from batchsvc.batches.result_cursor import Cursor, Kind
from batchsvc.batches.schemas import RunAgain
from batchsvc.batches.tables import Batch
from tests.contract.conftest import MODEL, Api
from tests.contract.test_http import envelope
from tests.dispatchers import NullDispatcher
from tests.serving import serving
from tests.workers.conftest import World
from tests.workers.test_finalize import finalizer, run_units

LINES = b"".join(
    json.dumps({"custom_id": f"c{n}", "method": "POST", "url": "/v1/chat/completions", "body": {}}).encode() + b"\n"
    for n in range(1, 9)
)


def world_of(api: Api) -> World:
    return World(api.settings, api.db, api.store)


def add_batch(api: Api, **changes: Any) -> str:
    """A running batch of this project, of a file that is there."""
    digest = ids.random_text(32)  # so that nobody else's units are claimed
    world = world_of(api)
    batch_id = world.add_batch(num_lines=8, unit_lines=4, digest=digest, project=api.project_id)
    file = api.call("POST", "/v1/files", files={"file": ("in.jsonl", LINES)}, data={"purpose": "batch"}).json()["id"]
    world.set_batch(batch_id, input_file_id=file, model_requested=MODEL, api_key_id="k", **changes)
    return batch_id


def run(api: Api, batch_id: str, units: int = 100) -> None:
    world = world_of(api)
    run_units(world, most_units=units, digest=world.batch(batch_id).model_digest or "")


def cancel(api: Api, batch_id: str) -> None:
    world_of(api).set_batch(batch_id, status=Status.CANCELLING, cancelling_ms=1)
    assert finalizer(world_of(api)).finalize(batch_id)


def results(api: Api, batch_id: str, **query: Any) -> httpx.Response:
    answer = api.call("GET", f"/v1/batches/{batch_id}/results", params=query)
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"].startswith("application/jsonl")
    return answer


def test_a_reader_follows_a_running_batch(api: Api) -> None:
    batch_id = add_batch(api)
    nothing = results(api, batch_id)
    assert nothing.content == b"" and nothing.headers["x-batch-status"] == "in_progress"
    run(api, batch_id, units=1)
    first = [json.loads(line) for line in results(api, batch_id).text.splitlines()]
    assert len(first) == 4 and all(set(line) >= {"id", "custom_id", "response", "error", "line"} for line in first)
    cut = first[1]["cursor"]
    cancel(api, batch_id)
    rest = [json.loads(line) for line in results(api, batch_id, after=cut).text.splitlines()]
    assert rest[:2] == first[2:] and sorted(line["line"] for line in first[:2] + rest) == list(range(1, 9))
    assert {line["error"]["code"] for line in rest[2:]} == {"batch_cancelled"}
    end = results(api, batch_id, after=rest[-1]["cursor"])
    assert end.content == b"" and end.headers["x-batch-status"] == "cancelled"
    ordered = [json.loads(line) for line in results(api, batch_id, order="input", limit=5).text.splitlines()]
    assert [line["line"] for line in ordered] == [1, 2, 3, 4, 5]


def test_a_wrong_cursor_is_named(api: Api) -> None:
    one, two = add_batch(api), add_batch(api)
    run(api, one)
    cursor = json.loads(results(api, one, limit=1).text)["cursor"]
    for batch_id, query in (
        (two, {"after": cursor}),
        (one, {"after": cursor, "order": "input"}),
        (one, {"after": cursor[:-1]}),
        (one, {"after": "x" * 200}),
        (one, {"after": ""}),
    ):
        answer = api.call("GET", f"/v1/batches/{batch_id}/results", params=query)
        assert envelope(answer, 400)["param"] == "after"
    for query, param in (({"limit": 0}, "limit"), ({"order": "up"}, "order")):
        assert envelope(api.call("GET", f"/v1/batches/{one}/results", params=query), 400)["param"] == param


def test_a_cursor_that_nobody_was_given_is_refused(api: Api) -> None:
    """Its digest is no secret, so it can be made; it may lead nowhere, but not into an error of ours."""
    batch_id = add_batch(api)
    cancel(api, batch_id)
    size = len(results(api, batch_id).content)
    forged = [Cursor(Kind.TAIL, (3,)), Cursor(Kind.TAIL, (size * 9,)), Cursor(Kind.PART, (2**60, 1))]
    ordered = [Cursor(Kind.INPUT, (1, 2, 3)), Cursor(Kind.INPUT, (0, 2**60, size // 2))]
    for cursor in forged + ordered:
        query = {
            "after": result_cursor.encode(batch_id, cursor),
            "order": "input" if cursor in ordered else "completion",
        }
        answer = api.call("GET", f"/v1/batches/{batch_id}/results", params=query)
        assert answer.status_code in (200, 400), (cursor, answer.text)
    after = result_cursor.encode(batch_id, forged[0])
    assert (
        envelope(api.call("GET", f"/v1/batches/{batch_id}/results", params={"after": after}), 400)["param"] == "after"
    )


def test_a_client_keeps_its_copy(api: Api) -> None:
    file = api.call("POST", "/v1/files", files={"file": ("in.jsonl", LINES)}, data={"purpose": "batch"}).json()
    path, tag = f"/v1/files/{file['id']}/content", f'"{file["sha256"]}"'
    whole = api.call("GET", path)
    assert (whole.status_code, whole.headers["etag"], whole.content) == (200, tag, LINES)
    assert whole.headers["cache-control"] == "private, no-cache"
    for known in (tag, f"W/{tag}", f'"other", {tag}', "*"):
        same = api.call("GET", path, headers={"If-None-Match": known})
        assert (same.status_code, same.content, same.headers["etag"]) == (304, b"", tag)
    assert api.call("GET", path, headers={"If-None-Match": '"other"'}).status_code == 200
    for condition, status in ((tag, 206), ('"other"', 200), (f"W/{tag}", 200), ("Tue, 01 Dec 2026 00:00:00 GMT", 200)):
        answer = api.call("GET", path, headers={"Range": "bytes=1-4", "If-Range": condition})
        assert (answer.status_code, answer.content) == (status, LINES[1:5] if status == 206 else LINES)
    beyond = api.call("GET", path, headers={"Range": "bytes=99999-", "If-Range": tag})
    assert beyond.status_code == 416 and beyond.headers["content-range"] == f"bytes */{len(LINES)}"


def test_a_public_store_answers_itself(api: Api) -> None:
    form: dict[str, Any] = {"files": {"file": ("té.jsonl", LINES)}, "data": {"purpose": "batch"}}
    file = api.call("POST", "/v1/files", **form).json()
    public = api.settings.model_copy(update={"public_s3_url": api.settings.s3_endpoint})
    with serving(public, NullDispatcher()) as url:
        headers = {"Authorization": f"Bearer {api.key}"}
        path = f"{url}/v1/files/{file['id']}/content"
        moved = api.http.get(path, headers=headers)
        assert moved.status_code == 307 and moved.headers["location"].startswith(f"{api.settings.s3_endpoint}/")
        assert str(api.settings.s3_secret_key) not in moved.headers["location"]
        got = api.http.get(path, headers={**headers, "Range": "bytes=2-7"}, follow_redirects=True)
        assert (got.status_code, got.content) == (206, LINES[2:8])
        assert "filename" in got.headers["content-disposition"]
        changed = moved.headers["location"].replace(file["id"], "file-" + "0" * 24)
        assert api.http.get(changed).status_code == 403, "the address is signed for one object"
        assert api.http.get(path).status_code == 401
        known = api.http.get(path, headers={**headers, "If-None-Match": f'"{file["sha256"]}"'})
        assert known.status_code == 304
    assert api.call("GET", f"/v1/files/{file['id']}/content").status_code == 200


def test_a_project_pauses_and_resumes_its_batch(api: Api) -> None:
    batch_id = add_batch(api)
    before = api.call("GET", f"/v1/batches/{batch_id}").json()
    for _ in range(2):
        paused = api.call("POST", f"/v1/batches/{batch_id}/pause").json()
        assert (paused["status"], paused["waiting_for"]) == ("in_progress", "paused")
        assert paused["expires_at"] == before["expires_at"]
    resumed = api.call("POST", f"/v1/batches/{batch_id}/resume").json()
    assert resumed["waiting_for"] != "paused"
    cancel(api, batch_id)
    for verb in ("pause", "resume"):
        assert envelope(api.call("POST", f"/v1/batches/{batch_id}/{verb}"), 400)["param"] == "batch_id"


def test_a_project_and_an_operator_have_a_pause_each(api: Api) -> None:
    """Neither ends the other's, and the batch runs on when both have ended."""
    batch_id = add_batch(api)

    def waits(verb: str, *, admin: bool) -> str | None:
        path = f"/v1/{'admin/' if admin else ''}batches/{batch_id}/{verb}"
        answer = api.call("POST", path, api.admin_key if admin else "")
        assert answer.status_code == 200, answer.text
        found: str | None = answer.json()["waiting_for"]
        return found

    for _ in range(2):
        assert waits("pause", admin=True) == waits("pause", admin=False) == "paused: by the operator"
    assert waits("resume", admin=True) == "paused", "the project's own"
    assert waits("pause", admin=True) == "paused: by the operator"
    assert waits("resume", admin=False) == "paused: by the operator"
    refused = envelope(api.call("POST", f"/v1/batches/{batch_id}/resume"), 403)
    assert refused["code"] == "paused_by_operator" and "by the operator" in refused["message"]
    assert "paused" not in (waits("resume", admin=True) or "")
    assert waits("pause", admin=False) == "paused"
    assert "paused" not in (waits("resume", admin=False) or "")


def test_a_batch_that_is_cancelled_in_the_same_moment_is_not_paused(api: Api) -> None:
    batch_id = add_batch(api)
    with ThreadPoolExecutor(1) as pool:
        with api.db.transaction() as session:
            service.cancel(session, api.project_id, batch_id)
            asked = pool.submit(api.call, "POST", f"/v1/batches/{batch_id}/pause")
            assert not wait([asked], timeout=0.5).done, "the cancel isn't committed"
        assert envelope(asked.result(), 400)["param"] == "batch_id"
    batch = world_of(api).batch(batch_id)
    assert (batch.status, batch.is_paused) == ("cancelling", False)


def test_the_rest_of_a_cancelled_batch_is_a_new_batch(api: Api) -> None:
    wishes = {"metadata_json": {"a": "b"}, "name": "job", "priority": 2, "max_cost_nanos": 1_500_000_000}
    batch_id = add_batch(api, **wishes)
    run(api, batch_id, units=1)
    assert "has ended" in envelope(api.call("POST", f"/v1/batches/{batch_id}/retry"), 400)["message"]
    cancel(api, batch_id)
    done = {json.loads(line)["line"] for line in results(api, batch_id, limit=4).text.splitlines()}
    made = api.call("POST", f"/v1/batches/{batch_id}/continue").json()
    assert (made["parent_batch_id"], made["status"], made["name"]) == (batch_id, "validating", "job")
    assert (made["metadata"], made["priority"], made["max_cost_nanos"]) == ({"a": "b"}, 2, 1_500_000_000)
    assert made["id"] in api.sent.planned
    with api.db.reading() as session:
        chosen = session.get_one(Batch, made["id"]).chosen_lines
    assert chosen is not None and set(line_set.decode(chosen).tolist()) == set(range(1, 9)) - done
    other = api.call("POST", f"/v1/batches/{batch_id}/retry", json={"name": "again", "max_cost": "2"}).json()
    assert (other["name"], other["max_cost_nanos"]) == ("again", 2_000_000_000)
    assert envelope(api.call("POST", f"/v1/batches/{batch_id}/retry", json={"model": "x"}), 400)["param"] == "model"


def test_a_repeated_retry_is_one_batch(api: Api) -> None:
    batch_id = add_batch(api)
    cancel(api, batch_id)
    path = f"/v1/batches/{batch_id}/retry"
    named = [api.call("POST", path, headers={"Idempotency-Key": "k"}).json()["id"] for _ in range(2)]
    assert named[0] == named[1]
    fresh = api.call("POST", path).json()["id"]
    again = api.call("POST", path, headers={"x-stainless-retry-count": "1"}).json()["id"]
    assert again == fresh != named[0]
    world_of(api).set_batch(batch_id, error_file_id="file-gone")
    again = api.call("POST", path, headers={"Idempotency-Key": "k"})
    assert (again.status_code, again.json()["id"]) == (200, named[0]), "its results were deleted since"
    other = api.call("POST", path, headers={"Idempotency-Key": "k"}, json={"name": "other"})
    assert envelope(other, 422)["code"] == "idempotency_key_reused"
    assert "results" in envelope(api.call("POST", path), 404)["message"]


def test_retries_at_the_same_time_wait_for_the_first(api: Api) -> None:
    """A client that gave up waiting sends its call again while the first one is still at work: it pays once."""
    batch_id = add_batch(api)
    cancel(api, batch_id)
    with api.db.reading() as session:
        caller = accounts.caller(session, api.key)
        ended = continuation.ended(session, api.project_id, batch_id, Scope.RETRY)
    chosen = continuation.chosen_lines(api.store, ended)
    again = {"headers": {"x-stainless-retry-count": "1"}}
    with ThreadPoolExecutor(2) as pool:
        with api.db.transaction() as session:
            made = {"batch_id": ids.batch_id(), "is_retry": False}
            first = continuation.create(session, caller, ended, chosen, RunAgain(), api.settings, **made).id
            asked = [pool.submit(api.call, "POST", f"/v1/batches/{batch_id}/retry", **again) for _ in range(2)]
            assert not wait(asked, timeout=0.5).done, "the first one isn't committed"
        assert {answer.result().json()["id"] for answer in asked} == {first}


def test_a_batch_whose_input_is_gone_can_t_run_again(api: Api) -> None:
    batch_id = add_batch(api)
    cancel(api, batch_id)
    file_id = world_of(api).batch(batch_id).input_file_id
    assert api.call("DELETE", f"/v1/files/{file_id}").status_code == 200
    for verb in ("retry", "continue"):
        error = envelope(api.call("POST", f"/v1/batches/{batch_id}/{verb}"), 400)
        assert (error["code"], error["param"]) == ("input_deleted", "batch_id") and file_id in error["message"]


def test_what_has_nothing_to_run_again_says_so(api: Api) -> None:
    batch_id = add_batch(api)
    run(api, batch_id)
    assert finalizer(world_of(api)).finalize(batch_id)
    assert envelope(api.call("POST", f"/v1/batches/{batch_id}/retry"), 400)["code"] == "nothing_to_retry"
    assert "retry" in envelope(api.call("POST", f"/v1/batches/{batch_id}/continue"), 400)["message"]


@pytest.mark.parametrize(("status", "answer"), [("cancelled", 200), ("failed", 400)])
def test_a_batch_that_ended_before_it_ran(api: Api, status: str, answer: int) -> None:
    batch_id = add_batch(api)
    world_of(api).set_batch(batch_id, status=status, ended_ms=1, in_progress_ms=None, total=0)
    made = api.call("POST", f"/v1/batches/{batch_id}/continue")
    assert made.status_code == answer
    if answer == 200:
        with api.db.reading() as session:
            assert session.get_one(Batch, made.json()["id"]).chosen_lines is None, "all of its input"
    assert results(api, batch_id).content == b""


def test_the_official_client_stops_and_goes_on(api: Api) -> None:
    """What OpenAI's API lacks, the client's own `post` and `get` reach, with its types and its errors."""
    client, batch_id = api.client(), add_batch(api)
    paused = client.post(f"/batches/{batch_id}/pause", cast_to=openai.types.Batch)
    assert (paused.status, paused.to_dict()["waiting_for"]) == ("in_progress", "paused")
    assert client.post(f"/batches/{batch_id}/resume", cast_to=openai.types.Batch).status == "in_progress"
    run(api, batch_id, units=1)
    with pytest.raises(openai.BadRequestError, match="has ended"):
        client.post(f"/batches/{batch_id}/retry", cast_to=openai.types.Batch)
    cancel(api, batch_id)
    read = client.get(f"/batches/{batch_id}/results", cast_to=httpx.Response, options={"params": {"order": "input"}})
    lines = [json.loads(line) for line in read.text.splitlines()]
    assert [line["line"] for line in lines] == list(range(1, 9)) and read.headers["x-batch-status"] == "cancelled"
    rest = client.post(f"/batches/{batch_id}/continue", cast_to=openai.types.Batch, body={"metadata": {"a": "b"}})
    assert (rest.status, rest.metadata, rest.to_dict()["parent_batch_id"]) == ("validating", {"a": "b"}, batch_id)
    assert client.batches.retrieve(rest.id) == rest
    again = client.post(f"/batches/{batch_id}/retry", cast_to=openai.types.Batch, body={"name": "again"})
    assert again.to_dict()["name"] == "again" and again.id != rest.id
    with pytest.raises(openai.BadRequestError) as wrong:
        client.post(f"/batches/{batch_id}/retry", cast_to=openai.types.Batch, body={"model": "x"})
    assert wrong.value.param == "model"
    with pytest.raises(openai.NotFoundError):
        client.post("/batches/batch_nope/pause", cast_to=openai.types.Batch)
