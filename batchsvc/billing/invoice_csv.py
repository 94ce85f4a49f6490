"""An invoice as CSV: a row for every part that it bills, so that each nano-dollar can be followed to its batch."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Iterator
from itertools import chain

from sqlalchemy.orm import Session

from batchsvc.billing import invoice_queries as queries
from batchsvc.billing.invoice_draft import GOODWILL
from batchsvc.billing.invoice_tables import Invoice
from batchsvc.billing.month import Month, iso_time

COLUMNS = (
    "invoice",
    "kind",
    "project_id",
    "batch_id",
    "part_id",
    "committed_at",
    "model",
    "tier",
    "price_version",
    "requests",
    "input_tokens",
    "cached_tokens",
    "output_tokens",
    "amount_nanos",
    "corrects",
)


def rows(session: Session, row: Invoice) -> Iterator[tuple[object, ...]]:
    """The parts of an invoice, then what it gives back; `amount_nanos` adds up to its net amount.

    Usage is append-only and nothing is added to a closed month, so these are the rows that the invoice was made of;
    what they correct was noted when it was made.
    """
    name = row.number or row.id
    if row.kind == "credit_note" and row.corrects:
        yield (name, "credit", row.project_id, "", "", "", "", "", "", 0, 0, 0, 0, row.net_nanos, row.corrects)
        return
    month, projects = Month.parse(row.month), row.project_ids
    corrects = queries.corrections(session, row.id)
    for use in queries.usage_details(session, projects, month):
        yield (
            name,
            "reversal" if use.part_id.startswith("void:") else "usage",
            use.project_id,
            use.batch_id,
            use.part_id.removeprefix("void:"),
            iso_time(use.created_ms),
            use.model,
            use.tier,
            use.price_version,
            use.requests,
            use.input_tokens,
            use.cached_tokens,
            use.output_tokens,
            use.cost_nanos,
            corrects.get(use.part_id, ""),
        )
    for back in queries.given_back(session, projects, month):
        kind = GOODWILL if back.kind == "credit" else back.kind
        counts = (0, 0, 0, 0, back.amount_nanos, corrects.get(back.key, ""))
        yield (name, kind, back.project_id, back.batch_id or "", "", iso_time(back.created_ms), "", "", "", *counts)


def text(found: Iterable[tuple[object, ...]]) -> Iterator[str]:
    """The lines of the file, its head first."""
    for row in chain((COLUMNS,), found):
        buffer = io.StringIO()
        csv.writer(buffer, lineterminator="\n").writerow(row)
        yield buffer.getvalue()
