"""Changes to prices, money, invoices, stores, models and limits each leave one audit row, and no secret."""

from __future__ import annotations

from typing import Any

from sqlalchemy import text

from batchsvc.db.session import Database
from tests.contract.conftest import DIGEST, MODEL, Api, on_sqlite

SECRET = "tenant-secret-0123456789abcdef"
BUYER = {"name": "Buyer Inc", "address": "1 Road", "country": "US", "currency": "USD"}


def rows(api: Api, **filters: Any) -> list[dict[str, Any]]:
    answer = api.call("GET", "/v1/organization/audit_logs", api.admin_key, params={"limit": 100, **filters})
    assert answer.status_code == 200, answer.text
    return list(answer.json()["data"])


def change(api: Api, path: str, body: dict[str, Any], *, method: str = "POST") -> dict[str, Any]:
    answer = api.call(method, path, api.admin_key, json=body)
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


def mine(api: Api, since: set[str]) -> list[dict[str, Any]]:
    """Rows that weren't there before, oldest first; other tests use the same server, one after another."""
    return [row for row in reversed(rows(api)) if row["id"] not in since]


def test_each_kind_of_change_leaves_its_row(api: Api) -> None:
    before = {row["id"] for row in rows(api)}
    project = f"/v1/admin/projects/{api.project_id}"
    change(api, project, {"weight": 2, "budget_nanos": 5_000_000_000})
    change(api, project, {"requests_per_minute": 600})
    book = {"model": "audited", "tier": "standard", "input": 1, "cached_input": 1, "output": 2}
    version = change(api, "/v1/admin/prices/rows", book)["version"]
    whole = api.call("GET", f"/v1/admin/prices/{version}", api.admin_key).json()["models"]  # others go on with it
    x = {"standard": {"input": 1, "cached_input": 1, "output": 1}}
    imported = change(api, "/v1/admin/prices", {"models": {**whole, "x": x}})
    again = {"version": imported["version"], "models": imported["models"]}
    change(api, "/v1/admin/prices", again)  # changes nothing
    topup = {"amount": "12.50", "reason": "prepayment", "key": "t1"}
    change(api, f"{project}/topups", topup)
    change(api, f"{project}/topups", topup)  # changes nothing
    change(api, f"{project}/party", BUYER)
    store = {
        "project": api.project_id,
        "uri": "s3://audited-bucket/in/",
        "endpoint": None,
        "region": "us-east-1",
        "access_key": "AKTENANT",
        "secret_key": SECRET,
    }
    stored = change(api, "/v1/admin/stores", store)
    change(api, f"/v1/admin/stores/{stored['id']}", {}, method="DELETE")
    change(api, "/v1/admin/aliases", {"name": "audited-alias", "target": MODEL})
    change(api, "/v1/admin/aliases/audited-alias", {}, method="DELETE")
    found = mine(api, before)
    assert [row["type"] for row in found] == [
        "project.updated",
        "rate_limit.updated",
        "prices.installed",
        "prices.installed",
        "topup.posted",
        "party.updated",
        "external_storage.registered",
        "external_storage.removed",
        "model.aliased",
        "model.aliased",
    ]
    by_type = {row["type"]: row[row["type"]] for row in found}
    assert by_type["project.updated"]["changes_requested"] == {"weight": 2, "budget_nanos": 5_000_000_000}
    assert found[2]["prices.installed"]["id"] == f"price_book_{version}"
    assert by_type["topup.posted"]["amount_nanos"] == 12_500_000_000
    assert by_type["external_storage.registered"]["data"]["uri"] == "s3://audited-bucket/in/"
    assert {row["actor"]["api_key"]["id"] for row in found} == {api.admin_key[3:11]}
    assert SECRET not in str(found) and "Buyer Inc" not in str(found)
    assert [row["id"] for row in rows(api, **{"project_ids[]": api.project_id, "event_types[]": "topup.posted"})] == [
        found[4]["id"]
    ]


@on_sqlite
def test_a_refused_change_leaves_nothing(api: Api) -> None:
    before = {row["id"] for row in rows(api)}
    for path, body in (
        ("/v1/admin/projects/nobody", {"weight": 2}),
        ("/v1/admin/aliases", {"name": "a", "target": "no-such-model"}),
        (f"/v1/admin/projects/{api.project_id}/refunds", {"amount": "1", "reason": "r", "key": "k"}),
    ):
        assert api.call("POST", path, api.admin_key, json=body).status_code in (400, 404)
    assert not mine(api, before)


@on_sqlite
def test_a_row_and_its_change_are_one_transaction(api: Api) -> None:
    """The same, seen from the database: where the row can't be written, the change isn't made."""
    db = Database(api.settings.database_url)
    with db.transaction() as session:
        session.execute(
            text("CREATE TRIGGER no_more BEFORE INSERT ON audit_log BEGIN SELECT RAISE(ABORT, 'full'); END")
        )
    try:
        answer = api.call("POST", f"/v1/admin/projects/{api.project_id}", api.admin_key, json={"weight": 9})
        assert answer.status_code >= 500
    finally:
        with db.transaction() as session:
            session.execute(text("DROP TRIGGER no_more"))
    listed = api.call("GET", "/v1/admin/projects", api.admin_key).json()["data"]
    assert [row["weight"] for row in listed if row["id"] == api.project_id] == [1]
    db.dispose()


@on_sqlite
def test_a_registered_model_is_told_of(api: Api) -> None:
    before = {row["id"] for row in rows(api)}
    body = {"name": "audited-model", "path": "/models/x", "digest": DIGEST, "context_tokens": 64}
    change(api, "/v1/admin/models", body)
    assert [row["type"] for row in mine(api, before)] == ["model.registered"]
