"""`batchsvc admin stores`: the buckets of tenants that inputs may come from and results may go to."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Protocol
from urllib.parse import quote

import typer

from batchsvc.audit.actor import at_command_line
from batchsvc.cli.admin import opened_way
from batchsvc.cli.exits import CommandError, Exit
from batchsvc.cli.options import AdminOptions, ProjectArgument, grouped

if TYPE_CHECKING:
    from batchsvc.cli.client import Client
    from batchsvc.db.session import Database
    from batchsvc.files.store_service import OwnStore

app = typer.Typer(
    no_args_is_help=True, help="Buckets that a project's inputs may come from and results go to.", rich_markup_mode=None
)


@app.command()
@grouped
def add(
    *,
    project: ProjectArgument,
    uri: Annotated[str, typer.Argument(metavar="URI", help="s3://bucket/prefix: what it may reach.")],
    access_key: Annotated[str, typer.Option("--access-key", metavar="KEY", help="Access key of the project's own.")],
    secret_file: Annotated[
        str, typer.Option("--secret-file", metavar="F", help="File that holds the secret key; - is standard input.")
    ],
    endpoint: Annotated[
        str | None, typer.Option("--endpoint", metavar="URL", help="Its S3 server; without it AWS.")
    ] = None,
    region: Annotated[str, typer.Option("--region", metavar="R", help="Its region.")] = "us-east-1",
    server: AdminOptions,
) -> None:
    """Let a project reach a prefix of a bucket. The same again changes its keys, server and region."""
    body = {"project": project, "uri": uri, "endpoint": endpoint, "region": region, "access_key": access_key}
    with _opened(server) as stores:
        made = stores.register(body | {"secret_key": _secret(secret_file)})
    server.console.out(f"{made['id']}: {made['project_id']} may reach {made['uri']}.")
    server.console.result(made)


@app.command("list")
@grouped
def list_stores(*, server: AdminOptions) -> None:
    """List what was registered, without the secrets."""
    with _opened(server) as stores:
        page = stores.list_stores()
    server.console.result(page)
    rows = [{**row, "project": row["project_id"], "endpoint": row["endpoint"] or "AWS"} for row in page["data"]]
    server.console.table(rows, ("id", "project", "uri", "endpoint", "region", "access_key"))


@app.command()
@grouped
def remove(
    *,
    store: Annotated[str, typer.Argument(metavar="STORE", help="Id of the store (store_...).")],
    server: AdminOptions,
) -> None:
    """Forget a store and its keys; what still needs it is told that it isn't registered."""
    with _opened(server) as stores:
        gone = stores.remove(store)
    server.console.out(f"{gone['id']} is removed.")
    server.console.result(gone)


class Stores(Protocol):
    """What an operator can do with stores. Every method raises ServiceError or CommandError with one sentence."""

    def register(self, body: dict[str, Any]) -> dict[str, Any]: ...
    def list_stores(self) -> dict[str, Any]: ...
    def remove(self, store_id: str) -> dict[str, Any]: ...


class HttpStores:
    """A server's admin routes; the key must be an admin key."""

    def __init__(self, client: Client) -> None:
        self._client = client

    def register(self, body: dict[str, Any]) -> dict[str, Any]:
        return self._client.post("/admin/stores", body)

    def list_stores(self) -> dict[str, Any]:
        return self._client.get("/admin/stores")

    def remove(self, store_id: str) -> dict[str, Any]:
        return self._client.delete(f"/admin/stores/{quote(store_id, safe='')}")


class DatabaseStores:
    """The service's own database."""

    def __init__(self, database: Database, own: OwnStore) -> None:
        self._database = database
        self._own = own

    def register(self, body: dict[str, Any]) -> dict[str, Any]:
        from pydantic import ValidationError

        from batchsvc.files import store_administration
        from batchsvc.files.store_schemas import RegisterStore, store_object

        try:
            checked = RegisterStore(**body)
        except ValidationError as error:
            problem = error.errors(include_input=False, include_url=False)[0]
            raise CommandError(f"Invalid '{problem['loc'][0]}': {problem['msg']}.", Exit.USAGE) from None
        return self._database.run(
            lambda session: store_object(store_administration.register(session, at_command_line(), checked, self._own))
        )

    def list_stores(self) -> dict[str, Any]:
        from batchsvc.files import store_service
        from batchsvc.files.store_schemas import store_object

        with self._database.reading() as session:
            return {"object": "list", "data": [store_object(row) for row in store_service.list_stores(session)]}

    def remove(self, store_id: str) -> dict[str, Any]:
        from batchsvc.files import store_administration
        from batchsvc.files.store_schemas import deleted_object

        self._database.run(lambda session: store_administration.remove(session, at_command_line(), store_id))
        return deleted_object(store_id)


def _opened(server: AdminOptions) -> AbstractContextManager[Stores]:
    def by_database(database: Database) -> Stores:
        return DatabaseStores(database, _own(server))

    by_http: Callable[[Client], Stores] = HttpStores
    return opened_way(by_http, by_database, server)


def _own(server: AdminOptions) -> OwnStore:
    """What is the service's own in the deployment that the flags name."""
    from batchsvc.files.store_service import OwnStore
    from batchsvc.sealing import Seals
    from batchsvc.settings import Settings
    from batchsvc.stack.children import BUCKET, Secrets
    from batchsvc.stack.datadir import DataDir

    if server.from_env:
        return OwnStore.of(Settings.from_env())
    secrets = Secrets.of(DataDir.at(server.data_dir))
    return OwnStore(BUCKET, secrets.s3_key, Seals.of(secrets.sealing))


def _secret(name: str) -> str:
    try:
        text = sys.stdin.read() if name == "-" else Path(name).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise CommandError(f"{name} can't be read as text.", Exit.USAGE) from error
    if not text.strip():
        raise CommandError(f"{name} holds no secret key.", Exit.USAGE)
    return text.strip()
