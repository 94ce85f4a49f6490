"""Invoices as the API and the command line ask for them: checked bodies in, objects and files out."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal, assert_never, get_args

from sqlalchemy.orm import Session

from batchsvc.billing import invoice as rules
from batchsvc.billing import invoice_csv, invoice_draft
from batchsvc.billing import invoice_queries as queries
from batchsvc.billing import invoice_service as service
from batchsvc.billing.invoice_document import document
from batchsvc.billing.invoice_schemas import (
    Change,
    ChangeParty,
    DraftInvoice,
    invoice_object,
    party_object,
    statement_object,
)
from batchsvc.billing.month import Month
from batchsvc.billing.statement import statement
from batchsvc.errors import InvalidRequestError
from batchsvc.settings import Settings

Action = Literal["issue", "pay", "void", "dispute", "credit_note"]
Format = Literal["html", "pdf", "csv"]
MEDIA_TYPES: dict[str, str] = {
    "html": "text/html; charset=utf-8",
    "pdf": "application/pdf",
    "csv": "text/csv; charset=utf-8",
}


def party(session: Session, project: str) -> dict[str, Any]:
    """To whom a project is billed."""
    return party_object(*invoice_draft.show_party(session, project))


def change_party(session: Session, project: str, body: ChangeParty) -> dict[str, Any]:
    """Says to whom a project is billed."""
    changes = body.model_dump(exclude_unset=True)
    if "tax_rate" in changes:
        percent = changes.pop("tax_rate")
        changes["tax_rate_ppm"] = None if percent is None else rules.tax_rate_ppm(percent)
    return party_object(*invoice_draft.change_party(session, project, changes))


def draft(session: Session, settings: Settings, body: DraftInvoice) -> dict[str, Any]:
    """Drafts a month."""
    made = invoice_draft.draft(
        session, settings, body.project, Month.parse(body.month), exchange_rate=body.exchange_rate
    )
    return invoice_object(made, queries.lines(session, made.id))


def act(session: Session, settings: Settings, name: str, action: Action, body: Change) -> dict[str, Any]:
    """Does what can be done with an invoice. `void`, `dispute` and `credit_note` need a reason."""
    match action:
        case "issue":
            changed = service.issue(session, name)
        case "pay":
            changed = service.pay(session, name, body.reason)
        case "void":
            changed = service.void(session, name, _reason(body))
        case "dispute":
            changed = service.dispute(session, name, _reason(body))
        case "credit_note":
            changed = service.credit_note(
                session, settings, name, amount=body.amount, reason=_reason(body), key=body.key
            )
        case _:
            assert_never(action)
    return invoice_object(changed, queries.lines(session, changed.id))


def show(session: Session, name: str) -> dict[str, Any]:
    """One invoice with its lines."""
    found = service.show(session, name)
    return invoice_object(found, queries.lines(session, found.id))


def listing(session: Session, *, project: str | None, month: str | None, status: str | None) -> dict[str, Any]:
    """Invoices and credit notes, without their lines."""
    found = service.list_invoices(session, project=project, month=month, status=status)
    return {"object": "list", "data": [invoice_object(row) for row in found]}


def content(session: Session, name: str, form: str) -> Iterator[bytes]:
    """An invoice as a file: `html`, `pdf` or `csv`."""
    if form not in get_args(Format):
        raise InvalidRequestError(f"format can't be {form!r}: it is html, pdf or csv.", param="format")
    found = service.show(session, name)
    if form == "csv":
        return (text.encode() for text in invoice_csv.text(invoice_csv.rows(session, found)))
    said = document(found, queries.lines(session, found.id))
    if form == "html":
        from batchsvc.billing.invoice_html import html

        return iter([html(said).encode()])
    from batchsvc.billing.invoice_pdf import pdf  # loads fonts and shapers, which few processes need

    return iter([pdf(said)])


def show_statement(session: Session, project: str, month: str) -> dict[str, Any]:
    """A project's account over a month."""
    return statement_object(statement(session, project, Month.parse(month)))


def _reason(body: Change) -> str:
    if body.reason is None:
        raise InvalidRequestError("This needs a reason.", code="missing_required_parameter", param="reason")
    return body.reason
