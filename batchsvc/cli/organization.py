"""Projects, keys, service accounts, limits and the audit log, over a server's admin routes or in its database.

Both twins return the API's own objects. Projects are given by id or by name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Protocol
from urllib.parse import quote, urlencode

from batchsvc.cli.admin import opened_way
from batchsvc.cli.checked import checked as valid
from batchsvc.cli.exits import CommandError

if TYPE_CHECKING:
    from sqlalchemy.orm import Session

    from batchsvc.audit.actor import Actor
    from batchsvc.cli.client import Client
    from batchsvc.cli.options import AdminOptions
    from batchsvc.db.session import Database

_PAGE, _MOST = 100, 10_000
Body = Mapping[str, Any]


class Organization(Protocol):
    """What an operator can do. Every method raises ServiceError or CommandError with one sentence."""

    def projects(self, *, with_archived: bool) -> list[dict[str, Any]]: ...
    def create_project(self, name: str) -> dict[str, Any]: ...
    def rename_project(self, project: str, name: str) -> dict[str, Any]: ...
    def archive_project(self, project: str) -> dict[str, Any]: ...
    def api_keys(self) -> list[dict[str, Any]]: ...
    def create_key(self, body: Body) -> dict[str, Any]: ...
    def change_key(self, key_id: str, body: Body) -> dict[str, Any]: ...
    def rotate_key(self, key_id: str, body: Body) -> dict[str, Any]: ...
    def revoke_key(self, key_id: str) -> dict[str, Any]: ...
    def accounts(self, project: str) -> list[dict[str, Any]]: ...
    def create_account(self, project: str, body: Body) -> dict[str, Any]: ...
    def create_account_key(self, project: str, account_id: str, body: Body) -> dict[str, Any]: ...
    def delete_account(self, project: str, account_id: str) -> dict[str, Any]: ...
    def admin_keys(self) -> list[dict[str, Any]]: ...
    def create_admin_key(self, body: Body) -> dict[str, Any]: ...
    def delete_admin_key(self, key_id: str) -> dict[str, Any]: ...
    def audit(self, filters: Mapping[str, Sequence[str]], most: int) -> list[dict[str, Any]]: ...


def opened_organization(server: AdminOptions) -> AbstractContextManager[Organization]:
    """The organization of the service that the flags and the environment name."""
    by_http: Callable[[Client], Organization] = HttpOrganization
    return opened_way(by_http, DatabaseOrganization, server)


class HttpOrganization:
    """A server's admin routes; the key must be an admin key."""

    def __init__(self, client: Client) -> None:
        self._client = client

    def projects(self, *, with_archived: bool) -> list[dict[str, Any]]:
        return self._pages("/organization/projects", {"include_archived": [str(with_archived).lower()]})

    def create_project(self, name: str) -> dict[str, Any]:
        return self._client.post("/organization/projects", {"name": name})

    def rename_project(self, project: str, name: str) -> dict[str, Any]:
        return self._client.post(self._project(project), {"name": name})

    def archive_project(self, project: str) -> dict[str, Any]:
        return self._client.post(f"{self._project(project)}/archive", {})

    def api_keys(self) -> list[dict[str, Any]]:
        return list(self._client.get("/admin/keys")["data"])

    def create_key(self, body: Body) -> dict[str, Any]:
        return self._client.post("/admin/keys", dict(body))

    def change_key(self, key_id: str, body: Body) -> dict[str, Any]:
        return self._client.post(f"/admin/keys/{quote(key_id, safe='')}", dict(body))

    def rotate_key(self, key_id: str, body: Body) -> dict[str, Any]:
        return self._client.post(f"/admin/keys/{quote(key_id, safe='')}/rotate", dict(body))

    def revoke_key(self, key_id: str) -> dict[str, Any]:
        return self._client.delete(f"/admin/keys/{quote(key_id, safe='')}")

    def accounts(self, project: str) -> list[dict[str, Any]]:
        return self._pages(f"{self._project(project)}/service_accounts", {})

    def create_account(self, project: str, body: Body) -> dict[str, Any]:
        return self._client.post(f"{self._project(project)}/service_accounts", dict(body))

    def create_account_key(self, project: str, account_id: str, body: Body) -> dict[str, Any]:
        path = f"{self._project(project)}/service_accounts/{quote(account_id, safe='')}/api_keys"
        return self._client.post(path, dict(body))

    def delete_account(self, project: str, account_id: str) -> dict[str, Any]:
        return self._client.delete(f"{self._project(project)}/service_accounts/{quote(account_id, safe='')}")

    def admin_keys(self) -> list[dict[str, Any]]:
        return self._pages("/organization/admin_api_keys", {})

    def create_admin_key(self, body: Body) -> dict[str, Any]:
        return self._client.post("/organization/admin_api_keys", dict(body))

    def delete_admin_key(self, key_id: str) -> dict[str, Any]:
        return self._client.delete(f"/organization/admin_api_keys/{quote(key_id, safe='')}")

    def audit(self, filters: Mapping[str, Sequence[str]], most: int) -> list[dict[str, Any]]:
        named = {name: list(values) for name, values in filters.items()}
        if "project_ids[]" in named:
            named["project_ids[]"] = [self._project(one).rpartition("/")[2] for one in named["project_ids[]"]]
        return self._pages("/organization/audit_logs", named, most)

    def _pages(self, path: str, arguments: Mapping[str, Sequence[str]], most: int = _MOST) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = []
        cursor: dict[str, Sequence[str]] = {}
        while True:
            limit = {"limit": [str(min(_PAGE, most - len(found)))]}
            page = self._client.get(f"{path}?{urlencode({**arguments, **cursor, **limit}, doseq=True)}")
            found += page["data"]
            if not page["has_more"] or len(found) >= most:
                return found
            cursor = {"after": [page["last_id"]]}

    def _project(self, project: str) -> str:
        """The path of a project. Raises CommandError for a name that none has."""
        if not project.startswith("proj_"):
            named = [row["id"] for row in self._client.get("/admin/projects")["data"] if row["name"] == project]
            if not named:
                raise CommandError(f"There is no project {project}.")
            project = named[0]
        return f"/organization/projects/{quote(project, safe='')}"


