"""Routes of prices, balances, and what an operator posts to the ledger; for the admin key."""

from __future__ import annotations

from typing import Any, get_args

from fastapi import APIRouter

from batchsvc.accounts.caller import AdminDep
from batchsvc.billing import administration
from batchsvc.billing import money_api as api
from batchsvc.billing.ledger import Movement
from batchsvc.billing.schemas import ImportPrices, PostMovement, SetPrice
from batchsvc.http.deps import ContextDep

router = APIRouter(prefix="/v1/admin")


@router.get("/prices")
def list_versions(_admin: AdminDep, context: ContextDep) -> dict[str, Any]:
    """The versions of the price book, and which one is in force."""
    with context.db.reading() as session:
        return api.versions(session)


@router.get("/prices/{version}")
def show_version(_admin: AdminDep, context: ContextDep, version: str) -> dict[str, Any]:
    """A version of the price book, or `current`."""
    with context.db.reading() as session:
        return api.book(session, version)


@router.post("/prices")
def import_prices(admin: AdminDep, context: ContextDep, body: ImportPrices) -> dict[str, Any]:
    """Add a version of the price book. The same one again changes nothing."""
    return context.db.run(lambda session: administration.import_prices(session, admin.actor, body))


@router.post("/prices/rows")
def set_price(admin: AdminDep, context: ContextDep, body: SetPrice) -> dict[str, Any]:
    """Add a version that differs from the book in force by one row."""
    return context.db.run(lambda session: administration.set_price(session, admin.actor, body))


@router.get("/projects/{project}/balance")
def balance(_admin: AdminDep, context: ContextDep, project: str) -> dict[str, Any]:
    """What a project has, holds and may spend now."""
    with context.db.reading() as session:
        return api.balance(session, project)


def _movement(kind: Movement) -> None:
    def post(admin: AdminDep, context: ContextDep, project: str, body: PostMovement) -> dict[str, Any]:
        return context.db.run(lambda session: administration.post(session, admin.actor, kind, project, body))

    router.add_api_route(f"/projects/{{project}}/{kind}s", post, methods=["POST"], response_model=None)


for _kind in get_args(Movement):
    _movement(_kind)
