"""Projects, keys, service accounts, limits and the audit log through the official client's `admin.organization`."""

from __future__ import annotations

import openai
import pytest

from batchsvc.accounts import service as accounts
from batchsvc.accounts.organization_schemas import UNLIMITED
from batchsvc.accounts.tables import ApiKey, ServiceAccount
from batchsvc.db.session import database_now_ms
from tests.contract.conftest import Api, on_sqlite


@pytest.fixture
def admin(api: Api):
    return openai.OpenAI(base_url=f"{api.url}/v1", api_key=api.admin_key, admin_api_key=api.admin_key, max_retries=0)


def asks(api: Api, key: str) -> int:
    """The status of a call that every key may make."""
    return api.call("GET", "/v1/models", key).status_code


def test_a_project_lives_from_create_to_archive(api: Api, admin: openai.OpenAI) -> None:
    projects = admin.admin.organization.projects
    made = projects.create(name="night owls")
    assert (made.object, made.name, made.status, made.archived_at) == (
        "organization.project",
        "night owls",
        "active",
        None,
    )
    assert projects.retrieve(made.id) == made
    assert projects.update(made.id, name="day owls").name == "day owls"
    account = projects.service_accounts.create(made.id, name="exporter")
    assert account.api_key is not None and asks(api, account.api_key.value) == 200
    ended = projects.archive(made.id)
    assert ended.status == "archived" and ended.archived_at is not None
    assert projects.archive(made.id) == ended
    refused = api.call("GET", "/v1/models", account.api_key.value)
    assert (refused.status_code, refused.json()["error"]["code"]) == (403, "project_archived")
    for change in (
        lambda: projects.update(made.id, name="x"),
        lambda: projects.service_accounts.create(made.id, name="x"),
        lambda: projects.rate_limits.update_rate_limit(
            "rl-all-models", project_id=made.id, max_requests_per_1_minute=1
        ),
    ):
        with pytest.raises(openai.BadRequestError, match="archived"):
            change()
    assert made.id not in {project.id for project in projects.list(limit=100)}
    assert made.id in {project.id for project in projects.list(limit=2, include_archived=True)}, "over several pages"


def test_an_archived_project_takes_its_test_keys_with_it(api: Api, admin: openai.OpenAI) -> None:
    projects = admin.admin.organization.projects
    made = projects.create(name="ends")
    answer = api.call(
        "POST", "/v1/admin/keys", api.admin_key, json={"name": "t", "project": made.id, "is_test": True}
    ).json()
    assert answer["key"].startswith("sk_test_") and asks(api, answer["key"]) == 200
    projects.archive(made.id)
    refused = api.call("GET", "/v1/models", answer["key"])
    assert (refused.status_code, refused.json()["error"]["code"]) == (403, "project_archived")
    twin = {"name": "t", "project": answer["project_id"]}
    assert api.call("POST", "/v1/admin/keys", api.admin_key, json=twin).status_code == 400, "nor gets it new ones"
    rotated = api.call("POST", f"/v1/admin/keys/{answer['id']}/rotate", api.admin_key, json={})
    assert (rotated.status_code, rotated.json()["error"]["code"]) == (400, "project_archived")


@on_sqlite
def test_a_project_with_an_admin_key_is_not_archived(api: Api, admin: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="admin key"):
        admin.admin.organization.projects.archive(api.project_id)
    assert asks(api, api.key) == 200
    with pytest.raises(openai.NotFoundError):
        admin.admin.organization.projects.archive("proj_nobody")


