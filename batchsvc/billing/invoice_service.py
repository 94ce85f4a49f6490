"""What can be done with invoices: issue a draft under the next number, and what follows.

1. `draft` (billing/invoice_draft.py) adds up a month of a project.
2. `issue` takes the next number in its own transaction, once the month is closed. From then on nothing of the invoice
   changes but its state: triggers of the database refuse it.
3. `pay`, `void` and `dispute` move the state as billing/invoice.py allows; `credit_note` corrects an issued invoice
   by a document with a number of its own.

A month is closed when no transaction that began in it can still be under way, so nothing is added to it any more.
What is taken back later stands in the month in which that happens and names the invoice that it corrects.

In the ledger an invoice moves what was used into what is owed: receivable:<payer> -> available:<project> for the net
amount of each project, receivable:<payer> -> tax and -> rounding for the rest. A payment settles the receivable.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sqlalchemy.orm import Session

from batchsvc.accounts import service as accounts
from batchsvc.billing import correction_queries
from batchsvc.billing import invoice as rules
from batchsvc.billing import invoice_postings as postings
from batchsvc.billing import invoice_queries as queries
from batchsvc.billing import queries as money
from batchsvc.billing.invoice import InvoiceStatus, Line, Posted, Terms, Totals
from batchsvc.billing.invoice_draft import as_lines, month_corrections, month_lines, seller_of, store, terms_of
from batchsvc.billing.invoice_tables import Invoice
from batchsvc.billing.ledger import receivable
from batchsvc.billing.month import Month, iso_time
from batchsvc.db.session import database_now_ms
from batchsvc.errors import InvalidRequestError, MismatchError, NotFoundError
from batchsvc.money import format_dollars
from batchsvc.settings import Settings

CLOSES_AFTER_MS = 600_000  # the longest that a transaction can go on is a fraction of this


# -- from draft to issued ------------------------------------------------------------------------------------------


def issue(session: Session, name: str) -> Invoice:
    """Issues a draft under the next number of its seller; issuing it again changes nothing."""
    found = locked(session, name)
    if found.status != InvoiceStatus.DRAFT:
        return found
    now, month = database_now_ms(session), Month.parse(found.month)
    closes_ms = month.end_ms + CLOSES_AFTER_MS
    if now < closes_ms:
        raise InvalidRequestError(
            f"{month} isn't closed yet: its invoice can be issued from {iso_time(closes_ms)} on.", code="month_open"
        )
    if found.created_ms < closes_ms:
        raise InvalidRequestError(
            f"This draft was made before {month} was closed: `batchsvc invoice draft` makes a new one.",
            code="draft_outdated",
        )
    _check_parties(found)
    stored = queries.lines(session, found.id)
    billed = queries.billed(session, found.project_ids)
    now_lines = month_lines(session, found.project_ids, month, billed)
    now_corrections = month_corrections(session, found.project_ids, month, billed)
    if as_lines(stored) != now_lines or queries.corrections(session, found.id) != now_corrections:
        raise InvalidRequestError(
            "What this draft says has changed since, such as which invoice it corrects: draft it again.",
            code="draft_outdated",
        )
    _number(session, found, now, kind="" if found.net_nanos >= 0 else "-CN")
    if owner := queries.claim(session, found.project_ids, found.month, found.id):
        raise InvalidRequestError(f"{month} is billed by another invoice ({owner}).", code="already_billed")
    postings.post_issue(session, found, stored, now)
    if accounts.existing_project(session, found.project_id).is_prepaid:
        postings.post_settlement(session, found, now)
        _move(session, found, InvoiceStatus.PAID, "from the prepaid balance")
    return found


# -- after that ----------------------------------------------------------------------------------------------------


def pay(session: Session, name: str, reason: str | None = None) -> Invoice:
    """Books the payment of what is still owed on an invoice; paying it again changes nothing.

    Money that came before and isn't needed for other invoices, a `payment` or a credit note, is used first: what was
    booked is never booked twice.
    """
    found = locked(session, name)
    if found.status == InvoiceStatus.PAID:
        return found
    if found.kind == "credit_note":
        raise InvalidRequestError(f"{found.number} is a credit note: nothing is to be paid on it.")
    _hold_funds(session, [found.project_id])  # payments of a project come one after the other
    on_account = max(0, credit_on_account_nanos(session, found.project_id))
    _move(session, found, InvoiceStatus.PAID, reason)
    postings.post_payment(session, found, owed_nanos(session, found) - on_account)
    return found


def credit_on_account_nanos(session: Session, project_id: str) -> int:
    """What a project has paid, or was credited, beyond its paid invoices: it goes into what it pays next."""
    owed = sum(owed_nanos(session, row) for row in queries.open_invoices(session, project_id))
    return money.account_nanos(session, receivable(project_id)) + owed


def void(session: Session, name: str, reason: str) -> Invoice:
    """Takes an issued invoice back as a whole: its number stays, its months can be billed again."""
    found = locked(session, name)
    if found.status == InvoiceStatus.VOID:
        return found
    if found.kind == "credit_note" and found.corrects is not None:
        raise InvalidRequestError(f"The credit note {found.number} can't be made void: invoice the amount instead.")
    if found.number and (notes := queries.credit_notes(session, found.number)):
        raise InvalidRequestError(
            f"The invoice {found.number} was corrected by {notes[0].number}: a credit note over the rest takes it back."
        )
    _move(session, found, InvoiceStatus.VOID, reason)
    if found.payable_nanos < 0:
        _check_unused(session, found)
    postings.post_void(session, found, queries.lines(session, found.id), database_now_ms(session))
    queries.give_back_claims(session, found.id)
    return found


def _check_unused(session: Session, note: Invoice) -> None:
    """Raises InvalidRequestError if what the note of a month has credited went into invoices that are paid."""
    _hold_funds(session, [note.project_id])  # nothing is paid with it meanwhile
    rest_nanos = credit_on_account_nanos(session, note.project_id) + note.payable_nanos
    if rest_nanos < 0:
        raise InvalidRequestError(
            f"{note.number} can't be made void, because {format_dollars(-rest_nanos)} of it paid for other invoices:"
            " post a payment of that amount first."
        )


def dispute(session: Session, name: str, reason: str) -> Invoice:
    """Marks an issued invoice as disputed."""
    found = locked(session, name)
    if found.status != InvoiceStatus.DISPUTED:
        _move(session, found, InvoiceStatus.DISPUTED, reason)
    return found


def credit_note(
    session: Session, settings: Settings, name: str, *, amount: str | None, reason: str, key: str | None = None
) -> Invoice:
    """A credit note over an amount in the invoice's currency, tax included, or over all that is left of it.

    What refunds and reversals gave back of the invoice meanwhile isn't left. A `key` makes the call repeatable; with
    other arguments it raises MismatchError.
    """
    corrected = locked(session, name)
    terms = terms_of(corrected)
    asked = None if amount is None else rules.parse_units(amount, name="amount", exponent=terms.exponent)
    if key is not None and (made := queries.invoice_by_key(session, key)) is not None:
        _check_same(session, made, corrected, asked, reason)
        return made
    if corrected.kind != "invoice" or corrected.status in (InvoiceStatus.DRAFT, InvoiceStatus.VOID):
        raise InvalidRequestError(
            f"A credit note corrects an invoice that was issued: {name} is a {corrected.kind.replace('_', ' ')},"
            f" {corrected.status}."
        )
    _hold_funds(session, corrected.project_ids)  # no refund of the same charge meanwhile
    left = _left(session, corrected)
    wanted = -left.amounts.payable_minor if asked is None else asked
    if not 0 < wanted <= -left.amounts.payable_minor:
        raise InvalidRequestError(
            f"Of {corrected.number}, {_money(-left.amounts.payable_minor, terms)} can still be credited,"
            f" not {_money(wanted, terms)}.",
            param="amount",
        )
    note = left
    if wanted < -left.amounts.payable_minor:
        net_nanos, amounts = rules.part_of_gross(-wanted, terms)
        note = _Note(net_nanos, amounts, rules.posted(net_nanos, amounts, terms))
    line = Line(
        project_id=corrected.project_id, kind="credit", amount_nanos=note.net_nanos, reverses=str(corrected.number)
    )
    made = store(
        session,
        kind="credit_note",
        payer=corrected.project_id,
        projects=corrected.projects,
        month=corrected.month,
        seller=seller_of(settings),
        buyer=corrected.buyer,
        terms=terms,
        tax_note=corrected.tax_note,
        net_nanos=note.net_nanos,
        amounts=note.amounts,
        lines=[line],
        posted=note.posted,
        corrects=str(corrected.number),
        reason=reason,
        key=key,
    )
    now = database_now_ms(session)
    _check_parties(made)
    _number(session, made, now, kind="-CN")
    postings.post_credit_note(session, made, now)
    if corrected.status == InvoiceStatus.PAID and accounts.existing_project(session, made.project_id).is_prepaid:
        postings.post_settlement(session, made, now)
        _move(session, made, InvoiceStatus.PAID, "to the prepaid balance")
    return made


@dataclass(frozen=True, slots=True)
class _Note:
    """The amounts of a credit note, all below 0."""

    net_nanos: int
    amounts: Totals
    posted: Posted


def _left(session: Session, corrected: Invoice) -> _Note:
    """The credit note over all that is left: its documents then sum to 0, with what was given back beside them."""
    documents = [corrected, *queries.credit_notes(session, str(corrected.number))]
    net_nanos = -sum(row.net_nanos for row in documents)
    given_back = correction_queries.given_back_nanos(session, corrected)
    if given_back:
        net_nanos, terms = min(0, net_nanos + given_back), terms_of(corrected)
        amounts = rules.totals(net_nanos, terms)
        most = -sum(row.payable_minor for row in documents)
        if amounts.payable_minor >= most:
            return _Note(net_nanos, amounts, rules.posted(net_nanos, amounts, terms))
    amounts = Totals(
        net=-sum(row.net for row in documents),
        tax=-sum(row.tax for row in documents),
        rounding=-sum(row.rounding for row in documents),
        payable_minor=-sum(row.payable_minor for row in documents),
    )
    posted = Posted(
        tax_nanos=-sum(row.tax_nanos for row in documents),
        rounding_nanos=-sum(row.rounding_nanos for row in documents),
        payable_nanos=-sum(row.payable_nanos for row in documents),
    )
    return _Note(-sum(row.net_nanos for row in documents), amounts, posted)


def _check_same(session: Session, made: Invoice, corrected: Invoice, asked: int | None, reason: str) -> None:
    """Raises MismatchError if the credit note of a key isn't the one that is asked for now."""
    is_rest = not _left(session, corrected).amounts.payable_minor
    is_same = -made.payable_minor == asked if asked is not None else is_rest
    if (made.corrects, made.reason) != (corrected.number, reason) or not is_same:
        raise MismatchError(
            f"The key {made.key!r} was used for a credit note of {_money(-made.payable_minor, terms_of(made))} on"
            f" {made.corrects}, with the reason {made.reason!r}: use a new key for a new one.",
            code="idempotency_key_reused",
            param="key",
        )


