"""An operator's verbs over HTTP: only with the admin key, as the commands do them, and audited under the key's name."""

from __future__ import annotations

from typing import Any

import pytest
from sqlalchemy import delete, select, update
from sqlalchemy.orm import Session

from batchsvc.audit.tables import AuditRow
from batchsvc.batches import models, worker_queries
from batchsvc.batches.tables import Batch, Model
from batchsvc.batches.worker_queries import Place
from batchsvc.cli.client import Client
from batchsvc.cli.exits import ApiError
from batchsvc.cli.incidents import DatabaseIncidents, HttpIncidents
from batchsvc.errors import InvalidRequestError
from tests.contract.conftest import DIGEST, MODEL, Api, on_sqlite
from tests.contract.test_http import upload

CALLS = [
    ("GET", "/v1/admin/workers", None),
    ("POST", "/v1/admin/workers/w/drain", {}),
    ("POST", "/v1/admin/workers/w/undrain", {}),
    ("GET", "/v1/admin/claims", None),
    ("POST", "/v1/admin/claims/pause", {}),
    ("POST", "/v1/admin/claims/resume", {}),
    ("GET", "/v1/admin/batches/stuck", None),
    ("GET", "/v1/admin/batches/b/why", None),
    ("POST", "/v1/admin/batches/b/pause", {}),
    ("POST", "/v1/admin/batches/b/resume", {}),
    ("GET", "/v1/admin/quarantine", None),
    ("POST", "/v1/admin/quarantine/b/release", {}),
    ("GET", "/v1/admin/models/served_by", None),
    ("POST", "/v1/admin/models/load", {"model": MODEL}),
    ("POST", "/v1/admin/models/unload", {"model": MODEL}),
]


@pytest.mark.parametrize(("method", "path", "body"), CALLS, ids=lambda value: str(value))
def test_a_projects_key_may_none_of_it(sqlite_api: Api, method: str, path: str, body: Any) -> None:
    with sqlite_api.db.transaction() as session:
        from batchsvc.accounts import service as accounts

        key = accounts.create_key(session, accounts.create_project(session, "test").id, "test")[1]
    answer = sqlite_api.call(method, path, key, json=body)
    assert answer.status_code == 403, answer.text


def test_both_twins_do_the_same(api: Api) -> None:
    """Each verb over HTTP, its counterpart in the database, so that either ends what the other began."""
    api.db.run(lambda s: worker_queries.register(s, "host:1:a", DIGEST, Place(name="gpu-1", models=(DIGEST,))))
    file_id = upload(api).json()["id"]
    body = {"input_file_id": file_id, "endpoint": "/v1/chat/completions", "completion_window": "24h"}
    batch_id = api.call("POST", "/v1/batches", json=body).json()["id"]
    with Client(f"{api.url}/v1", api.admin_key, is_local=True) as client:
        http, database = HttpIncidents(client), DatabaseIncidents(api.db)
        assert http.drain("gpu-1", "hot")["data"][0]["state"] == "drained"
        assert database.workers()["data"][0]["drain_reason"] == http.workers()["data"][0]["drain_reason"] == "hot"
        assert database.undrain("gpu-1")["data"][0]["drain_reason"] is None
        assert database.pause_claims(MODEL, "slow") == http.claims()
        assert http.resume_claims(MODEL)["data"] == database.claims()["data"] == []
        assert http.pause_batch(batch_id, "odd")["pause_reason"] == "odd"
        assert database.resume_batch(batch_id)["pause_reason"] is None
        assert http.why(batch_id, 600)["status"] == database.why(batch_id, 600)["status"] == "validating"
        assert http.why(batch_id, 600)["errors"] == {} and http.why(batch_id, 600)["output_s3"] is None
        assert http.stuck(600)["data"] == database.stuck(600)["data"]
        assert http.quarantine(batch_id) == database.quarantine(batch_id) == {"object": "list", "data": []}
        with pytest.raises(ApiError, match=r"Nothing of batch_.* is in quarantine"):
            http.release(batch_id, [])
        with pytest.raises(ApiError, match=r"Line 3 of batch_.* isn't in quarantine"):
            http.release(batch_id, [3])
        assert http.load_model(MODEL, "gpu-1")["served_by"] == ["gpu-1"] == database.served_by()[DIGEST]
        with pytest.raises(ApiError, match="is the only model of the worker gpu-1"):
            http.unload_model(MODEL, None)
    key = next(row["id"] for row in _audited(api) if row["action"] == "worker.drained")
    rows = {row["action"]: row["id"] for row in _audited(api)}
    assert rows["batch.paused"] == rows["claims.resumed"] == rows["model.loaded"] == key
    assert {rows["worker.undrained"], rows["claims.paused"], rows["batch.resumed"]} != {key}
    api.db.run(lambda s: worker_queries.retire(s, "host:1:a"))