def test_service_accounts_own_keys_that_end_with_them(api: Api, admin: openai.OpenAI) -> None:
    accounts_api = admin.admin.organization.projects.service_accounts
    keys_api = admin.admin.organization.projects.api_keys
    made = accounts_api.create(api.project_id, name="loader", expires_in_seconds=3600)
    assert made.role == "member" and made.api_key is not None
    key = made.api_key
    assert key.expires_at == pytest.approx(key.created_at + 3600, abs=2)
    second = accounts_api.api_keys.create(made.id, project_id=api.project_id, name="second", scopes=["api.files.read"])
    assert asks(api, key.value) == 200
    shown = keys_api.retrieve(second.id, project_id=api.project_id)
    assert shown.owner.service_account is not None and shown.owner.service_account.id == made.id
    assert shown.redacted_value == f"sk_{second.id}_***" and second.value not in shown.to_json()
    assert {row.id for row in keys_api.list(api.project_id)} >= {key.id, second.id}
    renamed = accounts_api.update(made.id, project_id=api.project_id, name="unloader", role="owner")
    assert (renamed.name, renamed.role) == ("unloader", "owner")
    assert accounts_api.retrieve(made.id, project_id=api.project_id) == renamed
    assert accounts_api.delete(made.id, project_id=api.project_id).deleted
    assert asks(api, key.value) == asks(api, second.value) == 401
    assert not {row.id for row in keys_api.list(api.project_id)} & {key.id, second.id}
    assert made.id not in {row.id for row in accounts_api.list(api.project_id)}
    with pytest.raises(openai.NotFoundError):
        accounts_api.retrieve(made.id, project_id=api.project_id)


@on_sqlite
def test_a_key_of_a_deleted_service_account_is_refused_even_if_it_was_not_revoked(
    api: Api, admin: openai.OpenAI
) -> None:
    made = admin.admin.organization.projects.service_accounts.create(api.project_id, name="leaver")
    assert made.api_key is not None and asks(api, made.api_key.value) == 200
    with api.db.transaction() as session:
        session.get_one(ServiceAccount, made.id).deleted_ms = 1
    assert asks(api, made.api_key.value) == 401
    rotated = api.call("POST", f"/v1/admin/keys/{made.api_key.id}/rotate", api.admin_key, json={})
    assert rotated.status_code == 404, rotated.text


@on_sqlite
def test_a_service_account_alone_has_no_key(api: Api, admin: openai.OpenAI) -> None:
    accounts_api = admin.admin.organization.projects.service_accounts
    made = accounts_api.create(api.project_id, name="alone", create_service_account_only=True)
    assert (made.role, made.api_key) == ("none", None)
    with pytest.raises(openai.BadRequestError, match="role none"):
        accounts_api.api_keys.create(made.id, project_id=api.project_id)
    with pytest.raises(openai.BadRequestError, match="expires_in_seconds"):
        accounts_api.create(api.project_id, name="x", create_service_account_only=True, expires_in_seconds=60)


def test_a_key_is_restricted_expires_and_is_deleted(api: Api, admin: openai.OpenAI) -> None:
    keys_api = admin.admin.organization.projects.api_keys
    with api.db.transaction() as session:
        row, text = accounts.create_key(session, api.project_id, "restricted")
    read_only = keys_api.update(row.id, project_id=api.project_id, scopes=["api.all.read"])
    assert read_only.model_dump()["scopes"] == ["api.all.read"]
    assert api.call("GET", "/v1/batches", text).status_code == 200
    refused = api.call("POST", "/v1/batches", text, json={})
    assert (refused.status_code, refused.json()["error"]["code"]) == (403, "insufficient_scope")
    keys_api.update(row.id, project_id=api.project_id, scopes=["api.batches.write"])
    assert api.call("POST", "/v1/batches", text, json={}).status_code == 400
    assert api.call("GET", "/v1/files", text).status_code == 403
    keys_api.update(row.id, project_id=api.project_id, scopes=[])
    assert api.call("GET", "/v1/files", text).status_code == 200
    with pytest.raises(openai.BadRequestError, match="no scope"):
        keys_api.update(row.id, project_id=api.project_id, scopes=["api.everything.write"])
    assert keys_api.update(row.id, project_id=api.project_id, expires_in_seconds=60).expires_at is not None
    assert asks(api, text) == 200
    with api.db.transaction() as session:
        session.get_one(ApiKey, row.id).expires_ms = database_now_ms(session) - 1
    expired = api.call("GET", "/v1/models", text)
    assert (expired.status_code, expired.json()["error"]["code"]) == (401, "expired_api_key")
    with pytest.raises(openai.BadRequestError, match="expired"):
        keys_api.update(row.id, project_id=api.project_id, expires_in_seconds=60)
    assert keys_api.delete(row.id, project_id=api.project_id).deleted
    with pytest.raises(openai.NotFoundError):
        keys_api.retrieve(row.id, project_id=api.project_id)


