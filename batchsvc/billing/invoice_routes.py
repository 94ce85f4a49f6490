"""Routes of invoices and statements, for the admin key."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from fastapi import APIRouter, Query
from fastapi.responses import StreamingResponse

from batchsvc.accounts.caller import AdminDep
from batchsvc.billing import administration
from batchsvc.billing import invoice_api as api
from batchsvc.billing.invoice_api import Action, Format
from batchsvc.billing.invoice_schemas import Change, ChangeParty, DraftInvoice
from batchsvc.http.deps import Context, ContextDep
from batchsvc.http.description import sends

router = APIRouter(prefix="/v1/admin")


@router.get("/projects/{project}/party")
def party(_admin: AdminDep, context: ContextDep, project: str) -> dict[str, Any]:
    """To whom a project is billed."""
    with context.db.reading() as session:
        return api.party(session, project)


@router.post("/projects/{project}/party")
def change_party(admin: AdminDep, context: ContextDep, project: str, body: ChangeParty) -> dict[str, Any]:
    """Say to whom a project is billed, and on which terms."""
    with context.db.transaction() as session:
        return administration.change_party(session, admin.actor, project, body)


@router.post("/invoices")
def draft(admin: AdminDep, context: ContextDep, body: DraftInvoice) -> dict[str, Any]:
    """Draft the invoice of a month; a draft that there was is replaced."""
    with context.db.transaction() as session:
        return administration.draft(session, admin.actor, context.settings, body)


@router.get("/invoices")
def listing(
    _admin: AdminDep,
    context: ContextDep,
    project: str | None = None,
    month: str | None = None,
    status: str | None = None,
) -> dict[str, Any]:
    """Invoices and credit notes, oldest first."""
    with context.db.reading() as session:
        return api.listing(session, project=project, month=month, status=status)


@router.get("/invoices/{name}")
def show(_admin: AdminDep, context: ContextDep, name: str) -> dict[str, Any]:
    """One invoice, by its id or number, with its lines."""
    with context.db.reading() as session:
        return api.show(session, name)


@router.get(
    "/invoices/{name}/content",
    response_class=StreamingResponse,
    responses=sends(*api.MEDIA_TYPES.values()),
)
def content(
    _admin: AdminDep, context: ContextDep, name: str, form: Format = Query(default="html", alias="format")
) -> StreamingResponse:
    """One invoice as a file: html, pdf or csv."""
    chunks = _content(context, name, form)
    first = next(chunks)  # an error is answered as one, before the answer begins
    return StreamingResponse(_joined(first, chunks), media_type=api.MEDIA_TYPES[form])


@router.post("/invoices/{name}/{action}")
def act(admin: AdminDep, context: ContextDep, name: str, action: Action, body: Change) -> dict[str, Any]:
    """Issue, pay, void, dispute or credit an invoice."""
    with context.db.transaction() as session:
        return administration.act(session, admin.actor, context.settings, name, action, body)


@router.get("/projects/{project}/statement")
def statement(_admin: AdminDep, context: ContextDep, project: str, month: str) -> dict[str, Any]:
    """A project's account over a month: opening, movements, closing."""
    with context.db.snapshot() as session:
        return api.show_statement(session, project, month)


def _content(context: Context, name: str, form: Format) -> Iterator[bytes]:
    with context.db.reading() as session:
        yield from api.content(session, name, form)


def _joined(first: bytes, rest: Iterator[bytes]) -> Iterator[bytes]:
    yield first
    yield from rest
