"""`delete`: takes files and ended batches of one's own out of the service; `admin delete` does it for an operator, and
`admin retention` says how long files of a project live."""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Annotated, Any, Protocol
from urllib.parse import quote

import typer

from batchsvc.cli.admin import opened_way
from batchsvc.cli.exits import CommandError, Exit
from batchsvc.cli.options import AdminOptions, ProjectArgument, ServerOptions, grouped
from batchsvc.stack.options import READING

if TYPE_CHECKING:
    from sqlalchemy.orm import Session

    from batchsvc.cli.client import Client
    from batchsvc.db.session import Database

_UNITS = {"h": 3_600, "d": 86_400}
_LIFE = re.compile(r"([1-9][0-9]{0,4})([hd])")
ObjectArgument = Annotated[
    str, typer.Argument(metavar="ID", help="Id of a file (file-...) or of a batch that has ended (batch_...).")
]
InputOption = Annotated[bool, typer.Option("--input", help="Of a batch, delete the input file too.")]


@grouped
def delete(*, object_id: ObjectArgument, with_input: InputOption = False, server: ServerOptions) -> None:
    """Delete a file, or an ended batch with its results and metadata. What it cost stays on the bill."""
    path = _path(object_id, with_input)
    with server.opened(roles=READING, purpose="delete") as session:
        gone = session.client.delete(path)
    server.console.out(_said(gone))
    server.console.result(gone)


@grouped
def delete_any(*, object_id: ObjectArgument, with_input: InputOption = False, server: AdminOptions) -> None:
    """Delete a file or an ended batch of any project; this is audited."""
    with _opened(server) as verbs:
        gone = verbs.delete(object_id, with_input)
    server.console.out(f"{_said(gone)} It was of {gone['project_id']}.")
    server.console.result(gone)


@grouped
def retention(
    *,
    project: ProjectArgument,
    inputs: Annotated[
        str | None, typer.Option("--inputs", metavar="T", help="Life of its inputs, such as 12h or 7d; or default.")
    ] = None,
    outputs: Annotated[
        str | None, typer.Option("--outputs", metavar="T", help="Life of its results, such as 30d; or default.")
    ] = None,
    server: AdminOptions,
) -> None:
    """Show, or change for files to come, how long files of a project live whose calls don't say."""
    given = {"input_seconds": inputs, "output_seconds": outputs}
    changes = {name: _seconds(text) for name, text in given.items() if text is not None}
    with _opened(server) as verbs:
        row = verbs.change_retention(project, changes) if changes else verbs.retention(project)
    lives = [_text(row[name]) for name in given]
    server.console.out(f"{row['project_id']}: inputs live {lives[0]}, results {lives[1]}.")
    server.console.result(row)


class Retaining(Protocol):
    """What an operator can do about content. Every method raises ServiceError or CommandError with one sentence."""

    def delete(self, object_id: str, with_input: bool) -> dict[str, Any]: ...
    def retention(self, project: str) -> dict[str, Any]: ...
    def change_retention(self, project: str, changes: dict[str, int | None]) -> dict[str, Any]: ...


class HttpRetaining:
    """A server's admin routes; the key must be an admin key."""

    def __init__(self, client: Client) -> None:
        self._client = client

    def delete(self, object_id: str, with_input: bool) -> dict[str, Any]:
        return self._client.delete(f"/admin/content/{quote(object_id, safe='')}{_query(with_input)}")

    def retention(self, project: str) -> dict[str, Any]:
        return self._client.get(f"/admin/projects/{quote(project, safe='')}/retention")

    def change_retention(self, project: str, changes: dict[str, int | None]) -> dict[str, Any]:
        return self._client.post(f"/admin/projects/{quote(project, safe='')}/retention", dict(changes))


class DatabaseRetaining:
    """The service's own database."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def delete(self, object_id: str, with_input: bool) -> dict[str, Any]:
        from batchsvc.audit.actor import at_command_line
        from batchsvc.batches import deletion_service, garbage_queries

        def discard(session: Session, key: str) -> None:
            garbage_queries.discard(session, [key], grace_s=garbage_queries.DOWNLOAD_S)

        return self._database.run(
            lambda session: deletion_service.delete_any(
                session, at_command_line(), object_id, with_input=with_input, discard=discard
            )
        )

    def retention(self, project: str) -> dict[str, Any]:
        from batchsvc.files import retention_service

        with self._database.reading() as session:
            return retention_service.show(session, project)

    def change_retention(self, project: str, changes: dict[str, int | None]) -> dict[str, Any]:
        from pydantic import ValidationError

        from batchsvc.audit.actor import at_command_line
        from batchsvc.files import retention_service
        from batchsvc.files.retention_schemas import ChangeRetention

        try:
            checked = ChangeRetention(**changes).model_dump(exclude_unset=True)
        except ValidationError as error:
            problem = error.errors(include_input=False, include_url=False)[0]
            raise CommandError(f"Invalid '{problem['loc'][0]}': {problem['msg']}.", Exit.USAGE) from None
        actor = at_command_line()
        return self._database.run(lambda session: retention_service.change(session, actor, project, checked))


def _opened(server: AdminOptions) -> AbstractContextManager[Retaining]:
    by_http: Callable[[Client], Retaining] = HttpRetaining
    return opened_way(by_http, DatabaseRetaining, server)


def _path(object_id: str, with_input: bool) -> str:
    """The route that deletes an object of this kind."""
    named = quote(object_id, safe="")
    if object_id.startswith("file-"):
        if with_input:
            raise CommandError("--input is for a batch.", Exit.USAGE)
        return f"/files/{named}"
    if not object_id.startswith(("batch_", "msgbatch_")):
        raise CommandError(
            f"{object_id!r} is no id of a file (file-...) or of a batch (batch_..., msgbatch_...).", Exit.USAGE
        )
    return f"/batches/{named}{_query(with_input)}"


def _query(with_input: bool) -> str:
    return "?input=true" if with_input else ""


def _said(gone: dict[str, Any]) -> str:
    return f"{gone['id']} is deleted; its content leaves the service within its retention grace."


def _seconds(text: str) -> int | None:
    if text == "default":
        return None
    found = _LIFE.fullmatch(text)
    if found is None:
        raise CommandError(f"{text!r} is no life of a file: it is hours or days, such as 12h or 7d.", Exit.USAGE)
    return int(found[1]) * _UNITS[found[2]]


def _text(seconds: int | None) -> str:
    if seconds is None:
        return "as long as BATCHSVC_FILE_TTL_S says"
    return f"{seconds // 86_400} days" if seconds % 86_400 == 0 else f"{seconds / 3_600:g} hours"