@on_sqlite
@pytest.mark.parametrize("host", ["x/v1/files?", "x/v1/files#", "[", "x:y"])
def test_scopes_are_checked_on_the_path_alone(api: Api, host: str) -> None:
    with api.db.transaction() as session:
        row, text = accounts.create_key(session, api.project_id, "restricted")
        row.scopes = ["api.files.read"]
    assert api.call("GET", "/v1/files", text, headers={"Host": host}).status_code == 200
    assert api.call("GET", "/v1/batches", text, headers={"Host": host}).status_code == 403


@on_sqlite
def test_keys_of_another_project_and_admin_keys_are_not_found_there(api: Api, admin: openai.OpenAI) -> None:
    keys_api = admin.admin.organization.projects.api_keys
    other, _ = api.new_project()
    mine = keys_api.list(api.project_id).data[0].id
    admin_id = admin.admin.organization.admin_api_keys.list(limit=1).data[0].id
    for project, key in ((other, mine), (api.project_id, admin_id)):
        for call in (keys_api.retrieve, keys_api.update, keys_api.delete):
            with pytest.raises(openai.NotFoundError):
                call(key, project_id=project)


def test_admin_keys_are_made_listed_and_deleted(api: Api, admin: openai.OpenAI) -> None:
    keys_api = admin.admin.organization.admin_api_keys
    made = keys_api.create(name="second operator", expires_in_seconds=600)
    assert made.object == "organization.admin_api_key" and made.expires_at is not None
    assert made.owner.id == api.project_id
    assert keys_api.retrieve(made.id).redacted_value == f"sk_{made.id}_***"
    walked = [row.id for row in keys_api.list(limit=1, order="asc")]
    assert made.id in walked and len(walked) == len(set(walked)) >= 2, "one a page"
    second = openai.OpenAI(base_url=f"{api.url}/v1", api_key="unused", admin_api_key=made.value, max_retries=0)
    with pytest.raises(openai.BadRequestError, match="another admin key"):
        second.admin.organization.admin_api_keys.delete(made.id)
    assert keys_api.delete(made.id).deleted
    with pytest.raises(openai.AuthenticationError):
        second.admin.organization.admin_api_keys.list()


@on_sqlite
def test_an_admin_key_that_reads_changes_nothing(api: Api, admin: openai.OpenAI) -> None:
    """For who looks things up: it sees all projects and changes none."""
    made = admin.admin.organization.admin_api_keys.create(name="auditor", extra_body={"scopes": ["api.all.read"]})
    auditor = openai.OpenAI(base_url=f"{api.url}/v1", api_key="unused", admin_api_key=made.value, max_retries=0)
    assert auditor.admin.organization.audit_logs.list().data
    with pytest.raises(openai.PermissionDeniedError):
        auditor.admin.organization.projects.create(name="x")
    with pytest.raises(openai.BadRequestError, match="unrestricted"):
        admin.admin.organization.admin_api_keys.create(name="x", extra_body={"scopes": ["files"]})


