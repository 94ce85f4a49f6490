"""The official Anthropic client: message batches from creation to deletion."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import anthropic
import orjson
import pytest
from anthropic.types.messages import MessageBatch

from batchsvc import ids
from batchsvc.batches import lifecycle, message_intake, part_file
from batchsvc.batches.lifecycle import Status
from batchsvc.batches.message_body import MESSAGES
from batchsvc.batches.tables import Batch, Unit
from batchsvc.clock import now_ms
from batchsvc.files import service as files
from batchsvc.files.tables import File
from batchsvc.store import keys
from tests.contract.conftest import DIGEST, MODEL, Api

PARAMS = {"model": MODEL, "max_tokens": 5, "messages": [{"role": "user", "content": "hi"}]}


@contextmanager
def opened(api: Api, key: str | None = None, **more: Any) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=api.url, api_key=key or api.key, max_retries=0, **more) as client:
        yield client


@pytest.fixture
def client(api: Api) -> Iterator[anthropic.Anthropic]:
    with opened(api) as made:
        yield made


def create(client: anthropic.Anthropic, *custom_ids: str) -> MessageBatch:
    requests: list[Any] = [{"custom_id": name, "params": PARAMS} for name in custom_ids]
    return client.messages.batches.create(requests=requests)


def counts(batch: MessageBatch) -> dict[str, int]:
    return {name: number for name, number in batch.request_counts.to_dict().items() if number}


def end(api: Api, batch_id: str, status: Status, *, ran: int, rejected: int, left: int) -> None:
    """End a batch as the finalizer does, with lines of each kind, in this order."""
    usage = {"prompt_tokens": 10, "cached_tokens": 4, "completion_tokens": 3, "cost_nanos": 7}
    output, error = [], []
    for line_no in range(1, ran + rejected + left + 1):
        ident = {"batch_id": batch_id, "line_no": line_no, "custom_id": f"c{line_no}"}
        if line_no <= ran:
            answer = {"model": MODEL, "created_s": 1, "text": "yes", "finish_reason": "stop"}
            output.append(part_file.success_row(**ident, **answer, **usage))
        elif line_no <= ran + rejected:
            error.append(part_file.error_row(**ident, code="invalid_value", message="no", status=400))
        else:
            code = "batch_cancelled" if status == Status.CANCELLED else "batch_expired"
            error.append(part_file.error_row(**ident, code=code, message="never ran"))
    with api.db.transaction() as session:
        now = now_ms()
        lifecycle.move(session, batch_id, Status.IN_PROGRESS, now_ms=now, values={"total": ran + rejected + left})
        lifecycle.move(session, batch_id, Status.FINALIZING, now_ms=now, values={"why": status})
        made = {}
        for kind, rows in (("output", output), ("error", error)):
            data = b"\n".join(rows) + b"\n"
            key = keys.output(batch_id, 1, kind)
            etag = api.store.put(key, data)
            expires_ms = now + 10**9
            life = {"created_ms": now, "expires_ms": expires_ms, "size_bytes": len(data)}
            made[kind] = files.add_result(
                session, project_id=api.project_id, filename=kind, s3_key=key, etag=etag, sha256="", **life
            ).id
        values = {"completed": ran, "failed": rejected + left}
        files_of = {"output_file_id": made["output"], "error_file_id": made["error"]}
        lifecycle.move(session, batch_id, status, now_ms=now, values={**values, **files_of})
        if left:
            unit = {"id": ids.unit_id(), "batch_id": batch_id, "project_id": api.project_id, "model_digest": DIGEST}
            session.add(
                Unit(
                    **unit,
                    window_no=0,
                    no=0,
                    s3_key=f"x{batch_id}",
                    sha256="",
                    num_lines=left,
                    state="sealed",
                    done_bitmap=b"",
                )
            )


def test_life_of_a_message_batch(api: Api, client: anthropic.Anthropic) -> None:
    made = create(client, "a", "b")
    assert made.id.startswith("msgbatch_") and made.type == "message_batch" and api.sent.planned[-1] == made.id
    assert made.processing_status == "in_progress" and counts(made) == {"processing": 2}
    assert made.results_url is None and made.ended_at is None
    assert (made.expires_at - made.created_at).total_seconds() == 86_400
    assert client.messages.batches.retrieve(made.id) == made
    with pytest.raises(anthropic.BadRequestError, match="hasn't ended"):
        client.messages.batches.delete(made.id)
    with api.db.reading() as session:
        row = session.get_one(Batch, made.id)
        lines = api.store.get(keys.input_file(api.project_id, row.input_file_id)).splitlines()
    wanted = {"method": "POST", "url": MESSAGES, "body": PARAMS}
    assert [orjson.loads(line) for line in lines] == [{**wanted, "custom_id": name} for name in "ab"]

    end(api, made.id, Status.COMPLETED, ran=1, rejected=1, left=0)
    ended = client.messages.batches.retrieve(made.id)
    assert ended.processing_status == "ended" and counts(ended) == {"succeeded": 1, "errored": 1}
    assert ended.results_url == f"{api.url}/v1/messages/batches/{made.id}/results" and ended.ended_at
    good, bad = client.messages.batches.results(made.id)
    assert good.custom_id == "c1" and good.result.type == "succeeded"
    message = good.result.message
    assert message.content[0].type == "text" and message.content[0].text == "yes" and message.stop_reason == "end_turn"
    usage = message.usage
    assert (usage.input_tokens, usage.cache_read_input_tokens, usage.output_tokens) == (6, 4, 3)
    assert usage.service_tier == "batch"
    assert bad.result.type == "errored" and bad.result.error.error.type == "invalid_request_error"

    assert client.messages.batches.delete(made.id).type == "message_batch_deleted"
    for call in (client.messages.batches.retrieve, client.messages.batches.results, client.messages.batches.delete):
        with pytest.raises(anthropic.NotFoundError):
            call(made.id)
    assert client.messages.batches.list().data == []
    assert api.call("GET", "/v1/files").json()["data"] == []
    assert api.call("GET", "/v1/batches").json()["data"] == []
    assert api.call("GET", f"/v1/batches/{made.id}").status_code == 404


def test_a_call_has_bounded_bytes_and_requests(
    api: Api, client: anthropic.Anthropic, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(message_intake, "MOST_REQUESTS", 2)
    monkeypatch.setattr(message_intake, "MOST_BYTES", 2_000)
    create(client, "a", "b")
    with pytest.raises(anthropic.BadRequestError, match="at most 2: make several"):
        create(client, "a", "b", "c")
    body = orjson.dumps({"requests": [{"custom_id": "a", "params": {**PARAMS, "note": "x" * 2_000}}]})
    whole = {"content": body, "headers": {"content-type": "application/json"}}
    in_pieces = whole | {"content": iter([body[:1_000], body[1_000:]])}
    for sent in (whole, in_pieces):  # the length that a call names, and that of what comes
        assert api.call("POST", "/v1/messages/batches", **sent).status_code == 413
    assert len(client.messages.batches.list().data) == 1
    assert len(list(api.store.list_keys(f"{keys.INPUTS}{api.project_id}/"))) == 1, "nothing of a refused one is kept"


def test_each_request_has_one_result_whatever_ended_the_batch(api: Api, client: anthropic.Anthropic) -> None:
    for status, kind in ((Status.CANCELLED, "canceled"), (Status.EXPIRED, "expired")):
        made = create(client, "c1", "c2", "c3", "c4")
        if status == Status.CANCELLED:
            with api.db.transaction() as session:
                lifecycle.move(session, made.id, Status.IN_PROGRESS, now_ms=now_ms(), values={"total": 4})
            cancelled = client.messages.batches.cancel(made.id)
            assert cancelled.processing_status == "canceling" and counts(cancelled) == {"processing": 4}
            assert cancelled.cancel_initiated_at is not None
        end(api, made.id, status, ran=1, rejected=1, left=2)
        assert counts(client.messages.batches.retrieve(made.id)) == {"succeeded": 1, "errored": 1, kind: 2}
        found = [line.result.type for line in client.messages.batches.results(made.id)]
        assert found == ["succeeded", "errored", kind, kind]


@pytest.mark.parametrize(
    ("status", "kind"), [(Status.FAILED, "errored"), (Status.CANCELLED, "canceled"), (Status.EXPIRED, "expired")]
)
def test_a_batch_that_never_began_has_its_results_too(
    api: Api, client: anthropic.Anthropic, status: Status, kind: str
) -> None:
    made = create(client, "a", "b")
    if status == Status.CANCELLED:
        assert client.messages.batches.cancel(made.id).processing_status == "ended"
    else:
        values = {"why": status, "errors": [{"message": "no model"}]}
        with api.db.transaction() as session:
            assert lifecycle.move(session, made.id, status, now_ms=now_ms(), values=values)
    ended = client.messages.batches.retrieve(made.id)
    assert ended.processing_status == "ended" and counts(ended) == {kind: 2}
    lines = list(client.messages.batches.results(made.id))
    assert [(line.custom_id, line.result.type) for line in lines] == [("a", kind), ("b", kind)]
    if status == Status.FAILED:
        assert lines[0].result.type == "errored" and lines[0].result.error.error.message == "no model"


def test_pages_lead_both_ways(client: anthropic.Anthropic) -> None:
    made = [create(client, "a").id for _ in range(5)][::-1]
    assert [batch.id for batch in client.messages.batches.list(limit=2)] == made, "the client walks all pages"
    page = client.messages.batches.list(limit=2, after_id=made[1])
    assert ([batch.id for batch in page.data], page.has_more) == (made[2:4], True)
    page = client.messages.batches.list(limit=2, before_id=made[3])
    assert ([batch.id for batch in page.data], page.has_more) == (made[1:3], True)
    page = client.messages.batches.list(limit=2, before_id=made[1])
    assert ([batch.id for batch in page.data], page.has_more) == (made[:1], False)
    for wrong in ({"after_id": "msgbatch_nope"}, {"after_id": made[0], "before_id": made[1]}, {"limit": 0}):
        with pytest.raises(anthropic.BadRequestError):
            client.messages.batches.list(**wrong)


def test_a_walk_goes_on_over_batches_that_are_deleted_on_the_way(api: Api, client: anthropic.Anthropic) -> None:
    made = [create(client, "a").id for _ in range(3)]
    for batch_id in made:
        client.messages.batches.cancel(batch_id)
    gone = [client.messages.batches.delete(batch.id).id for batch in client.messages.batches.list(limit=1)]
    assert gone == made[::-1] and client.messages.batches.list().data == []
    assert api.call("GET", "/v1/batches", params={"after": made[1]}).json()["data"] == []


def test_the_rest_of_a_message_batch_is_a_message_batch(api: Api, client: anthropic.Anthropic) -> None:
    made = create(client, "c1", "c2", "c3", "c4")
    end(api, made.id, Status.CANCELLED, ran=1, rejected=1, left=2)
    rest = api.call("POST", f"/v1/batches/{made.id}/continue").json()["id"]
    assert rest.startswith("msgbatch_") and counts(client.messages.batches.retrieve(rest)) == {"processing": 2}
    assert counts(client.messages.batches.cancel(rest)) == {"canceled": 2}
    assert [line.custom_id for line in client.messages.batches.results(rest)] == ["c3", "c4"]
    again = api.call("POST", f"/v1/batches/{rest}/continue").json()["id"]
    assert counts(client.messages.batches.retrieve(again)) == {"processing": 2}, "what it had itself, not its input"


@pytest.mark.parametrize(
    "requests",
    [
        [],
        [{"custom_id": "a", "params": PARAMS}] * 2,
        [{"custom_id": "", "params": PARAMS}],
        [{"custom_id": "a b", "params": PARAMS}],
        [{"custom_id": "a" * 65, "params": PARAMS}],
        [{"custom_id": "a"}],
        [{"params": PARAMS}],
        [{"custom_id": "a", "params": "x"}],
    ],
)
def test_a_call_of_a_wrong_shape_is_refused_whole(api: Api, client: anthropic.Anthropic, requests: list[Any]) -> None:
    with pytest.raises(anthropic.BadRequestError) as refused:
        client.messages.batches.create(requests=requests)
    body: Any = refused.value.body
    assert body["type"] == "error" and body["error"]["type"] == "invalid_request_error" and body["error"]["message"]
    assert refused.value.request_id == body["request_id"]
    assert list(api.store.list_keys(f"{keys.INPUTS}{api.project_id}/")) == []


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b"", 400),
        (b"[]", 400),
        (b'{"requests":', 400),
        (b'{"requests":[{"custom_id":"a","params":{}}]', 400),
        (b'{"requests":[{"custom_id":"a","params":{}},]}', 400),
        (b'{"requests":[{"custom_id":"a","params":{}}],"x":1}', 400),
        (b'{"requests":[{"custom_id":"a","params":{"a":1,"a":2}}]}', 400),
        (b'{"requests":[{"custom_id":"a","params":{"a":1e400}}]}', 400),
        (b'{"requests":[{"custom_id":"a","params":{"a":NaN}}]}', 400),
        (b'{"requests":[{"custom_id":"a","params":{"a":"' + b"x" * 26_000_000 + b'"}}]}', 413),
    ],
)
def test_a_body_that_can_not_be_read_leaves_nothing(api: Api, body: bytes, status: int) -> None:
    answer = api.call("POST", "/v1/messages/batches", content=body, headers={"content-type": "application/json"})
    assert answer.status_code == status and answer.json()["error"]["message"], answer.text
    assert list(api.store.list_keys(f"{keys.INPUTS}{api.project_id}/")) == []


def test_a_large_call_is_stored_as_it_comes(api: Api) -> None:
    """In pieces that end anywhere, and as more than one part of an upload."""
    text, count = "word " * 20_000, 110

    def pieces() -> Iterator[bytes]:
        yield b'{"requests": ['
        for number in range(count):
            params = PARAMS | {"messages": [{"role": "user", "content": f"{number} {text}"}]}
            request = orjson.dumps({"custom_id": f"c{number}", "params": params})
            yield (b"," if number else b"") + request[:1000]
            yield request[1000:]
        yield b"]}"

    answer = api.call("POST", "/v1/messages/batches", content=pieces())
    assert answer.status_code == 200, answer.text
    assert answer.json()["request_counts"]["processing"] == count
    with api.db.reading() as session:
        row = session.get_one(Batch, answer.json()["id"])
        file = session.get_one(File, row.input_file_id)
    assert file.size_bytes > count * len(text) > 10_000_000
    last = api.store.get(file.s3_key).rstrip(b"\n").rpartition(b"\n")[2]
    assert orjson.loads(last)["body"]["messages"][0]["content"].startswith(f"{count - 1} word")


def test_a_request_that_no_line_can_hold_is_told_by_its_number(api: Api) -> None:
    """The planner would refuse its line without having read its custom_id."""
    too_long = PARAMS | {"messages": [{"role": "user", "content": "x" * api.settings.max_line_bytes}]}
    requests = [{"custom_id": "a", "params": PARAMS}, {"custom_id": "b", "params": too_long}]
    answer = api.call("POST", "/v1/messages/batches", json={"requests": requests})
    assert answer.status_code == 413, answer.text
    assert "requests.1" in answer.json()["error"]["message"]


def test_errors_have_anthropics_classes(api: Api, client: anthropic.Anthropic) -> None:
    made = create(client, "a")
    _, other = api.new_project()
    with opened(api, other) as foreign, opened(api, "sk-wrong") as unknown, opened(api, None) as bearer:
        for call in ("retrieve", "cancel", "delete", "results"):
            with pytest.raises(anthropic.NotFoundError):
                getattr(foreign.messages.batches, call)(made.id)
        assert foreign.messages.batches.list().data == []
        with pytest.raises(anthropic.AuthenticationError):
            unknown.messages.batches.list()
        assert [batch.id for batch in bearer.messages.batches.list()] == [made.id]
        with pytest.raises(anthropic.BadRequestError, match="batches"):
            client.messages.create(**PARAMS)
    answer = api.call("GET", f"/v1/messages/batches/{made.id}")
    assert answer.json()["id"] == made.id and answer.headers["request-id"] == answer.headers["x-request-id"]
    plain = api.call(
        "POST", "/v1/batches", json={"input_file_id": "x", "endpoint": MESSAGES, "completion_window": "24h"}
    )
    assert plain.json()["error"]["param"] == "endpoint"