@on_sqlite
def test_a_reason_that_holds_a_key_is_refused_in_one_sentence(api: Api) -> None:
    """The audit log would keep it for ever."""
    api.db.run(lambda s: worker_queries.register(s, "host:1:s", DIGEST, Place(name="gpu-s", models=(DIGEST,))))
    reason = {"reason": f"stolen: {api.key}"}
    refused = api.call("POST", "/v1/admin/workers/gpu-s/drain", api.admin_key, json=reason)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "reason"), refused.text
    assert api.key not in refused.text
    with pytest.raises(InvalidRequestError, match="reason holds a secret"):
        DatabaseIncidents(api.db).drain("gpu-s", reason["reason"])
    row = next(row for row in DatabaseIncidents(api.db).workers()["data"] if row["id"] == "host:1:s")
    assert row["drain_reason"] is None and row["state"] != "drained"
    api.db.run(lambda s: worker_queries.retire(s, "host:1:s"))


def test_tenants_read_no_names_and_no_reasons_of_others(api: Api) -> None:
    """Whose turn a batch waits for, and why a worker is drained, is for operators: neither another project's own model
    nor a worker is named to a tenant."""
    project, key = api.new_project()
    secret = "cd" * 32
    place = Place(name="gpu-secret", models=(secret, DIGEST))

    def begin(session: Session) -> None:
        models.register(session, "ft-secret", "/s", digest=secret, context_tokens=64, project_id=project)
        worker_queries.register(session, "host:7:a", secret, place)
        worker_queries.beat(session, "host:7:a", secret, is_draining=False, stats={}, place=place)

    api.db.run(begin)
    file_id = upload(api).json()["id"]
    body = {"input_file_id": file_id, "endpoint": "/v1/chat/completions", "completion_window": "24h"}
    batch_id = api.call("POST", "/v1/batches", json=body).json()["id"]
    pinned = {"status": "in_progress", "model_id": MODEL, "model_digest": DIGEST, "in_progress_ms": 1}
    api.db.run(lambda s: s.execute(update(Batch).where(Batch.id == batch_id).values(pinned)))
    try:
        shown = api.call("GET", f"/v1/batches/{batch_id}")
        assert shown.json()["waiting_for"] == "its turn: a worker serves another model now"
        why = api.call("GET", f"/v1/admin/batches/{batch_id}/why", api.admin_key).json()["reason"]
        assert "gpu-secret serves ft-secret now" in why
        api.call("POST", "/v1/admin/workers/gpu-secret/drain", api.admin_key, json={"reason": "a theft"})
        told = [shown, api.call("GET", f"/v1/batches/{batch_id}"), api.call("GET", "/v1/models")]
        assert not [answer.text for answer in told if "secret" in answer.text or "theft" in answer.text]
        assert "theft" not in api.call("GET", "/v1/models", key).text
        (worker,) = api.call("GET", "/v1/admin/workers", api.admin_key).json()["data"]
        assert worker["note"] == (
            "The worker gpu-secret is drained (a theft): `batchsvc workers undrain gpu-secret` ends that."
        )
    finally:
        api.call("POST", "/v1/admin/workers/gpu-secret/undrain", api.admin_key, json={})
        api.db.run(lambda s: worker_queries.retire(s, "host:7:a"))
        api.db.run(lambda s: s.execute(delete(Model).where(Model.id == "ft-secret")))


def _audited(api: Api) -> list[dict[str, str]]:
    with api.db.reading() as session:
        rows = session.scalars(select(AuditRow).order_by(AuditRow.effective_ms)).all()
        return [{"action": row.action, "id": row.actor_id} for row in rows]


@pytest.mark.parametrize(
    ("path", "body", "says"),
    [
        ("/v1/admin/workers/nobody/drain", {}, "There is no worker nobody"),
        ("/v1/admin/workers/%00/drain", {}, ""),
        ("/v1/admin/workers/gpu/drain", {"reason": "x" * 256}, "at most 255 characters"),
        ("/v1/admin/claims/pause", {"model": "nope"}, "There is no model nope"),
        ("/v1/admin/claims/pause", {"reason": "a\u0000b"}, "printable"),
        ("/v1/admin/claims/pause", {"modle": "x"}, "modle"),
        ("/v1/admin/claims/resume", {}, "aren't paused"),
        ("/v1/admin/batches/batch_nope/pause", {}, "There is no batch batch_nope"),
        ("/v1/admin/quarantine/batch_nope/release", {"lines": [0]}, "lines"),
        ("/v1/admin/models/load", {"model": MODEL, "worker": "a\u0000"}, ""),
        ("/v1/admin/models/load", {"model": "\u0000"}, "There is no model"),
    ],
)
def test_bad_calls_say_what_is_wrong(api: Api, path: str, body: dict[str, Any], says: str) -> None:
    answer = api.call("POST", path, api.admin_key, json=body)
    assert answer.status_code in (400, 404), answer.text
    assert says in answer.json()["error"]["message"]
