"""Prices at the door and postings by name: what batches and workers call; each runs in the caller's transaction."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple, Protocol

from sqlalchemy.orm import Session

from batchsvc.accounts import service as accounts
from batchsvc.billing import ledger, limits, movements, pricing, queries
from batchsvc.billing.limits import Limits
from batchsvc.billing.movements import Moved
from batchsvc.db.session import database_now_ms
from batchsvc.errors import InvalidRequestError
from batchsvc.money import Rates


class MonthSpending(NamedTuple):
    """What a project has spent of a limit (`budget` or `prepaid`) in the month of its newest charge; see `balances`."""

    project_id: str
    limit: str
    month: int
    spent_nanos: int
    limit_nanos: int


class BilledBatch(Protocol):
    """What billing needs to know of a batch (the table's class fits)."""

    @property
    def id(self) -> str: ...
    @property
    def project_id(self) -> str: ...
    @property
    def api_key_id(self) -> str: ...
    @property
    def model_id(self) -> str | None: ...
    @property
    def tier(self) -> str: ...
    @property
    def endpoint(self) -> str: ...
    @property
    def price_version(self) -> int: ...
    @property
    def reserved_nanos(self) -> int: ...
    @property
    def fin_epoch(self) -> int: ...


class BilledPart(Protocol):
    """What billing needs to know of a part (the table's class fits)."""

    @property
    def id(self) -> str: ...
    @property
    def lines_ok(self) -> int: ...
    @property
    def input_tokens(self) -> int: ...
    @property
    def cached_tokens(self) -> int: ...
    @property
    def output_tokens(self) -> int: ...
    @property
    def cost_nanos(self) -> int: ...
    @property
    def created_ms(self) -> int: ...


def seed_prices(session: Session) -> None:
    """Puts the shipped price book into the database; a book that is there stays as it is."""
    publish_book(session, pricing.shipped_book())


def publish_book(session: Session, book: pricing.PriceBook, effective_ms: int | None = None) -> None:
    """Adds a version of the price book, in force from now or another time on. One that is there stays as it is."""
    if queries.has_version(session, book.version):
        return
    now = database_now_ms(session)
    queries.insert_prices(
        session,
        [
            {
                "version": book.version,
                "model": model,
                "tier": tier,
                "kind": kind,
                "nanos_per_mtok": getattr(rates, kind),
                "effective_ms": now if effective_ms is None else effective_ms,
            }
            for (model, tier), rates in book.rates.items()
            for kind in pricing.KINDS
        ],
    )


def current_version(session: Session, at_ms: int | None = None) -> int:
    """Version of the price book in force now, or at another time. Raises InvalidRequestError when there is none."""
    version = queries.version_in_force(session, database_now_ms(session) if at_ms is None else at_ms)
    if version is None:
        raise InvalidRequestError(
            "There is no price book: nothing can run until prices are set.", code="model_not_priced"
        )
    return version


def has_tier(session: Session, tier: str, version: int) -> bool:
    """Whether anything has a price in this tier."""
    return queries.has_tier(session, version, tier)


def rates_for(session: Session, model_id: str, tier: str, version: int) -> Rates:
    """Rates of a model, or of `default`. Raises InvalidRequestError (code `model_not_priced`) if neither has them."""
    for model in (model_id, pricing.DEFAULT_MODEL):
        found = queries.rates_of(session, version, model, tier)
        if set(found) == set(pricing.KINDS) and min(found.values()) >= 0:
            return Rates(**found)
    raise InvalidRequestError(
        f"The model {model_id!r} has no price for the tier {tier!r} in version {version} of the price book.",
        code="model_not_priced",
        param="model",
    )


def post_reserve(session: Session, batch: BilledBatch) -> bool:
    """Reserves `batch.reserved_nanos`. False when it was reserved before."""
    posting = ledger.reserve(batch.project_id, batch.id, batch.reserved_nanos)
    now = database_now_ms(session)
    return queries.insert_posting(session, posting, price_version=batch.price_version, created_ms=now)


def post_extend(session: Session, batch: BilledBatch, amount_nanos: int, total_nanos: int) -> bool:
    """Reserves more for a batch, which makes `total_nanos` in all. False when that was done before."""
    posting = ledger.extend(batch.project_id, batch.id, amount_nanos, total_nanos)
    now = database_now_ms(session)
    return queries.insert_posting(session, posting, price_version=batch.price_version, created_ms=now)


def limits_of(session: Session, project_id: str) -> Limits:
    """The limits of a project."""
    budget_nanos, is_prepaid = accounts.money_limits(session, project_id)
    return Limits(budget_nanos=budget_nanos, is_prepaid=is_prepaid)


def room_nanos(session: Session, project_id: str) -> int | None:
    """What a project may reserve now; None: as much as it likes. What is decided by it is decided in this transaction:
    it holds the project's balance, if the project has a limit at all."""
    found = limits_of(session, project_id)
    if found.is_none:
        return None
    funds, now_ms = queries.locked_funds(session, project_id), database_now_ms(session)
    room = limits.room_nanos(found, funds, now_ms)
    return None if room is None else max(0, room - queries.held_by_calls(session, project_id, now_ms))


def held_by_calls_nanos(session: Session, project_id: str) -> int:
    """What calls that run hold of a project's limits: much of it comes back within seconds, as they cost less."""
    return queries.held_by_calls(session, project_id, database_now_ms(session))


def month_spending(session: Session, project_ids: Iterable[str]) -> Iterator[MonthSpending]:
    """What these projects have spent of the limits of a month: of their budget, and of what they had at hand in it."""
    found = {row.id: row for row in accounts.limited_projects(session, project_ids)}
    for project_id, funds in queries.funds_of(session, found).items():
        project = found[project_id]
        if project.budget_nanos is not None:
            yield MonthSpending(project_id, "budget", funds.month, funds.month_nanos, project.budget_nanos)
        if project.is_prepaid:
            had = funds.available_nanos + funds.reserved_nanos + funds.month_nanos
            yield MonthSpending(project_id, "prepaid", funds.month, funds.month_nanos, had)


def post_part(session: Session, batch: BilledBatch, part: BilledPart, *, model_id: str | None = None) -> bool:
    """Adds a part's usage row and moves its cost from `reserved` to `revenue`. False when that was done before.

    `model_id`: what the part was run on, if that isn't the one model of its batch.
    """
    posting = ledger.part(batch.project_id, batch.id, part.id, part.cost_nanos)
    if not queries.insert_posting(session, posting, price_version=batch.price_version, created_ms=part.created_ms):
        return False
    queries.insert_usage(session, _usage(batch, part, model_id, key=part.id, sign=1, created_ms=part.created_ms))
    return True


def post_void(session: Session, batch: BilledBatch, part: BilledPart, *, model_id: str | None = None) -> bool:
    """Takes a damaged part's usage and posting back by rows of their own. False when that was done before."""
    posting = ledger.void(batch.project_id, batch.id, part.id, part.cost_nanos)
    now = database_now_ms(session)
    if not queries.insert_posting(session, posting, price_version=batch.price_version, created_ms=now):
        return False
    queries.insert_usage(session, _usage(batch, part, model_id, key=posting.key, sign=-1, created_ms=now))
    return True


def post_release(session: Session, batch: BilledBatch) -> bool:
    """Gives what the batch still holds back to the project. False when this attempt released before."""
    held = queries.held_nanos(session, batch.project_id, batch.id)
    posting = ledger.release(batch.project_id, batch.id, batch.fin_epoch, held)
    now = database_now_ms(session)
    return queries.insert_posting(session, posting, price_version=batch.price_version, created_ms=now)


def post_topup(
    session: Session, project_id: str, amount_nanos: int, *, reason: str, key: str, actor: str | None = None
) -> Moved:
    """Adds money that a prepaid project may spend."""
    return movements.post(session, "topup", project_id, amount_nanos, reason=reason, key=key, actor=actor)


def post_payment(
    session: Session,
    project_id: str,
    amount_nanos: int,
    *,
    reason: str,
    key: str,
    batch_id: str | None = None,
    actor: str | None = None,
) -> Moved:
    """Notes that money came for what was invoiced."""
    return movements.post(
        session, "payment", project_id, amount_nanos, reason=reason, key=key, batch_id=batch_id, actor=actor
    )


def post_refund(
    session: Session,
    project_id: str,
    amount_nanos: int,
    *,
    reason: str,
    key: str,
    batch_id: str | None = None,
    actor: str | None = None,
) -> Moved:
    """Takes a charge back. Raises InvalidRequestError if it is more than was charged and not refunded yet."""
    return movements.post(
        session, "refund", project_id, amount_nanos, reason=reason, key=key, batch_id=batch_id, actor=actor
    )


def post_credit(
    session: Session,
    project_id: str,
    amount_nanos: int,
    *,
    reason: str,
    key: str,
    batch_id: str | None = None,
    actor: str | None = None,
) -> Moved:
    """Gives a project money without a charge behind it."""
    return movements.post(
        session, "credit", project_id, amount_nanos, reason=reason, key=key, batch_id=batch_id, actor=actor
    )


def _usage(
    batch: BilledBatch, part: BilledPart, model_id: str | None, *, key: str, sign: int, created_ms: int
) -> dict[str, Any]:
    return {
        "part_id": key,
        "project_id": batch.project_id,
        "api_key_id": batch.api_key_id,
        "batch_id": batch.id,
        "model": model_id or batch.model_id or "",
        "tier": batch.tier,
        "endpoint": batch.endpoint,
        "price_version": batch.price_version,
        "created_ms": created_ms,
        "requests": sign * part.lines_ok,
        "input_tokens": sign * part.input_tokens,
        "cached_tokens": sign * part.cached_tokens,
        "output_tokens": sign * part.output_tokens,
        "cost_nanos": sign * part.cost_nanos,
    }
