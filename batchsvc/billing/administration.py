"""What an operator changes about money, with its audit row in the same transaction: prices, movements, invoices.

Routes and commands come through here; a call that changes nothing, because it was made before, leaves no row.
"""

from __future__ import annotations

from typing import Any

from sqlalchemy.orm import Session

from batchsvc.audit.actions import Action as Audited
from batchsvc.audit.actor import Actor, ActorKind
from batchsvc.audit.service import Details, record
from batchsvc.billing import invoice_api, invoice_queries, invoice_service, money_api, queries
from batchsvc.billing.invoice_api import Action
from batchsvc.billing.invoice_schemas import Change, ChangeParty, DraftInvoice
from batchsvc.billing.ledger import Movement
from batchsvc.billing.schemas import ImportPrices, PostMovement, SetPrice
from batchsvc.settings import Settings

_MOVEMENTS: dict[str, Audited] = {
    "topup": Audited.TOPUP_POSTED,
    "payment": Audited.PAYMENT_POSTED,
    "refund": Audited.REFUND_POSTED,
    "credit": Audited.CREDIT_POSTED,
}
_ACTIONS: dict[str, Audited] = {
    "issue": Audited.INVOICE_ISSUED,
    "pay": Audited.INVOICE_PAID,
    "void": Audited.INVOICE_VOIDED,
    "dispute": Audited.INVOICE_DISPUTED,
    "credit_note": Audited.CREDIT_NOTE_ISSUED,
}


def import_prices(session: Session, actor: Actor, body: ImportPrices) -> dict[str, Any]:
    """Add a version of the price book."""
    known = set(queries.versions(session))
    book = money_api.import_prices(session, body)
    if book["version"] not in known:
        _record_prices(session, actor, book, {"models": sorted(book["models"])})
    return book


def set_price(session: Session, actor: Actor, body: SetPrice) -> dict[str, Any]:
    """Add a version of the price book with one row changed."""
    book = money_api.set_price(session, body)
    _record_prices(session, actor, book, {"model": body.model, "tier": body.tier, **body.row()})
    return book


def post(session: Session, actor: Actor, kind: Movement, project: str, body: PostMovement) -> dict[str, Any]:
    """Post a movement of a project that is given by id or name. The ledger names the key that asked, if one did."""
    by_key = actor.id if actor.kind == ActorKind.API_KEY else None
    moved = money_api.post(session, kind, project, body, actor=by_key)
    if moved["is_new"]:
        details: Details = {name: moved[name] for name in ("amount_nanos", "batch_id", "reason", "key")}
        record(session, actor, _MOVEMENTS[kind], moved["id"], project_id=moved["project_id"], details=details)
    return moved


def change_party(session: Session, actor: Actor, project: str, body: ChangeParty) -> dict[str, Any]:
    """Say to whom a project is billed."""
    party = invoice_api.change_party(session, project, body)
    project_id = str(party["project_id"])
    details: Details = {"changed": sorted(body.model_fields_set)}  # names and addresses stay in their own table
    record(session, actor, Audited.PARTY_UPDATED, project_id, project_id=project_id, details=details)
    return party


def draft(session: Session, actor: Actor, settings: Settings, body: DraftInvoice) -> dict[str, Any]:
    """Draft the invoice of a month."""
    made = invoice_api.draft(session, settings, body)
    _record_invoice(session, actor, Audited.INVOICE_DRAFTED, made, {})
    return made


def act(session: Session, actor: Actor, settings: Settings, name: str, action: Action, body: Change) -> dict[str, Any]:
    """Issue, pay, void, dispute or credit an invoice."""
    before = invoice_service.show(session, name)
    status, notes = before.status, _notes(session, before.number)
    made = invoice_api.act(session, settings, name, action, body)
    is_new = made["id"] not in notes if action == "credit_note" else made["status"] != status
    if is_new:
        details: Details = {"reason": body.reason} if body.reason else {}
        _record_invoice(session, actor, _ACTIONS[action], made, details)
    return made


def _notes(session: Session, number: str | None) -> set[str]:
    return set() if number is None else {row.id for row in invoice_queries.credit_notes(session, number)}


def _record_prices(session: Session, actor: Actor, book: dict[str, Any], details: Details) -> None:
    at: Details = {"effective_at": book["effective_at"], **details}
    record(session, actor, Audited.PRICES_INSTALLED, f"price_book_{book['version']}", details=at)


def _record_invoice(session: Session, actor: Actor, action: Audited, invoice: dict[str, Any], details: Details) -> None:
    about: Details = {"number": invoice["number"], "month": invoice["month"], **details}
    record(session, actor, action, invoice["id"], project_id=invoice["project_id"], details=about)
