"""Invoices and statements, over a server's admin routes or straight in the database; both give the API's objects."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any, Protocol, TypeVar
from urllib.parse import quote, urlencode

from pydantic import BaseModel, ValidationError

from batchsvc.audit.actor import at_command_line
from batchsvc.cli.admin import opened_way
from batchsvc.cli.exits import CommandError

if TYPE_CHECKING:
    from batchsvc.billing.invoice_api import Action
    from batchsvc.cli.client import Client
    from batchsvc.cli.options import AdminOptions
    from batchsvc.db.session import Database
    from batchsvc.settings import Settings


M = TypeVar("M", bound=BaseModel)


class Books(Protocol):
    """What an operator can do with invoices. Every method raises ServiceError or CommandError with one sentence."""

    def party(self, project: str, changes: dict[str, Any]) -> dict[str, Any]: ...
    def draft(self, body: dict[str, Any]) -> dict[str, Any]: ...
    def act(self, name: str, action: Action, body: dict[str, Any]) -> dict[str, Any]: ...
    def show(self, name: str) -> dict[str, Any]: ...
    def listing(self, filters: dict[str, str]) -> dict[str, Any]: ...
    def content(self, name: str, form: str) -> AbstractContextManager[Iterator[bytes]]: ...
    def statement(self, project: str, month: str) -> dict[str, Any]: ...


def opened_books(server: AdminOptions) -> AbstractContextManager[Books]:
    """The books of the service that the flags and the environment name."""
    by_http: Callable[[Client], Books] = HttpBooks
    return opened_way(by_http, DatabaseBooks, server)


class HttpBooks:
    """A server's admin routes; the key must be an admin key."""

    def __init__(self, client: Client) -> None:
        self._client = client

    def party(self, project: str, changes: dict[str, Any]) -> dict[str, Any]:
        path = f"/admin/projects/{quote(project, safe='')}/party"
        return self._client.post(path, changes) if changes else self._client.get(path)

    def draft(self, body: dict[str, Any]) -> dict[str, Any]:
        return self._client.post("/admin/invoices", body)

    def act(self, name: str, action: Action, body: dict[str, Any]) -> dict[str, Any]:
        return self._client.post(f"/admin/invoices/{quote(name, safe='')}/{action}", body)

    def show(self, name: str) -> dict[str, Any]:
        return self._client.get(f"/admin/invoices/{quote(name, safe='')}")

    def listing(self, filters: dict[str, str]) -> dict[str, Any]:
        return self._client.get(f"/admin/invoices?{urlencode(filters)}")

    def content(self, name: str, form: str) -> AbstractContextManager[Iterator[bytes]]:
        return self._client.download(f"/admin/invoices/{quote(name, safe='')}/content?format={form}")

    def statement(self, project: str, month: str) -> dict[str, Any]:
        return self._client.get(f"/admin/projects/{quote(project, safe='')}/statement?{urlencode({'month': month})}")


class DatabaseBooks:
    """The service's own database; the seller is the one of this process's settings."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def party(self, project: str, changes: dict[str, Any]) -> dict[str, Any]:
        from batchsvc.billing import administration, invoice_api
        from batchsvc.billing.invoice_schemas import ChangeParty

        if not changes:
            with self._database.reading() as session:
                return invoice_api.party(session, project)
        body = _checked(ChangeParty, changes)
        return self._database.run(
            lambda session: administration.change_party(session, at_command_line(), project, body)
        )

    def draft(self, body: dict[str, Any]) -> dict[str, Any]:
        from batchsvc.billing import administration
        from batchsvc.billing.invoice_schemas import DraftInvoice

        settings, wanted = self._settings(), _checked(DraftInvoice, body)
        return self._database.run(lambda session: administration.draft(session, at_command_line(), settings, wanted))

    def act(self, name: str, action: Action, body: dict[str, Any]) -> dict[str, Any]:
        from batchsvc.billing import administration
        from batchsvc.billing.invoice_schemas import Change

        settings, change = self._settings(), _checked(Change, body)
        return self._database.run(
            lambda session: administration.act(session, at_command_line(), settings, name, action, change)
        )

    def show(self, name: str) -> dict[str, Any]:
        from batchsvc.billing import invoice_api

        with self._database.reading() as session:
            return invoice_api.show(session, name)

    def listing(self, filters: dict[str, str]) -> dict[str, Any]:
        from batchsvc.billing import invoice_api

        with self._database.reading() as session:
            return invoice_api.listing(
                session, project=filters.get("project"), month=filters.get("month"), status=filters.get("status")
            )

    @contextmanager
    def content(self, name: str, form: str) -> Iterator[Iterator[bytes]]:
        from batchsvc.billing import invoice_api

        with self._database.reading() as session:
            yield invoice_api.content(session, name, form)

    def statement(self, project: str, month: str) -> dict[str, Any]:
        from batchsvc.billing import invoice_api

        with self._database.snapshot() as session:
            return invoice_api.show_statement(session, project, month)

    def _settings(self) -> Settings:
        from batchsvc.settings import Settings

        here = {"DATABASE_URL": self._database.url, "REDIS_URL": os.environ.get("REDIS_URL") or "unix://unused"}
        return Settings.from_env({**os.environ, **here})


def _checked(model: type[M], body: dict[str, Any]) -> M:
    """The body as the API would take it; the first thing that it would refuse, as a sentence."""
    try:
        return model(**body)
    except ValidationError as error:
        problem = error.errors()[0]
        raise CommandError(f"Invalid '{problem['loc'][0]}': {problem['msg']}.") from error
