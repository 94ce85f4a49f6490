"""Prices and what an operator posts, over a server's admin routes or straight in the database; both give the API's
objects."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Protocol, TypeVar
from urllib.parse import quote

from batchsvc.audit.actor import at_command_line
from batchsvc.cli.admin import opened_way
from batchsvc.cli.exits import CommandError, Exit

if TYPE_CHECKING:
    from pydantic import BaseModel

    from batchsvc.billing.ledger import Movement
    from batchsvc.cli.client import Client
    from batchsvc.cli.options import AdminOptions
    from batchsvc.db.session import Database

    B = TypeVar("B", bound=BaseModel)


class Money(Protocol):
    """What an operator can do with money. Every method raises ServiceError or CommandError with one sentence."""

    def versions(self) -> dict[str, Any]: ...
    def book(self, version: str) -> dict[str, Any]: ...
    def import_prices(self, body: dict[str, Any]) -> dict[str, Any]: ...
    def set_price(self, body: dict[str, Any]) -> dict[str, Any]: ...
    def balance(self, project: str) -> dict[str, Any]: ...
    def post(self, kind: Movement, project: str, body: dict[str, Any]) -> dict[str, Any]: ...


def opened_money(server: AdminOptions) -> AbstractContextManager[Money]:
    """The money of the service that the flags and the environment name."""
    by_http: Callable[[Client], Money] = HttpMoney
    return opened_way(by_http, DatabaseMoney, server)


class HttpMoney:
    """A server's admin routes; the key must be an admin key."""

    def __init__(self, client: Client) -> None:
        self._client = client

    def versions(self) -> dict[str, Any]:
        return self._client.get("/admin/prices")

    def book(self, version: str) -> dict[str, Any]:
        return self._client.get(f"/admin/prices/{quote(version, safe='')}")

    def import_prices(self, body: dict[str, Any]) -> dict[str, Any]:
        return self._client.post("/admin/prices", body)

    def set_price(self, body: dict[str, Any]) -> dict[str, Any]:
        return self._client.post("/admin/prices/rows", body)

    def balance(self, project: str) -> dict[str, Any]:
        return self._client.get(f"/admin/projects/{quote(project, safe='')}/balance")

    def post(self, kind: Movement, project: str, body: dict[str, Any]) -> dict[str, Any]:
        return self._client.post(f"/admin/projects/{quote(project, safe='')}/{kind}s", body)


class DatabaseMoney:
    """The service's own database."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def versions(self) -> dict[str, Any]:
        from batchsvc.billing import money_api

        with self._database.reading() as session:
            return money_api.versions(session)

    def book(self, version: str) -> dict[str, Any]:
        from batchsvc.billing import money_api

        with self._database.reading() as session:
            return money_api.book(session, version)

    def import_prices(self, body: dict[str, Any]) -> dict[str, Any]:
        from batchsvc.billing import administration
        from batchsvc.billing.schemas import ImportPrices

        checked = _checked(ImportPrices, body)
        return self._database.run(lambda session: administration.import_prices(session, at_command_line(), checked))

    def set_price(self, body: dict[str, Any]) -> dict[str, Any]:
        from batchsvc.billing import administration
        from batchsvc.billing.schemas import SetPrice

        checked = _checked(SetPrice, body)
        return self._database.run(lambda session: administration.set_price(session, at_command_line(), checked))

    def balance(self, project: str) -> dict[str, Any]:
        from batchsvc.billing import money_api

        with self._database.reading() as session:
            return money_api.balance(session, project)

    def post(self, kind: Movement, project: str, body: dict[str, Any]) -> dict[str, Any]:
        from batchsvc.billing import administration
        from batchsvc.billing.schemas import PostMovement

        checked = _checked(PostMovement, body)
        return self._database.run(
            lambda session: administration.post(session, at_command_line(), kind, project, checked)
        )


def _checked(model: type[B], body: dict[str, Any]) -> B:
    from pydantic import ValidationError

    try:
        return model.model_validate(body)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise CommandError(f"{where}: {first['msg']}.", Exit.USAGE) from error
