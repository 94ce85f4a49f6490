"""Prices, balances and movements as the API shows them: what the routes and the commands on a database share."""

from __future__ import annotations

from typing import Any

from sqlalchemy.orm import Session

from batchsvc.accounts import service as accounts
from batchsvc.billing import movements, price_book, queries
from batchsvc.billing.ledger import Movement
from batchsvc.billing.schemas import ImportPrices, PostMovement, SetPrice, balance_object, movement_object
from batchsvc.db.session import database_now_ms
from batchsvc.errors import NotFoundError

_CURRENT = "current"


def versions(session: Session) -> dict[str, Any]:
    """The versions of the price book."""
    return price_book.versions(session)


def book(session: Session, version: str) -> dict[str, Any]:
    """One of them, by its number or as `current`. Raises NotFoundError."""
    if version == _CURRENT:
        return price_book.shown(session)
    if not (version.isascii() and version.isdigit() and len(version) < 10):
        raise NotFoundError(f"There is no version {version[:40]} of the price book.", param="version")
    return price_book.shown(session, int(version))


def import_prices(session: Session, body: ImportPrices) -> dict[str, Any]:
    """Add a version."""
    return price_book.add(session, body.book(), body.from_)


def set_price(session: Session, body: SetPrice) -> dict[str, Any]:
    """Add a version with one row changed."""
    return price_book.set_price(session, body.model, body.tier, body.row(), body.from_)


def balance(session: Session, project: str) -> dict[str, Any]:
    """What a project, given by id or name, has at this moment."""
    row = accounts.existing_project(session, project)
    now_ms = database_now_ms(session)
    held_nanos = queries.held_by_calls(session, row.id, now_ms)
    return balance_object(row, queries.funds(session, row.id), now_ms, held_nanos)


def post(
    session: Session, kind: Movement, project: str, body: PostMovement, *, actor: str | None = None
) -> dict[str, Any]:
    """Post a movement of a project that is given by id or name."""
    row = accounts.existing_project(session, project)
    moved = movements.post(
        session,
        kind,
        row.id,
        body.amount_nanos(),
        reason=body.reason,
        key=body.key,
        actor=actor,
        batch_id=body.batch_id,
    )
    return movement_object(moved)
