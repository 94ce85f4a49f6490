"""What an operator moves in the ledger: top-ups, payments, refunds and credits, each with a reason, each once a key.

A call that repeats a key finds its posting and changes nothing. A key that named another movement is refused, so that
nobody takes a refund that never was for one that was made.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from sqlalchemy.orm import Session

from batchsvc import mode
from batchsvc.billing import correction_queries, ledger, queries
from batchsvc.billing.ledger import Movement
from batchsvc.billing.month import Month
from batchsvc.billing.tables import LedgerTransaction
from batchsvc.db.session import database_now_ms
from batchsvc.errors import InvalidRequestError, MismatchError
from batchsvc.money import MOST_NANOS, format_dollars

_REASON_CHARS, _KEY_CHARS = 255, 80


@dataclass(frozen=True, slots=True, kw_only=True)
class Moved:
    """A movement as it is stored. `is_new`: this call has stored it."""

    row: LedgerTransaction
    amount_nanos: int
    available_nanos: int
    is_new: bool
    corrects: str | None = None  # of a refund: the invoice that it takes something back from, or the month without one


def post(
    session: Session,
    kind: Movement,
    project_id: str,
    amount_nanos: int,
    *,
    reason: str,
    key: str,
    actor: str | None = None,
    batch_id: str | None = None,
) -> Moved:
    """Stores a movement once. Raises InvalidRequestError for one that can't be, MismatchError for a key that was used.

    A refund may not exceed what the batch, or without one the project, was charged, less what was given back before,
    be it by refunds or by credit notes. It takes back usage of one month, the newest of which so much is left.
    """
    _check(kind, amount_nanos, reason, key)
    if mode.is_test(project_id):
        raise InvalidRequestError("A project for tests has no money: nothing is posted to it.", param="project")
    made = partial(ledger.move, kind, project_id, amount_nanos, reason=reason, key=key, actor=actor, batch_id=batch_id)
    posting = made()
    queries.locked_funds(session, project_id)  # movements and credit notes of a project come one after the other
    known = queries.transaction(session, posting.key)
    if known is None:
        if kind == "refund":
            posting = made(corrects_month=str(_refunded_month(session, project_id, amount_nanos, batch_id)))
        elif batch_id is not None and not queries.has_batch(session, project_id, batch_id):
            raise InvalidRequestError(
                f"The project {project_id} has no batch {batch_id!r}.", code="batch_not_found", param="batch_id"
            )
        queries.insert_posting(session, posting, price_version=0, created_ms=database_now_ms(session))
    stored = known or queries.transaction(session, posting.key)
    assert stored is not None, "it was just stored"
    moved_nanos = queries.amount_nanos(session, stored.id)
    if (moved_nanos, stored.batch_id) != (amount_nanos, batch_id):
        raise MismatchError(
            f"The key {key!r} was used for a {kind} of {format_dollars(moved_nanos)}"
            f"{f' for {stored.batch_id}' if stored.batch_id else ''}: use a new key for a new one.",
            code="idempotency_key_reused",
            param="key",
        )
    available_nanos = queries.funds(session, project_id).available_nanos
    return Moved(
        row=stored,
        amount_nanos=moved_nanos,
        available_nanos=available_nanos,
        is_new=known is None,
        corrects=_corrected(session, stored),
    )


def _check(kind: str, amount_nanos: int, reason: str, key: str) -> None:
    if not 0 < amount_nanos <= MOST_NANOS:
        raise InvalidRequestError(
            f"The amount of a {kind} must be more than $0, and {format_dollars(MOST_NANOS)} at most.",
            code="invalid_amount",
            param="amount",
        )
    for name, text, most in (("reason", reason, _REASON_CHARS), ("key", key, _KEY_CHARS)):
        if not text.strip() or len(text) > most or not text.isprintable():
            raise InvalidRequestError(f"{name} must be 1 to {most} printable characters.", param=name)


def _refunded_month(session: Session, project_id: str, amount_nanos: int, batch_id: str | None) -> Month:
    """The month whose usage is refunded. Raises InvalidRequestError if there is none of which so much is left."""
    for what, which in ((batch_id, batch_id), ("the project", None)) if batch_id else (("the project", None),):
        left = queries.charged_nanos(session, project_id, which)
        if amount_nanos > left:
            raise _too_large(amount_nanos, f"{what} was charged and not yet refunded", left)
    project = correction_queries.left_by_month(session, project_id, None)
    most = 0
    for month, nanos in correction_queries.left_by_month(session, project_id, batch_id).items():
        left = min(nanos, project[month])
        if (row := correction_queries.billing_invoice(session, project_id, month)) is not None:
            left = min(left, correction_queries.left_nanos(session, row))
        if amount_nanos <= left:
            return month
        most = max(most, left)
    raise _too_large(amount_nanos, "is left to give back of any one month, that is of any one invoice", most)


def _too_large(amount_nanos: int, what: str, left: int) -> InvalidRequestError:
    return InvalidRequestError(
        f"A refund of {format_dollars(amount_nanos)} is more than {what}, which is {format_dollars(max(0, left))}.",
        code="refund_too_large",
        param="amount",
    )


def _corrected(session: Session, row: LedgerTransaction) -> str | None:
    if row.corrects_month is None:
        return None
    found = correction_queries.billing_invoice(session, row.project_id, Month.parse(row.corrects_month))
    return row.corrects_month if found is None else found.number