class DatabaseOrganization:
    """The service's own database; the audit log names this machine's user."""

    def __init__(self, database: Database) -> None:
        from batchsvc.audit.actor import at_command_line

        self._database = database
        self._actor: Actor = at_command_line()

    def projects(self, *, with_archived: bool) -> list[dict[str, Any]]:
        from batchsvc.accounts import organization

        with self._database.reading() as session:
            return _data(organization.list_projects(session, _whole(), with_archived=with_archived))

    def create_project(self, name: str) -> dict[str, Any]:
        from batchsvc.accounts import organization
        from batchsvc.accounts.organization_schemas import CreateProject

        body = valid(CreateProject, {"name": name})
        return self._run(lambda session: organization.create_project(session, self._actor, body))

    def rename_project(self, project: str, name: str) -> dict[str, Any]:
        from batchsvc.accounts import organization
        from batchsvc.accounts.organization_schemas import RenameProject

        body = valid(RenameProject, {"name": name})
        return self._run(lambda session: organization.rename_project(session, self._actor, _id(session, project), body))

    def archive_project(self, project: str) -> dict[str, Any]:
        from batchsvc.accounts import organization

        return self._run(lambda session: organization.archive_project(session, self._actor, _id(session, project)))

    def api_keys(self) -> list[dict[str, Any]]:
        from batchsvc.accounts import service
        from batchsvc.accounts.schemas import key_object

        with self._database.reading() as session:
            return [key_object(row) for row in service.list_keys(session)]

    def create_key(self, body: Body) -> dict[str, Any]:
        from batchsvc.accounts import keys_api
        from batchsvc.accounts.schemas import CreateKey
        from batchsvc.stack.prepare import PROJECT

        checked = valid(CreateKey, {**body, "project": body.get("project") or PROJECT})
        return self._run(lambda session: keys_api.create(session, self._actor, checked, own_project_id=None))

    def change_key(self, key_id: str, body: Body) -> dict[str, Any]:
        from batchsvc.accounts import keys_api
        from batchsvc.accounts.schemas import ChangeKeyAndLimits

        checked = valid(ChangeKeyAndLimits, body)
        return self._run(lambda session: keys_api.change(session, self._actor, key_id, checked))

    def rotate_key(self, key_id: str, body: Body) -> dict[str, Any]:
        from batchsvc.accounts import keys_api
        from batchsvc.accounts.schemas import RotateKey

        checked = valid(RotateKey, body)
        return self._run(lambda session: keys_api.rotate(session, self._actor, key_id, checked))

    def revoke_key(self, key_id: str) -> dict[str, Any]:
        from batchsvc.accounts import keys_api

        return self._run(lambda session: keys_api.revoke(session, self._actor, key_id))

    def accounts(self, project: str) -> list[dict[str, Any]]:
        from batchsvc.accounts import organization

        with self._database.reading() as session:
            return _data(organization.list_accounts(session, _id(session, project), _whole()))

    def create_account(self, project: str, body: Body) -> dict[str, Any]:
        from batchsvc.accounts import organization
        from batchsvc.accounts.organization_schemas import CreateServiceAccount

        checked = valid(CreateServiceAccount, body)
        return self._run(
            lambda session: organization.create_account(session, self._actor, _id(session, project), checked)
        )

    def create_account_key(self, project: str, account_id: str, body: Body) -> dict[str, Any]:
        from batchsvc.accounts import organization
        from batchsvc.accounts.organization_schemas import CreateServiceAccountKey

        checked = valid(CreateServiceAccountKey, body)
        return self._run(
            lambda session: organization.create_account_key(
                session, self._actor, _id(session, project), account_id, checked
            )
        )

    def delete_account(self, project: str, account_id: str) -> dict[str, Any]:
        from batchsvc.accounts import organization

        return self._run(
            lambda session: organization.delete_account(session, self._actor, _id(session, project), account_id)
        )

    def admin_keys(self) -> list[dict[str, Any]]:
        from batchsvc.accounts import organization

        with self._database.reading() as session:
            return _data(organization.list_admin_keys(session, _whole()))

    def create_admin_key(self, body: Body) -> dict[str, Any]:
        from batchsvc.accounts import administration, organization
        from batchsvc.accounts.organization_schemas import CreateAdminKey
        from batchsvc.stack.prepare import PROJECT

        checked = valid(CreateAdminKey, body)

        def create(session: Session) -> dict[str, Any]:
            project_id = administration.project_of(session, self._actor, PROJECT)
            return organization.create_admin_key(session, self._actor, project_id, checked)

        return self._run(create)

    def delete_admin_key(self, key_id: str) -> dict[str, Any]:
        from batchsvc.accounts import organization

        return self._run(lambda session: organization.delete_admin_key(session, self._actor, key_id))

    def audit(self, filters: Mapping[str, Sequence[str]], most: int) -> list[dict[str, Any]]:
        from batchsvc.audit import listing
        from batchsvc.audit.queries import Filter

        with self._database.reading() as session:
            wanted = Filter(
                actions=filters.get("event_types[]", ()),
                actor_ids=filters.get("actor_ids[]", ()),
                target_ids=filters.get("resource_ids[]", ()),
                project_ids=[_id(session, project) for project in filters.get("project_ids[]", ())],
                from_ms=_ms(filters.get("effective_at[gte]")),
                to_ms=_ms(filters.get("effective_at[lt]")),
            )
            return _data(listing.page(session, wanted, limit=most))

    def _run(self, work: Callable[[Session], dict[str, Any]]) -> dict[str, Any]:
        return self._database.once(work)


def _id(session: Session, project: str) -> str:
    from batchsvc.accounts import service

    return service.existing_project(session, project).id


def _whole() -> Any:
    from batchsvc.http.paging import PageArgs

    return PageArgs(limit=_MOST, after=None, is_ascending=False)


def _data(page: Mapping[str, Any]) -> list[dict[str, Any]]:
    return list(page["data"])


def _ms(seconds: Sequence[str] | None) -> int | None:
    return int(seconds[0]) * 1000 if seconds else None