def test_limits_of_a_project_are_shown_and_changed(api: Api, admin: openai.OpenAI) -> None:
    limits_api = admin.admin.organization.projects.rate_limits
    project, _ = api.new_project()
    (before,) = limits_api.list_rate_limits(project)
    assert (before.id, before.max_requests_per_1_minute) == ("rl-all-models", UNLIMITED)
    changed = limits_api.update_rate_limit(
        before.id, project_id=project, max_requests_per_1_minute=90, extra_body={"max_open_batches": 4}
    )
    assert changed.max_requests_per_1_minute == 90 and changed.model_dump()["max_open_batches"] == 4
    assert list(limits_api.list_rate_limits(project)) == [changed]
    cleared = limits_api.update_rate_limit(
        before.id, project_id=project, extra_body={"max_requests_per_1_minute": None}
    )
    assert cleared.max_requests_per_1_minute == UNLIMITED and cleared.model_dump()["max_open_batches"] == 4
    with pytest.raises(openai.BadRequestError, match="max_tokens_per_1_minute"):
        limits_api.update_rate_limit(before.id, project_id=project, max_tokens_per_1_minute=5)
    with pytest.raises(openai.NotFoundError):
        limits_api.update_rate_limit("rl-gpt", project_id=project, max_requests_per_1_minute=5)


def test_the_audit_log_tells_who_changed_what(api: Api, admin: openai.OpenAI) -> None:
    organization = admin.admin.organization
    project = organization.projects.create(name="audited")
    account = organization.projects.service_accounts.create(project.id, name="robot")
    assert account.api_key is not None
    organization.projects.rate_limits.update_rate_limit(
        "rl-all-models", project_id=project.id, max_requests_per_1_minute=7
    )
    organization.projects.service_accounts.update(account.id, project_id=project.id, name="loader")
    organization.projects.service_accounts.delete(account.id, project_id=project.id)
    rows = list(organization.audit_logs.list(project_ids=[project.id], limit=2))
    assert [row.type for row in rows] == [
        "service_account.deleted",
        "api_key.deleted",
        "service_account.updated",
        "rate_limit.updated",
        "api_key.created",
        "service_account.created",
        "project.created",
    ]
    assert all(row.actor and row.actor.api_key and api.admin_key[3:11] == row.actor.api_key.id for row in rows)
    assert rows[-1].project_created is not None and rows[-1].project_created.id == project.id
    assert rows[3].rate_limit_updated is not None
    assert account.api_key.value not in "".join(row.to_json() for row in rows)
    newest, oldest = rows[0].effective_at, rows[-1].effective_at
    only = organization.audit_logs.list(
        project_ids=[project.id],
        event_types=["api_key.created", "api_key.deleted"],
        actor_ids=[api.admin_key[3:11]],
        resource_ids=[account.api_key.id],
        effective_at={"gte": oldest, "lte": newest},
    )
    assert [row.type for row in only] == ["api_key.deleted", "api_key.created"]
    assert not organization.audit_logs.list(project_ids=[project.id], effective_at={"gt": newest}).data
    assert not organization.audit_logs.list(project_ids=[project.id], effective_at={"lt": oldest}).data
    back = organization.audit_logs.list(project_ids=[project.id], before=rows[4].id, limit=3)
    assert [row.id for row in back.data] == [rows[1].id, rows[2].id, rows[3].id]
    with pytest.raises(openai.BadRequestError, match="no audit row"):
        organization.audit_logs.list(after="audit_log-none")


@on_sqlite
def test_none_of_it_is_for_keys_of_projects(api: Api) -> None:
    client = openai.OpenAI(base_url=f"{api.url}/v1", api_key="unused", admin_api_key=api.key, max_retries=0)
    organization = client.admin.organization
    for call in (
        organization.projects.list,
        organization.admin_api_keys.list,
        organization.audit_logs.list,
        lambda: organization.projects.create(name="x"),
        lambda: organization.projects.api_keys.list(api.project_id),
        lambda: organization.projects.service_accounts.create(api.project_id, name="x"),
        lambda: organization.projects.rate_limits.list_rate_limits(api.project_id),
    ):
        with pytest.raises(openai.PermissionDeniedError):
            call()
