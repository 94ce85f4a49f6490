"""What invoices move in the ledger: from what was used to what is owed, and back.

    invoice      receivable:<payer> -> available:<project>   the net amount, for each project on the invoice
    tax          receivable:<payer> -> tax
    rounding     receivable:<payer> -> rounding
    settlement   available:<payer>  -> receivable:<payer>    a prepaid project pays at once, and gets back at once
    credit_note  receivable:<payer> -> revenue, tax, rounding, with amounts below 0
    unbill       the first three back, when the invoice becomes void

Revenue was booked with the parts; only a credit note, a document of its own, takes some of it back.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from sqlalchemy.orm import Session

from batchsvc.billing import queries, service
from batchsvc.billing.invoice_tables import Invoice, InvoiceLine
from batchsvc.billing.ledger import REVENUE, Posting, available, receivable

TAX = "tax"
ROUNDING = "rounding"


def issue_postings(row: Invoice, lines: Iterable[InvoiceLine]) -> list[Posting]:
    """What issuing moves: from the payer's receivable, in all, exactly what is payable."""
    net: Counter[str] = Counter()
    for line in lines:
        net[line.project_id] += line.amount_nanos
    moves = [("invoice", f"invoice:{row.number}:{project}", available(project), net[project]) for project in net]
    moves.append(("tax", f"tax:{row.number}", TAX, row.tax_nanos))
    moves.append(("rounding", f"rounding:{row.number}", ROUNDING, row.rounding_nanos))
    return [_posting(row, kind, key, target, amount) for kind, key, target, amount in moves if amount]


def post_issue(session: Session, row: Invoice, lines: Iterable[InvoiceLine], now_ms: int) -> None:
    """Books an invoice that is issued."""
    _store(session, issue_postings(row, lines), now_ms)


def post_void(session: Session, row: Invoice, lines: Iterable[InvoiceLine], now_ms: int) -> None:
    """Takes back what issuing has moved."""
    back = [
        Posting(
            kind="unbill",
            key=f"unbill:{posting.key}",
            project_id=row.project_id,
            source=posting.target,
            target=posting.source,
            amount_nanos=posting.amount_nanos,
            reason=f"invoice {row.number} is void",
        )
        for posting in issue_postings(row, lines)
    ]
    _store(session, back, now_ms)


def post_settlement(session: Session, row: Invoice, now_ms: int) -> None:
    """Pays an invoice from its payer's prepaid balance."""
    settled = Posting(
        kind="settlement",
        key=f"settlement:{row.number}",
        project_id=row.project_id,
        source=available(row.project_id),
        target=receivable(row.project_id),
        amount_nanos=row.payable_nanos,
        reason=f"invoice {row.number}",
    )
    _store(session, [settled], now_ms)


def post_payment(session: Session, row: Invoice, owed_nanos: int) -> None:
    """Books the payment of what is owed on an invoice, under its number; nothing where nothing is owed."""
    if owed_nanos > 0:
        service.post_payment(
            session, row.project_id, owed_nanos, reason=f"invoice {row.number}", key=f"invoice:{row.number}"
        )


def post_credit_note(session: Session, row: Invoice, now_ms: int) -> None:
    """Takes revenue, tax and rounding back; the amounts of a credit note are below 0."""
    moves = (
        ("", REVENUE, row.net_nanos),
        ("-tax", TAX, row.tax_nanos),
        ("-rounding", ROUNDING, row.rounding_nanos),
    )
    notes = [
        _posting(row, "credit_note", f"credit_note{which}:{row.number}", target, amount)
        for which, target, amount in moves
        if amount
    ]
    _store(session, notes, now_ms)


def _posting(row: Invoice, kind: str, key: str, target: str, amount_nanos: int) -> Posting:
    return Posting(
        kind=kind,
        key=key,
        project_id=row.project_id,
        source=receivable(row.project_id),
        target=target,
        amount_nanos=amount_nanos,
        reason=f"{row.kind.replace('_', ' ')} {row.number}",
    )


def _store(session: Session, postings: list[Posting], now_ms: int) -> None:
    for posting in postings:
        queries.insert_posting(session, posting, price_version=0, created_ms=now_ms)
