"""Versions of the price book: list them, add a whole one, or one that differs from the book in force by one row.

A version is never changed, by nobody: triggers of the database see to it. Batches keep the version that was in force
when they were created; when two versions come into force at the same millisecond, the higher one holds.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from sqlalchemy.orm import Session

from batchsvc.billing import pricing, queries, service
from batchsvc.billing.pricing import PriceBook
from batchsvc.db.session import database_now_ms
from batchsvc.errors import InvalidRequestError, NotFoundError
from batchsvc.money import Rates


def versions(session: Session) -> dict[str, Any]:
    """All versions, and which one is in force now."""
    now = database_now_ms(session)
    in_force = queries.version_in_force(session, now)
    return {
        "object": "list",
        "data": [
            {"object": "price_book", "version": version, "effective_at": ms // 1000, "is_in_force": version == in_force}
            for version, ms in queries.versions(session).items()
        ],
    }


def shown(session: Session, version: int | None = None) -> dict[str, Any]:
    """A version as it was imported; without a number, the one in force. Raises NotFoundError."""
    wanted = queries.version_in_force(session, database_now_ms(session)) if version is None else version
    if wanted is None or not queries.has_version(session, wanted):
        raise NotFoundError(f"There is no version {wanted} of the price book.", param="version")
    return {
        "object": "price_book",
        "version": wanted,
        "effective_at": queries.versions(session)[wanted] // 1000,
        "unit": "nano-dollars per million tokens",
        "models": pricing.as_json(_book(session, wanted)),
    }


def add(session: Session, data: Mapping[str, Any], from_text: str | None = None) -> dict[str, Any]:
    """Adds a book, under its own number or the next one. The same book again changes nothing."""
    queries.lock_prices(session)
    book = pricing.parse_book({"version": _next_version(session), **data})
    if queries.has_version(session, book.version):
        if _book(session, book.version).rates != book.rates:
            raise InvalidRequestError(
                f"Version {book.version} of the price book exists and is never changed: leave `version` out, "
                "and the book becomes the next one.",
                code="price_version_exists",
                param="version",
            )
        return shown(session, book.version)
    service.publish_book(session, book, _effective_ms(session, from_text))
    return shown(session, book.version)


def set_price(session: Session, model: str, tier: str, row: Mapping[str, Any], from_text: str | None) -> dict[str, Any]:
    """Adds a version that is the book in force then, but for one row."""
    queries.lock_prices(session)
    effective_ms = _effective_ms(session, from_text)
    base = queries.version_in_force(session, effective_ms)
    rates = {} if base is None else dict(_book(session, base).rates)
    changed = pricing.parse_book({"version": _next_version(session), "models": {model: {tier: row}}})
    book = PriceBook(changed.version, rates | dict(changed.rates))
    service.publish_book(session, book, effective_ms)
    return shown(session, book.version)


def _book(session: Session, version: int) -> PriceBook:
    rows: dict[tuple[str, str], dict[str, int]] = {}
    for price in queries.prices(session, version):
        rows.setdefault((price.model, price.tier), {})[price.kind] = price.nanos_per_mtok
    return PriceBook(version, {where: Rates(**kinds) for where, kinds in rows.items()})


def _next_version(session: Session) -> int:
    return max(queries.versions(session), default=0) + 1


def _effective_ms(session: Session, text: str | None) -> int:
    now = database_now_ms(session)
    if text is None:
        return now
    try:
        moment = datetime.fromisoformat(text)
    except ValueError as error:
        raise InvalidRequestError(
            f"from: {text[:40]!r} is no date such as 2027-01-01, or time such as 2027-01-01T06:00:00Z.",
            code="invalid_value",
            param="from",
        ) from error
    moment = moment if moment.tzinfo else moment.replace(tzinfo=UTC)
    effective_ms = int(moment.timestamp()) * 1000 + moment.microsecond // 1000
    if effective_ms < now:
        raise InvalidRequestError(
            f"from: {text} is past, and prices are never changed for what was: leave it out for now.",
            code="invalid_value",
            param="from",
        )
    return effective_ms