def _hold_funds(session: Session, projects: Sequence[str]) -> None:
    """Holds the balances of projects until the transaction ends; always in one order."""
    for project_id in sorted(projects):
        money.locked_funds(session, project_id)


def owed_nanos(session: Session, found: Invoice) -> int:
    """What is payable of an invoice after its credit notes."""
    return found.payable_nanos + sum(note.payable_nanos for note in queries.credit_notes(session, str(found.number)))


def show(session: Session, name: str) -> Invoice:
    """An invoice by its id or number."""
    found = queries.read_invoice(session, name)
    if found is None:
        raise NotFoundError(f"There is no invoice {name}.", param="invoice")
    return found


def locked(session: Session, name: str) -> Invoice:
    """An invoice by its id or number, held until the transaction ends."""
    found = queries.invoice(session, name)
    if found is None:
        raise NotFoundError(f"There is no invoice {name}.", param="invoice")
    return found


def list_invoices(
    session: Session, *, project: str | None = None, month: str | None = None, status: str | None = None
) -> list[Invoice]:
    """Invoices and credit notes, oldest first."""
    project_id = None if project is None else accounts.existing_project(session, project).id
    if month is not None:
        Month.parse(month)
    if status is not None and status not in list(InvoiceStatus):
        raise InvalidRequestError(
            f"status can't be {status!r}: it is one of {', '.join(InvoiceStatus)}.", param="status"
        )
    return queries.invoices(session, project_id=project_id, month=month, status=status)


