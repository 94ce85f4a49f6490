"""HTTP around the objects: keys on every route, one envelope for every error, ids, health, metrics."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from fastapi.routing import APIRoute
from fastapi.testclient import TestClient
from sqlalchemy import func, select
from sqlalchemy.exc import OperationalError

from batchsvc.accounts import service as accounts
from batchsvc.accounts.scopes import READ_ALL
from batchsvc.app import create_app
from batchsvc.batches import queries
from batchsvc.batches.tables import Batch
from batchsvc.settings import Settings
from tests.contract.conftest import MODEL, Api, on_sqlite
from tests.dispatchers import NullDispatcher
from tests.serving import serving

OPEN = {"/livez", "/readyz", "/metrics"}
LINE = b'{"custom_id":"1"}\n'


def routes(settings: Settings) -> Iterator[tuple[str, str]]:
    """Every (method, path template) that the application answers."""
    app: FastAPI = create_app(settings, NullDispatcher())
    for route in _flat(app.routes):
        for method in route.methods:
            yield method, route.path


def _flat(found: Any) -> Iterator[APIRoute]:
    for route in found:
        if isinstance(route, APIRoute):
            yield route
        elif hasattr(route, "effective_route_contexts"):
            yield from route.effective_route_contexts()


def envelope(answer: httpx.Response, status: int) -> dict[str, Any]:
    """The error of a response, which must be OpenAI's envelope and nothing else; of messages, Anthropic's."""
    assert answer.status_code == status, answer.text
    assert answer.headers["x-request-id"].startswith("req_")
    body = answer.json()
    assert "Traceback" not in answer.text
    if answer.request.url.path.startswith("/v1/messages"):
        assert set(body) == {"type", "error", "request_id"} and body["type"] == "error"
        assert set(body["error"]) == {"type", "message"} and body["error"]["message"]
        return dict(body["error"])
    assert set(body) == {"error"}
    assert set(body["error"]) == {"message", "type", "param", "code"}
    assert body["error"]["message"]
    return dict(body["error"])


@on_sqlite
def test_every_route_needs_a_key(api: Api) -> None:
    walked = 0
    for method, template in routes(api.settings):
        if template in OPEN:
            continue
        path = re.sub(r"\{[^}]*\}", "x", template)
        for key in (None, "sk-wrong", "sk_00000000_" + "x" * 49):
            error = envelope(api.call(method, path, key, json={"not": "judged"}), 401)
            assert error["type"] == "authentication_error"
        walked += 1
    assert walked >= 23


def test_only_the_admin_key_manages(api: Api) -> None:
    for method, path in (("GET", "/v1/admin/keys"), ("DELETE", "/v1/admin/keys/x"), ("POST", "/v1/admin/aliases")):
        assert envelope(api.call(method, path), 403)["code"] == "admin_only"
    made = api.call("POST", "/v1/admin/keys", api.admin_key, json={"name": "ci"}).json()
    assert made["project_id"] == api.project_id and not made["is_admin"]
    assert api.call("GET", "/v1/files", made["key"]).status_code == 200
    elsewhere = [
        api.call("POST", "/v1/admin/keys", api.admin_key, json={"name": "ci", "project": name}).json()["project_id"]
        for name in (f"of {api.project_id}", f"of {api.project_id}", api.project_id)
    ]
    assert elsewhere[0] == elsewhere[1] != elsewhere[2] == api.project_id, "a name is made on first use"
    envelope(api.call("POST", "/v1/admin/keys", api.admin_key, json={"name": "ci", "project": "proj_nope"}), 404)
    listed = api.call("GET", "/v1/admin/keys", api.admin_key)
    assert made["id"] in [key["id"] for key in listed.json()["data"]]
    assert made["key"] not in listed.text and "hash" not in listed.text
    revoked = api.call("DELETE", f"/v1/admin/keys/{made['id']}", api.admin_key).json()
    assert revoked["revoked_at"] is not None
    envelope(api.call("GET", "/v1/files", made["key"]), 401)
    envelope(api.call("DELETE", "/v1/admin/keys/nope", api.admin_key), 404)
    own = next(key["id"] for key in listed.json()["data"] if api.admin_key.split("_")[1] in key["id"])
    assert envelope(api.call("DELETE", f"/v1/admin/keys/{own}", api.admin_key), 400)["code"] == "key_in_use"
    assert api.call("GET", "/v1/admin/keys", api.admin_key).status_code == 200


def test_aliases_over_http(api: Api) -> None:
    def admin(method: str, path: str, **arguments: object) -> httpx.Response:
        return api.call(method, path, api.admin_key, **arguments)

    made = admin("POST", "/v1/admin/aliases", json={"name": "org/gpt-4o-mini", "target": MODEL}).json()
    assert (made["id"], made["alias_of"]) == ("org/gpt-4o-mini", MODEL)
    seen = api.call("GET", "/v1/models/org/gpt-4o-mini").json()
    assert seen["digest"] == made["digest"] and len(seen["digest"]) == 64
    assert [model["id"] for model in api.call("GET", "/v1/models").json()["data"]] == [MODEL, "org/gpt-4o-mini"]
    assert envelope(admin("POST", "/v1/admin/aliases", json={"name": "x", "target": "nope"}), 404)["param"] == "target"
    envelope(admin("POST", "/v1/admin/aliases", json={"name": MODEL, "target": MODEL}), 400)
    assert admin("DELETE", "/v1/admin/aliases/org/gpt-4o-mini").json()["deleted"]
    envelope(admin("DELETE", "/v1/admin/aliases/org/gpt-4o-mini"), 404)
    register = {"name": "second", "path": "/m", "digest": "cd" * 32, "context_tokens": 8}
    assert admin("POST", "/v1/admin/models", json=register).json()["weight_format"] == "bf16"
    assert envelope(admin("POST", "/v1/admin/models", json={**register, "digest": "x"}), 400)["param"] == "digest"


def test_errors_of_http_itself(api: Api) -> None:
    assert envelope(api.call("GET", "/v1/nope"), 404)["code"] == "unknown_url"
    envelope(api.call("GET", "/"), 404)
    envelope(api.call("GET", "/v1/files/"), 404)
    refused = api.call("PUT", "/v1/batches")
    assert envelope(refused, 405)["code"] == "method_not_allowed"
    assert envelope(api.call("POST", "/v1/batches", content=b"{nope"), 400)["code"] == "invalid_json"
    assert envelope(api.call("POST", "/v1/batches", json=[]), 400)["code"] == "invalid_json"
    assert envelope(api.call("POST", "/v1/batches", content=b"[" * 100_000), 400)
    assert envelope(api.call("POST", "/v1/batches", json={}), 400)["code"] == "missing_required_parameter"
    surrogate = b'{"input_file_id":"\\ud800","endpoint":"a","completion_window":"b"}'
    envelope(api.call("POST", "/v1/batches", content=surrogate, headers={"content-type": "application/json"}), 400)
    assert envelope(api.call("POST", "/v1/batches/quote", content=b" " * 3_000_000), 413)["code"] == "body_too_large"
    for query, param in (
        ("limit=0", "limit"),
        ("limit=101", "limit"),
        ("limit=x", "limit"),
        ("order=up", "order"),
        ("after=batch_nope", "after"),
    ):
        assert envelope(api.call("GET", f"/v1/batches?{query}"), 400)["param"] == param
    assert envelope(api.call("GET", "/v1/files?limit=10001"), 400)["param"] == "limit"
    for odd in ("/v1/batches/%00", "/v1/files/%00", "/v1/files/%ff%fe", "/v1/models/%00", "/v1/files/" + "x" * 5000):
        assert envelope(api.call("GET", odd), api.call("GET", odd).status_code)
        assert api.call("GET", odd).status_code in (400, 404)


def test_a_get_changes_nothing(api: Api) -> None:
    file = upload(api).json()
    body = {"input_file_id": file["id"], "endpoint": "/v1/chat/completions", "completion_window": "24h"}
    batch = api.call("POST", "/v1/batches", json=body).json()
    for _ in range(3):
        assert api.call("GET", f"/v1/files/{file['id']}").json() == file
        assert api.call("GET", f"/v1/batches/{batch['id']}").json() == batch


def test_health(api: Api) -> None:
    assert api.call("GET", "/livez", None).json() == {"status": "ok"}
    ready = api.call("GET", "/readyz", None)
    assert ready.status_code == 200
    assert ready.json() == {"status": "ready", "parts": {"database": "ok", "store": "ok", "redis": "ok"}}


@on_sqlite
@pytest.mark.parametrize(
    ("change", "status", "state", "part"),
    [
        ({"redis_url": "redis://127.0.0.1:9/0"}, 200, "degraded", "redis"),
        ({"s3_endpoint": "http://127.0.0.1:9"}, 503, "unready", "store"),
        ({"database_url": "sqlite:////nowhere/at/all.sqlite3"}, 503, "unready", "database"),
    ],
)
def test_health_names_the_part_that_is_down(
    api: Api, change: dict[str, str], status: int, state: str, part: str
) -> None:
    settings = api.settings.model_copy(update=change)
    with serving(settings, NullDispatcher()) as url:
        answer = httpx.get(f"{url}/readyz", trust_env=False, timeout=60)
        assert answer.status_code == status
        assert answer.json()["status"] == state
        assert {name for name, says in answer.json()["parts"].items() if says != "ok"} == {part}
        assert api.settings.s3_secret_key not in answer.text
        assert httpx.get(f"{url}/livez", trust_env=False).status_code == 200
        if part == "database":
            call = httpx.get(f"{url}/v1/files", headers={"Authorization": f"Bearer {api.key}"}, trust_env=False)
            assert envelope(call, 503)["code"] == "database_unavailable"
        if part == "store":
            files = {"file": ("a.jsonl", LINE)}
            call = httpx.post(
                f"{url}/v1/files",
                headers={"Authorization": f"Bearer {api.key}"},
                files=files,
                data={"purpose": "batch"},
                trust_env=False,
                timeout=60,
            )
            assert envelope(call, 503)["code"] == "store_unavailable"


def test_metrics(api: Api) -> None:
    file = upload(api).json()["id"]
    body = {"input_file_id": file, "endpoint": "/v1/chat/completions", "completion_window": "24h"}
    api.call("POST", "/v1/batches", json=body)
    text = api.call("GET", "/metrics", None).text  # no key from this machine
    counts = {line.split()[0]: float(line.split()[1]) for line in text.splitlines() if not line.startswith("#")}
    with api.db.reading() as session:
        rows = dict(session.execute(select(Batch.status, func.count()).group_by(Batch.status)).tuples().all())
    assert counts['batchsvc_batches{status="validating"}'] == rows["validating"] >= 1
    for status in ("in_progress", "finalizing", "completed", "failed", "expired", "cancelled"):
        assert counts[f'batchsvc_batches{{status="{status}"}}'] == rows.get(status, 0)


def test_metrics_need_a_key_from_here_too_where_a_proxy_may_ask(api: Api) -> None:
    """One that sends no X-Forwarded-For looks like this machine."""
    settings = api.settings.model_copy(update={"public_url": "https://batch.example.com"})
    here = TestClient(create_app(settings, NullDispatcher()), client=("127.0.0.1", 50_000))
    assert envelope(here.get("/metrics"), 401)
    assert here.get("/metrics", headers={"Authorization": f"Bearer {api.admin_key}"}).status_code == 200


def test_metrics_need_an_admin_key_from_elsewhere(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also while the database is away: then one that was good before is taken, so that somebody is told."""

    def away(*_: object) -> None:
        raise OperationalError("select", {}, Exception("away"))

    elsewhere = TestClient(create_app(api.settings, NullDispatcher()), client=("192.0.2.7", 50_000))
    assert envelope(elsewhere.get("/metrics"), 401)
    with api.db.transaction() as session:
        project_id = accounts.create_project(session, "operations").id
        row, admin = accounts.create_key(session, project_id, "scraper", is_admin=True)
        row.scopes = [READ_ALL]
        _, tenant = accounts.create_key(session, project_id, "tenant")
    answer = elsewhere.get("/metrics", headers={"Authorization": f"Bearer {tenant}"})
    assert envelope(answer, 403)["code"] == "admin_only", "it tells of all tenants"
    assert elsewhere.get("/metrics", headers={"Authorization": f"Bearer {admin}"}).status_code == 200
    monkeypatch.setattr(accounts, "caller", away)
    monkeypatch.setattr(queries, "probe_write", away)
    for _ in range(2):
        shown = elsewhere.get("/metrics", headers={"Authorization": f"Bearer {admin}"})
        assert shown.status_code == 200 and 'batchsvc_part_up{part="database"} 0.0' in shown.text
    assert envelope(elsewhere.get("/metrics", headers={"Authorization": f"Bearer {tenant}"}), 503)


