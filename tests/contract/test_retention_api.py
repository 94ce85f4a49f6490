"""How long files live and how they go, as the official clients ask for it, and as an operator does."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from typing import Any

import anthropic
import httpx
import openai
import pytest
from sqlalchemy import select

from batchsvc.audit.tables import AuditRow
from batchsvc.batches import finalize_queries, lifecycle
from batchsvc.batches.finalize_queries import ResultFile
from batchsvc.batches.lifecycle import Status
from batchsvc.batches.tables import Batch
from batchsvc.files.tables import File, Purge
from batchsvc.store import keys
from tests.contract.conftest import MODEL, Api, on_sqlite

LINE = (
    b'{"custom_id": "1", "method": "POST", "url": "/v1/chat/completions", "body": {"model": "%s", "messages": '
    b'[{"role": "user", "content": "hi"}]}}\n' % MODEL.encode()
)
ENDPOINT: Any = "/v1/chat/completions"


def today() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%d")


def error(answer: httpx.Response, status: int) -> dict[str, Any]:
    assert answer.status_code == status, answer.text
    return dict(answer.json()["error"])


def end(api: Api, batch_id: str, file_ttl_s: int = 7_200) -> None:
    """End a batch as the finalizer does, with an output of one line."""
    key = keys.output(batch_id, 1, "output")
    etag = api.store.put(key, b"{}\n")
    with api.db.transaction() as session:
        row = session.get_one(Batch, batch_id)
        row.status, row.why, row.fin_epoch, row.total, row.in_progress_ms = "finalizing", "completed", 1, 1, 1
        session.flush()
        result = ResultFile(kind="output", s3_key=key, etag=etag, sha256="0" * 64, size_bytes=3)
        assert finalize_queries.publish(session, batch_id, 1, [result], completed=1, failed=0, file_ttl_s=file_ttl_s)


def life_s(api: Api, file_id: str) -> int:
    with api.db.reading() as session:
        row = session.get_one(File, file_id)
        return ((row.expires_ms or 0) - row.created_ms) // 1000


def test_a_call_says_how_long_its_file_lives(api: Api) -> None:
    client = api.client()
    made = client.files.create(
        file=("a.jsonl", LINE), purpose="batch", expires_after={"anchor": "created_at", "seconds": 3_600}
    )
    assert made.expires_at == made.created_at + 3_600
    upload = client.uploads.create(
        bytes=len(LINE), filename="b.jsonl", mime_type="text/jsonl", purpose="batch",
        expires_after={"anchor": "created_at", "seconds": 7_200},
    )  # fmt: skip
    part = client.uploads.parts.create(upload.id, data=LINE)
    done = client.uploads.complete(upload.id, part_ids=[part.id])
    assert done.file is not None and life_s(api, done.file.id) == 7_200
    batch = client.batches.create(
        input_file_id=made.id, endpoint=ENDPOINT, completion_window="24h",
        output_expires_after={"anchor": "created_at", "seconds": 86_400},
    )  # fmt: skip
    end(api, batch.id)
    assert life_s(api, client.batches.retrieve(batch.id).output_file_id or "") == 86_400
    for wrong in ({"anchor": "created_at", "seconds": 3_599}, {"anchor": "ended_at", "seconds": 3_600}):
        with pytest.raises(openai.BadRequestError):
            client.files.create(file=("a.jsonl", LINE), purpose="batch", expires_after=wrong)  # type: ignore[arg-type]
        with pytest.raises(openai.BadRequestError):
            client.batches.create(
                input_file_id=made.id, endpoint=ENDPOINT, completion_window="24h", output_expires_after=wrong  # type: ignore[arg-type]
            )  # fmt: skip


def test_a_project_has_defaults_that_an_operator_sets(api: Api) -> None:
    client, path = api.client(), f"/v1/admin/projects/{api.project_id}/retention"
    assert error(api.call("GET", path), 403)["code"] == "admin_only"
    nothing = api.call("GET", path, key=api.admin_key).json()
    assert (nothing["input_seconds"], nothing["output_seconds"], nothing["updated_at"]) == (None, None, None)
    set_ = api.call("POST", path, key=api.admin_key, json={"input_seconds": 7_200, "output_seconds": 10_800}).json()
    assert "error" not in set_, set_
    assert (set_["project_id"], set_["input_seconds"], set_["output_seconds"]) == (api.project_id, 7_200, 10_800)

    uploaded = client.files.create(file=("a.jsonl", LINE), purpose="batch")
    asked = client.files.create(
        file=("a.jsonl", LINE), purpose="batch", expires_after={"anchor": "created_at", "seconds": 3_600}
    )
    upload = client.uploads.create(bytes=len(LINE), filename="b.jsonl", mime_type="text/jsonl", purpose="batch")
    part = client.uploads.parts.create(upload.id, data=LINE)
    joined = client.uploads.complete(upload.id, part_ids=[part.id]).file
    requests = [{"custom_id": "1", "body": {"model": MODEL, "messages": [{"role": "user", "content": "hi"}]}}]
    inline = api.call(
        "POST", "/v1/batches", json={"requests": requests, "endpoint": ENDPOINT, "completion_window": "24h"}
    ).json()
    with anthropic.Anthropic(base_url=api.url, api_key=api.key, max_retries=0) as other:
        params: Any = {"model": MODEL, "max_tokens": 5, "messages": [{"role": "user", "content": "hi"}]}
        message_batch = other.messages.batches.create(requests=[{"custom_id": "1", "params": params}])
        with api.db.reading() as session:
            message_input = session.get_one(Batch, message_batch.id).input_file_id
        assert joined is not None
        for file_id in (uploaded.id, joined.id, inline["input_file_id"], message_input):
            assert life_s(api, file_id) == 7_200
        assert life_s(api, asked.id) == 3_600, "a call comes first"
        for batch_id in (inline["id"], message_batch.id):
            end(api, batch_id)
        shown = client.batches.retrieve(inline["id"])
        assert life_s(api, shown.output_file_id or "") == 10_800

        _, stranger = api.new_project()
        theirs = api.client(stranger).files.create(file=("a.jsonl", LINE), purpose="batch")
        assert life_s(api, theirs.id) == api.settings.file_ttl_s
        api.call("POST", path, key=api.admin_key, json={"input_seconds": None})
        later = client.files.create(file=("a.jsonl", LINE), purpose="batch")
        assert life_s(api, later.id) == api.settings.file_ttl_s
        assert life_s(api, uploaded.id) == 7_200, "what is there keeps its life"
        assert api.call("GET", path, key=api.admin_key).json()["output_seconds"] == 10_800

        # results of the message batch are read for as long as its files live
        with api.db.transaction() as session:
            batch = session.get_one(Batch, message_batch.id)
            session.get_one(File, batch.output_file_id or "").expires_ms = 1
        assert other.messages.batches.retrieve(message_batch.id).archived_at is not None
    with api.db.reading() as session:
        rows = session.scalars(
            select(AuditRow).where(AuditRow.target_id == api.project_id, AuditRow.action == "retention.updated")
        ).all()
        assert [row.details for row in sorted(rows, key=lambda row: row.effective_ms)] == [
            {"input_seconds": 7_200, "output_seconds": 10_800},
            {"input_seconds": None},
        ]


@on_sqlite
@pytest.mark.parametrize(
    "body",
    [{}, {"input_seconds": 3_599}, {"output_seconds": 315_360_001}, {"input_seconds": "7d"}, {"seconds": 7_200}],
)
def test_a_wrong_default_is_refused(api: Api, body: dict[str, Any]) -> None:
    path = f"/v1/admin/projects/{api.project_id}/retention"
    assert error(api.call("POST", path, key=api.admin_key, json=body), 400)["message"]
    assert error(api.call("POST", "/v1/admin/projects/nobody/retention", key=api.admin_key, json=body), 400)
    missing = api.call("POST", "/v1/admin/projects/nobody/retention", key=api.admin_key, json={"input_seconds": 7_200})
    assert "no project nobody" in error(missing, 404)["message"]


def test_what_is_gone_says_so_and_on_which_day(api: Api) -> None:
    client = api.client()
    file, twin = (client.files.create(file=("a.jsonl", LINE), purpose="batch") for _ in range(2))
    running = client.batches.create(input_file_id=file.id, endpoint=ENDPOINT, completion_window="24h")
    with pytest.raises(openai.BadRequestError, match=f"{file.id} is the input of {running.id}, which hasn't ended"):
        client.files.delete(file.id)
    client.batches.cancel(running.id)
    assert client.files.delete(file.id).deleted
    said = f"The file {file.id} is gone: it was deleted on {today()}."
    for call in (client.files.retrieve, client.files.content, client.files.delete):
        with pytest.raises(openai.NotFoundError, match=said):
            call(file.id)
    assert client.files.content(twin.id).read() == LINE, "the same bytes, another file"
    with pytest.raises(
        openai.BadRequestError, match=f"{file.id} is gone: it was deleted on {today()}; upload it again"
    ):
        client.batches.create(input_file_id=file.id, endpoint=ENDPOINT, completion_window="24h")
    again = error(api.call("POST", f"/v1/batches/{running.id}/retry"), 400)
    assert again["code"] == "input_deleted" and f"deleted on {today()}" in again["message"]
    quote = error(api.call("POST", "/v1/batches/quote", json={"input_file_id": file.id, "endpoint": ENDPOINT}), 400)
    assert "is gone" in quote["message"]
    _, stranger = api.new_project()
    assert error(api.call("GET", f"/v1/files/{file.id}", stranger), 404)["message"] == f"No such File object: {file.id}"
    with api.db.reading() as session:
        assert session.get_one(Purge, (file.id, "file")).kind == "file"


def test_a_batch_is_deleted_when_it_has_ended(api: Api) -> None:
    client = api.client()
    file = client.files.create(file=("a.jsonl", LINE), purpose="batch")
    made, other = (
        client.batches.create(
            input_file_id=file.id, endpoint=ENDPOINT, completion_window="24h", metadata={"who": str(number)}
        )
        for number in range(2)
    )
    running = error(api.call("DELETE", f"/v1/batches/{made.id}"), 400)
    assert running["code"] == "batch_not_ended" and made.id in running["message"]
    end(api, made.id)
    output = client.batches.retrieve(made.id).output_file_id or ""
    assert error(api.call("DELETE", f"/v1/batches/{made.id}?input=true"), 400)["code"] == "file_in_use"
    assert client.files.retrieve(output).id == output, "what was refused has changed nothing"
    _, stranger = api.new_project()
    assert "No batch found" in error(api.call("DELETE", f"/v1/batches/{made.id}", stranger), 404)["message"]
    assert api.call("DELETE", f"/v1/batches/{made.id}").json() == {"id": made.id, "object": "batch", "deleted": True}

    said = f"{made.id} was deleted on {today()}"
    for method, path in (("GET", ""), ("DELETE", ""), ("POST", "/cancel"), ("GET", "/results"), ("POST", "/retry")):
        assert said in error(api.call(method, f"/v1/batches/{made.id}{path}"), 404)["message"], path
    with pytest.raises(openai.NotFoundError, match=f"{output} is gone: it was deleted on {today()}"):
        client.files.content(output)
    assert [row.id for row in client.batches.list()] == [other.id]
    assert client.files.retrieve(file.id).id == file.id
    for key in (api.key, api.admin_key):
        path = "/v1/admin/batches" if key == api.admin_key else "/v1/batches"
        told = api.call("GET", f"{path}/{made.id}/explanation", key).json()
        assert told["lines"]["answered"] == 1 and told["deleted_at"] is not None
        assert told["gone"] == [
            f"The batch was deleted on {today()}.",
            f"Nothing is left of its output ({output}): it was deleted on {today()}.",
        ]
    line = error(api.call("GET", f"/v1/batches/{made.id}/lines/1"), 404)
    assert line["code"] == "content_deleted" and f"deleted on {today()}" in line["message"]


def test_an_operator_deletes_what_is_somebodys_and_it_is_noted(api: Api) -> None:
    client = api.client()
    files = [client.files.create(file=("a.jsonl", LINE), purpose="batch") for _ in range(2)]
    batch = client.batches.create(input_file_id=files[0].id, endpoint=ENDPOINT, completion_window="24h")
    for object_id in (files[1].id, batch.id):
        assert error(api.call("DELETE", f"/v1/admin/content/{object_id}"), 403)["code"] == "admin_only"
    refused = api.call("DELETE", f"/v1/admin/content/{files[0].id}", api.admin_key)
    assert batch.id in error(refused, 400)["message"]
    end(api, batch.id)
    for object_id, query, kind in ((files[1].id, "", "file"), (batch.id, "?input=true", "batch")):
        gone = api.call("DELETE", f"/v1/admin/content/{object_id}{query}", api.admin_key).json()
        assert gone == {"id": object_id, "object": kind, "project_id": api.project_id, "deleted": True}
        assert error(api.call("DELETE", f"/v1/admin/content/{object_id}", api.admin_key), 404)
    with pytest.raises(openai.NotFoundError):
        client.files.retrieve(files[0].id)
    assert error(api.call("DELETE", "/v1/admin/content/file-nobody", api.admin_key), 404)
    wrong = client.files.create(file=("a.jsonl", LINE), purpose="batch")
    assert error(api.call("DELETE", f"/v1/admin/content/{wrong.id}?input=true", api.admin_key), 400)
    with api.db.reading() as session:
        rows = session.scalars(
            select(AuditRow).where(AuditRow.project_id == api.project_id, AuditRow.action == "resource.deleted")
        ).all()
        assert {(row.target_id, row.details["object"], row.details["with_input"]) for row in rows} == {
            (files[1].id, "file", False),
            (batch.id, "batch", True),
        }


def test_a_message_batch_goes_with_all_it_had_unless_it_runs(api: Api) -> None:
    with anthropic.Anthropic(base_url=api.url, api_key=api.key, max_retries=0) as client:
        params: Any = {"model": MODEL, "max_tokens": 5, "messages": [{"role": "user", "content": "hi"}]}
        made = client.messages.batches.create(requests=[{"custom_id": "1", "params": params}])
        with pytest.raises(anthropic.BadRequestError, match="hasn't ended: cancel it first"):
            client.messages.batches.delete(made.id)
        end(api, made.id)
        assert client.messages.batches.delete(made.id).type == "message_batch_deleted"
        for call in (client.messages.batches.retrieve, client.messages.batches.results, client.messages.batches.delete):
            with pytest.raises(anthropic.NotFoundError, match=f"{made.id} was deleted on {today()}"):
                call(made.id)
    with api.db.reading() as session:
        row = session.get_one(Batch, made.id)
        assert row.deleted_ms is not None
        named = {row.id: "batch", row.input_file_id: "file", row.output_file_id or "": "file"}
        assert all(session.get(Purge, (subject, kind)) is not None for subject, kind in named.items())
        assert session.get_one(Purge, (row.id, "plan"))


def test_of_a_deletion_and_a_batch_at_the_same_moment_one_is_refused_with_a_sentence(api: Api) -> None:
    client = api.client()
    for _ in range(5):
        file = client.files.create(file=("a.jsonl", LINE), purpose="batch")
        done = client.batches.create(input_file_id=file.id, endpoint=ENDPOINT, completion_window="24h")
        with api.db.transaction() as session:
            assert lifecycle.move(session, done.id, Status.CANCELLED, now_ms=1)
        body = {"input_file_id": file.id, "endpoint": ENDPOINT, "completion_window": "24h"}
        with ThreadPoolExecutor(2) as pool:
            created = pool.submit(api.call, "POST", "/v1/batches", json=body)
            deleted = pool.submit(api.call, "DELETE", f"/v1/batches/{done.id}?input=true")
            answers = [created.result(), deleted.result()]
        assert sorted(answer.status_code for answer in answers) == [200, 400]
        (refused,) = [answer.json()["error"]["message"] for answer in answers if answer.status_code == 400]
        assert "is gone" in refused or "which hasn't ended" in refused