def _number(session: Session, row: Invoice, now: int, *, kind: str) -> None:
    """Takes the next number of the seller's series. From this flush on the row is frozen."""
    series = str(row.seller["prefix"]) + kind
    row.series = series
    row.no = queries.take_number(session, series)
    row.number = f"{series}-{row.no:06d}"
    if kind:
        row.kind = "credit_note"
    row.issued_ms = now
    _move(session, row, InvoiceStatus.ISSUED, None)


def _move(session: Session, row: Invoice, to: InvoiceStatus, reason: str | None) -> None:
    rules.check_move(row.number or row.id, InvoiceStatus(row.status), to)
    row.status, row.status_ms, row.status_reason = to, database_now_ms(session), reason
    session.flush()


def _check_parties(row: Invoice) -> None:
    lacks = [f"BATCHSVC_SELLER_{field.upper()}" for field in ("name", "address", "tax_id") if not row.seller[field]]
    if lacks:
        raise InvalidRequestError(
            f"An invoice names its seller: set {', '.join(lacks)}, then draft it again.", code="incomplete_party"
        )
    needs = ("address", "tax_id") if row.tax_note else ("address",)
    missing = [f"--{field.replace('_', '-')}" for field in needs if not row.buyer[field]]
    if missing:
        raise InvalidRequestError(
            f"An invoice names its buyer: `batchsvc invoice party {row.project_id}` takes {' and '.join(missing)};"
            " then draft it again.",
            code="incomplete_party",
        )


def _money(minor: int, terms: Terms) -> str:
    return f"{rules.format_units(minor, digits=terms.exponent, exponent=terms.exponent)} {terms.currency}"