def test_a_bug_is_a_500_that_tells_nothing(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    """Something that nobody foresaw: the answer has the request's id, neither the message nor the place."""

    def broken(*_arguments: object) -> None:
        raise RuntimeError("a secret in a message")

    monkeypatch.setattr("batchsvc.files.routes.file_object", broken)
    made = upload(api)
    error = envelope(made, 500)
    assert error["code"] == "internal_error"
    assert made.headers["x-request-id"] in error["message"]
    assert "secret" not in made.text and "RuntimeError" not in made.text and ".py" not in made.text


@on_sqlite
def test_logs_hold_no_key_and_no_body(api: Api) -> None:
    """A process of its own, because its logs are what it writes: planted words must not be in them."""
    script = """
import sys, threading, time, httpx
from batchsvc import logs
from batchsvc.settings import Settings
from tests.dispatchers import NullDispatcher
logs.configure("debug")
from tests.serving import serving
settings = Settings.from_env()
with serving(settings, NullDispatcher()) as url:
    auth = {"Authorization": "Bearer " + sys.argv[1]}
    call = dict(headers=auth, trust_env=False, timeout=60)
    files = {"file": ("canary-name.jsonl", b"canary-content")}
    httpx.post(url + "/v1/files", files=files, data={"purpose": "batch"}, **call)
    httpx.post(url + "/v1/batches", json={"metadata": {"x": "canary-metadata"}, "input_file_id": "canary-id"}, **call)
    httpx.get(url + "/v1/files?after=canary-after", **call)
    httpx.get(url + "/v1/files", headers={"Authorization": "Bearer canary-key"}, trust_env=False)
print("served", file=sys.stderr)
"""
    s = api.settings
    env = {
        "DATABASE_URL": s.database_url,
        "REDIS_URL": s.redis_url,
        "AWS_ENDPOINT_URL_S3": str(s.s3_endpoint),
        "AWS_ACCESS_KEY_ID": str(s.s3_access_key),
        "AWS_SECRET_ACCESS_KEY": str(s.s3_secret_key),
        "BATCHSVC_BUCKET": s.bucket,
        "PATH": "",
    }
    done = subprocess.run([sys.executable, "-c", script, api.key], env=env, capture_output=True, text=True, timeout=120)
    assert done.stderr.rstrip().endswith("served"), done.stderr
    events = [json.loads(line) for line in done.stderr.splitlines() if line.startswith("{")]
    assert [event["status"] for event in events if event["event"] == "request.served"] == [200, 400, 400, 401]
    assert "canary" not in done.stderr
    for secret in (api.key, str(s.s3_secret_key), s.redis_url.split("@")[0]):
        assert secret not in done.stderr


def upload(api: Api, key: str = "") -> httpx.Response:
    return api.call("POST", "/v1/files", key, files={"file": ("in.jsonl", LINE)}, data={"purpose": "batch"})


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("keys", rb'{"name": "x", "project": "\ud800"}'),
        ("aliases", rb'{"name": "x", "target": "\ud800"}'),
        ("projects/%s/topups", rb'{"amount": 1, "reason": "x", "key": "x", "batch_id": "\ud800"}'),
        ("projects/%s/topups", rb'{"amount": 1, "reason": "x", "key": "x", "batch_id": "\u0000"}'),
    ],
)
def test_text_that_can_not_be_stored_is_refused(api: Api, path: str, body: bytes) -> None:
    path = path.replace("%s", api.project_id)
    headers = {"content-type": "application/json"}
    answer = api.call("POST", f"/v1/admin/{path}", api.admin_key, content=body, headers=headers)
    assert answer.status_code in (400, 404) and envelope(answer, answer.status_code)["message"]
