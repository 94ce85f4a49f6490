"""What an operator can change, over a server's admin routes or straight in the database.

A data directory needs no running stack for it; `--from-env` means the database of the settings. Both twins return
the API's own objects.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Protocol, TypeVar
from urllib.parse import quote, urlencode

from batchsvc.audit.actor import at_command_line
from batchsvc.cli.checked import checked
from batchsvc.cli.exits import CommandError, Exit
from batchsvc.stack.datadir import DataDir
from batchsvc.stack.launch import wait_until_usable

if TYPE_CHECKING:
    from sqlalchemy.orm import Session

    from batchsvc.billing.usage import Kind
    from batchsvc.cli.client import Client
    from batchsvc.cli.options import AdminOptions
    from batchsvc.db.session import Database

T = TypeVar("T")

_PATIENCE_S = 300.0


class Admin(Protocol):
    """What an operator can do. Every method raises ServiceError or CommandError with one sentence."""

    def list_keys(self) -> dict[str, Any]: ...
    def add_model(self, model: dict[str, Any]) -> dict[str, Any]: ...
    def alias(self, name: str, target: str) -> dict[str, Any]: ...
    def list_projects(self) -> dict[str, Any]: ...
    def change_project(self, project: str, changes: dict[str, Any]) -> dict[str, Any]: ...
    def organization(self, kind: Kind, arguments: Sequence[tuple[str, str]]) -> dict[str, Any]: ...


@contextmanager
def opened_admin(server: AdminOptions) -> Iterator[Admin]:
    """The way to the service that the flags and the environment name."""
    by_http: Callable[[Client], Admin] = HttpAdmin
    with opened_way(by_http, DatabaseAdmin, server) as admin:
        yield admin


@contextmanager
def opened_way(
    by_http: Callable[[Client], T],
    by_database: Callable[[Database], T],
    server: AdminOptions,
) -> Iterator[T]:
    """One of two twins: over a server, or over the service's own database."""
    if server.from_env:
        if server.data_dir is not None or server.url or server.api_key:
            raise CommandError("--from-env names a deployment of its own: leave the other flags out.", Exit.USAGE)
        from sqlalchemy.exc import DBAPIError

        from batchsvc.db.session import Database
        from batchsvc.settings import Settings

        database = Database(Settings.from_env().database_url)
        try:
            yield by_database(database)
        except DBAPIError as error:
            reason = str(error.orig).splitlines()[0].rstrip(".")
            raise CommandError(
                f"The database doesn't answer, or isn't migrated (`batchsvc migrate`): {reason}."
            ) from error
        finally:
            database.dispose()
        return
    target = server.target
    if target.directory is not None:
        database = _database_of(target.directory)
        try:
            yield by_database(database)
        finally:
            database.dispose()
        return
    from batchsvc.cli.client import Client

    with Client(target.url, target.api_key, is_local=False) as client:
        yield by_http(client)


class HttpAdmin:
    """A server's admin routes; the key must be an admin key."""

    def __init__(self, client: Client) -> None:
        self._client = client

    def list_keys(self) -> dict[str, Any]:
        return self._client.get("/admin/keys")

    def add_model(self, model: dict[str, Any]) -> dict[str, Any]:
        return self._client.post("/admin/models", model)

    def alias(self, name: str, target: str) -> dict[str, Any]:
        return self._client.post("/admin/aliases", {"name": name, "target": target})

    def list_projects(self) -> dict[str, Any]:
        return self._client.get("/admin/projects")

    def change_project(self, project: str, changes: dict[str, Any]) -> dict[str, Any]:
        return self._client.post(f"/admin/projects/{quote(project, safe='')}", changes)

    def organization(self, kind: Kind, arguments: Sequence[tuple[str, str]]) -> dict[str, Any]:
        path = str(kind) if kind == "costs" else f"usage/{kind}"
        return self._client.get(f"/organization/{path}?{urlencode(arguments)}")


class DatabaseAdmin:
    """The service's own database."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def list_keys(self) -> dict[str, Any]:
        from batchsvc.accounts import service
        from batchsvc.accounts.schemas import key_object

        with self._database.reading() as session:
            return {"object": "list", "data": [key_object(row) for row in service.list_keys(session)]}

    def add_model(self, model: dict[str, Any]) -> dict[str, Any]:
        from batchsvc.batches import model_administration
        from batchsvc.batches.schemas import model_object

        return self._database.run(
            lambda session: model_object(model_administration.register(session, at_command_line(), **model), None, {})
        )

    def alias(self, name: str, target: str) -> dict[str, Any]:
        from batchsvc.batches import model_administration, models
        from batchsvc.batches.schemas import model_object

        def point(session: Session) -> dict[str, Any]:
            row = model_administration.alias(session, at_command_line(), name, target)
            return model_object(row, models.resolve(session, target, project_id=None), {})

        return self._database.run(point)

    def list_projects(self) -> dict[str, Any]:
        from batchsvc.accounts import service
        from batchsvc.accounts.schemas import project_object

        with self._database.reading() as session:
            return {"object": "list", "data": [project_object(row) for row in service.list_projects(session)]}

    def change_project(self, project: str, changes: dict[str, Any]) -> dict[str, Any]:
        from batchsvc.accounts import administration
        from batchsvc.accounts.schemas import ChangeProject, project_object

        valid = checked(ChangeProject, changes).model_dump(exclude_unset=True)
        return self._database.run(
            lambda session: project_object(administration.change_project(session, at_command_line(), project, valid))
        )

    def organization(self, kind: Kind, arguments: Sequence[tuple[str, str]]) -> dict[str, Any]:
        from batchsvc.billing import usage_service

        with self._database.reading() as session:
            return usage_service.answer(session, kind, arguments)


def _database_of(directory: DataDir) -> Database:
    """A data directory's database; in a directory that has none yet, or an old one, it is brought up to date first."""
    from batchsvc.db.session import Database
    from batchsvc.stack.prepare import prepare_database

    directory.create()
    database = Database(directory.database_url)
    if directory.holder() is not None:
        wait_until_usable(directory, (), _PATIENCE_S)
        return database
    lock = directory.lock()
    try:
        prepare_database(directory, database)
    finally:
        lock.release()
    return database
