"""Scopes cover what their names say; what no scope covers is closed to restricted keys, whoever adds a route."""

from __future__ import annotations

import pytest
from fastapi import FastAPI

from batchsvc.accounts import scopes
from batchsvc.app import create_app
from batchsvc.errors import InvalidRequestError
from batchsvc.http.description import describe
from batchsvc.settings import Settings

ADMIN = ("/v1/admin/", "/v1/organization/projects", "/v1/organization/admin_api_keys", "/v1/organization/audit_logs")
NEED_NO_KEY = ("/livez", "/readyz", "/metrics")


@pytest.fixture(scope="module")
def app() -> FastAPI:
    """The whole API; no test here calls it."""
    return create_app(
        Settings.from_env({"DATABASE_URL": "sqlite:///unused.sqlite3", "REDIS_URL": "redis://127.0.0.1:1/0"})
    )


def test_every_route_has_an_area_or_is_for_operators(app: FastAPI) -> None:
    """A route without an area would be closed to every restricted key: name it in scopes.py."""
    paths = set(describe(app)["paths"]) - set(NEED_NO_KEY)
    assert len(paths) > 50
    lost = {path for path in paths if not path.startswith(ADMIN) and scopes.area_of(path) is None}
    assert not lost
    assert not {path for path in paths if path.startswith(ADMIN) and scopes.area_of(path) is not None}


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        ([], None),
        (["read-only"], ["api.all.read"]),
        (["files", "files:write"], ["api.files.write"]),
        (["usage:read", "api.calls.write"], ["api.calls.write", "api.usage.read"]),
    ],
)
def test_scopes_have_one_spelling(given: list[str], kept: list[str] | None) -> None:
    assert scopes.parse(given) == kept


@pytest.mark.parametrize("text", ["", "all", "api.all.write", "files:delete", "api.admin.read", "FILES"])
def test_an_unknown_scope_is_refused(text: str) -> None:
    with pytest.raises(InvalidRequestError, match="no scope"):
        scopes.parse([text])


@pytest.mark.parametrize(
    ("scope", "method", "path", "may"),
    [
        ("api.all.read", "GET", "/v1/files", True),
        ("api.all.read", "GET", "/v1/admin/keys", True),  # of an admin key; others are refused there anyway
        ("api.all.read", "POST", "/v1/files", False),
        ("api.files.read", "GET", "/v1/files/file-1/content", True),
        ("api.files.read", "DELETE", "/v1/files/file-1", False),
        ("api.files.write", "DELETE", "/v1/files/file-1", True),
        ("api.files.write", "POST", "/v1/uploads/upload_1/parts", True),
        ("api.files.write", "GET", "/v1/filesystem", False),
        ("api.files.write", "GET", "/v1/batches", False),
        ("api.batches.read", "GET", "/v1/batches/batch_1/results", True),
        ("api.batches.write", "POST", "/v1/messages/batches", True),
        ("api.batches.write", "POST", "/v1/messages", False),
        ("api.calls.write", "POST", "/v1/messages/batches", False),
        ("api.calls.write", "POST", "/v1/chat/completions", True),
        ("api.usage.read", "GET", "/v1/organization/costs", True),
        ("api.usage.write", "GET", "/v1/organization/projects", False),
        ("api.models.read", "GET", "/v1/models/hf:a/b", True),
        ("api.models.write", "POST", "/v1/admin/models", False),
        ("api.webhooks.write", "POST", "/v1/webhook_endpoints/we_1/test", True),
        ("api.webhooks.write", "GET", "/openapi.json", False),
    ],
)
def test_a_scope_covers_its_area_alone(scope: str, method: str, path: str, may: bool) -> None:
    assert scopes.allows([scope], method, path) == may
    assert scopes.allows(None, method, path)
