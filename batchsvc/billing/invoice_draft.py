"""Makes drafts: a project's month added up, with the parties and terms of this moment.

The rows of a month are its usage by price, its refunds and its goodwill credits. What it takes back from earlier months
has rows of its own that name the invoice they correct. A draft may be made again at any time and replaces the one
before; what a posting corrects is noted with it, so that an issued invoice says for ever what it said.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

from sqlalchemy.orm import Session

from batchsvc import ids, mode
from batchsvc.accounts import service as accounts
from batchsvc.accounts.tables import Project
from batchsvc.billing import invoice as rules
from batchsvc.billing import invoice_queries as queries
from batchsvc.billing import line_items, service
from batchsvc.billing.currency import exponent_of
from batchsvc.billing.invoice import PRICE_CURRENCY, InvoiceStatus, Line, Posted, Terms, Totals
from batchsvc.billing.invoice_tables import BillingParty, Invoice, InvoiceLine
from batchsvc.billing.month import Month
from batchsvc.db.session import database_now_ms
from batchsvc.errors import InvalidRequestError
from batchsvc.money import NANOS_PER_DOLLAR, Rates
from batchsvc.settings import Settings

GOODWILL = "goodwill"  # the kind of a line that gives something without a charge behind it
REVERSE_CHARGE = "Reverse charge: the recipient of the supply is liable for the tax."


def show_party(session: Session, project: str) -> tuple[Project, BillingParty]:
    """To whom a project is billed; empty where nobody said it."""
    row = accounts.existing_project(session, project)
    if mode.is_test(row.id):
        raise InvalidRequestError("A project for tests is never billed.", param="project")
    found = queries.party(session, row.id)
    return row, found or BillingParty(
        project_id=row.id, name="", address="", country="", tax_id="", currency=PRICE_CURRENCY, is_reverse_charge=False
    )


def change_party(session: Session, project: str, changes: Mapping[str, Any]) -> tuple[Project, BillingParty]:
    """Says to whom a project is billed; what isn't named stays. Invoices that exist keep what they say."""
    row, party = show_party(session, project)
    wanted = dict(changes)
    exponent_of(wanted.get("currency", party.currency))
    if wanted.get("bill_to") is not None:
        wanted["bill_to"] = _payer(session, row, wanted["bill_to"])
    for field, value in wanted.items():
        setattr(party, field, value)
    session.add(party)
    session.flush()
    return row, party


def _payer(session: Session, project: Project, name: str) -> str:
    """The id of the project that pays for another one."""
    payer = accounts.existing_project(session, name)
    if mode.is_test(payer.id):
        raise InvalidRequestError(
            f"{payer.name} is a project for tests, which is never billed: name a live project.", param="bill_to"
        )
    onward = queries.party(session, payer.id)
    if payer.id == project.id or (onward is not None and onward.bill_to) or queries.billed_to(session, project.id):
        raise InvalidRequestError(
            f"{project.name} can't be billed to {payer.name}: that project must be billed to itself,"
            " and no project to this one.",
            param="bill_to",
        )
    if project.is_prepaid:
        raise InvalidRequestError(f"{project.name} is prepaid, so it pays for itself.", param="bill_to")
    return payer.id


def draft(
    session: Session, settings: Settings, project: str, month: Month, *, exchange_rate: str | None = None
) -> Invoice:
    """A draft of a project's month as it is now, in place of an older draft."""
    payer, party = show_party(session, project)
    if party.bill_to is not None:
        raise InvalidRequestError(
            f"{project} is billed on the invoice of {party.bill_to}: draft that.", param="project"
        )
    projects = [payer.id, *queries.billed_to(session, payer.id)]
    known = queries.billed(session, projects)
    for project_id in projects:
        if number := known.get((project_id, str(month))):
            raise InvalidRequestError(
                f"{month} of {project_id} is billed by {number}: a credit note corrects it,"
                " or it can be made void and drafted again.",
                code="already_billed",
            )
    queries.drop_drafts(session, payer.id, str(month))
    lines = month_lines(session, projects, month, known)
    terms = _terms(settings, party, exchange_rate)
    net_nanos = sum(line.amount_nanos for line in lines)
    return store(
        session,
        kind="invoice",
        payer=payer.id,
        projects=[{"id": id_, "name": accounts.existing_project(session, id_).name} for id_ in projects],
        month=str(month),
        seller=seller_of(settings),
        buyer=_buyer(payer, party),
        terms=terms,
        tax_note=REVERSE_CHARGE if party.is_reverse_charge else "",
        net_nanos=net_nanos,
        amounts=rules.totals(net_nanos, terms),
        lines=lines,
        corrections=month_corrections(session, projects, month, known),
    )


def earlier_bill(
    billed: Mapping[tuple[str, str], str], project_id: str, used: Month | None, month: Month
) -> str | None:
    """The invoice on which something was billed that was used before `month`, or the month of use, if none was."""
    if used is None or used >= month:
        return None
    return billed.get((project_id, str(used)), str(used))


def month_lines(
    session: Session, projects: Sequence[str], month: Month, billed: Mapping[tuple[str, str], str]
) -> list[Line]:
    """The rows of a month: its usage by price, then what it takes back from earlier months, by invoice."""
    groups: dict[tuple[str | None, str, str, str, int], line_items.Usage] = {}

    def add(row: queries.UsageSum, reverses: str | None, sign: int = 1) -> None:
        key = (reverses, row.project_id, row.model, row.tier, row.price_version)
        usage = line_items.Usage(
            requests=sign * row.requests,
            input_tokens=sign * row.input_tokens,
            cached_tokens=sign * row.cached_tokens,
            output_tokens=sign * row.output_tokens,
            cost_nanos=sign * row.cost_nanos,
        )
        groups[key] = groups.get(key, line_items.Usage()) + usage

    for row in queries.usage_sums(session, projects, month):
        add(row, None)
    for taken_back in queries.reversals(session, projects, month):
        row = taken_back.usage
        add(row, None, -1)  # out of the month's own rows, into those of the invoice it corrects
        add(row, earlier_bill(billed, row.project_id, Month.of(taken_back.original_ms), month))
    lines = [
        Line(
            project_id=project_id,
            model=model,
            tier=tier,
            kind=item.kind or "usage",
            price_version=version,
            tokens=item.tokens or 0,
            rate_nanos=item.rate_nanos,
            amount_nanos=item.amount_nanos,
            reverses=reverses,
        )
        for (reverses, project_id, model, tier, version), usage in groups.items()
        for item in line_items.items(model, tier, _rates(session, model, tier, version), usage)
    ]
    lines += [
        Line(
            project_id=row.project_id,
            kind=GOODWILL if row.kind == "credit" else row.kind,
            amount_nanos=row.amount_nanos,
            reverses=earlier_bill(billed, row.project_id, row.corrects, month),
            batch_id=row.batch_id,
        )
        for row in queries.given_back(session, projects, month)
    ]
    return sorted(lines, key=lambda line: (projects.index(line.project_id), line.reverses or ""))


def month_corrections(
    session: Session, projects: Sequence[str], month: Month, billed: Mapping[tuple[str, str], str]
) -> dict[str, str]:
    """What the month's postings correct, by their keys; those that correct nothing earlier are left out."""
    found = {
        row.key: earlier_bill(billed, row.usage.project_id, Month.of(row.original_ms), month)
        for row in queries.reversals(session, projects, month)
    }
    found |= {
        row.key: earlier_bill(billed, row.project_id, row.corrects, month)
        for row in queries.given_back(session, projects, month)
    }
    return {key: corrects for key, corrects in found.items() if corrects}


def as_lines(rows: Sequence[InvoiceLine]) -> list[Line]:
    """Stored rows as they were made."""
    return [Line(**{field.name: getattr(row, field.name) for field in fields(Line)}) for row in rows]


@dataclass(frozen=True, slots=True)
class _Party:
    """A party as an invoice keeps it."""

    name: str
    address: str
    country: str
    tax_id: str


def _rates(session: Session, model: str, tier: str, version: int) -> Rates | None:
    """None for usage that is older than the note of its prices: it is billed as one sum."""
    return service.rates_for(session, model, tier, version) if version else None


def seller_of(settings: Settings) -> dict[str, Any]:
    """The seller as an invoice keeps it."""
    party = _Party(settings.seller_name, settings.seller_address, settings.seller_country, settings.seller_tax_id)
    return {**asdict(party), "prefix": settings.seller_prefix}


def _buyer(payer: Project, party: BillingParty) -> dict[str, Any]:
    return asdict(_Party(party.name or payer.name, party.address, party.country, party.tax_id))


def _terms(settings: Settings, party: BillingParty, exchange_rate: str | None) -> Terms:
    exponent = exponent_of(party.currency)
    is_price_currency = party.currency == PRICE_CURRENCY
    if is_price_currency != (exchange_rate is None):
        says = "leave --exchange-rate out" if is_price_currency else f"--exchange-rate says how many {party.currency}"
        raise InvalidRequestError(
            f"Prices are in US dollars and this invoice is in {party.currency}: {says}"
            + ("." if is_price_currency else " a dollar is worth."),
            param="exchange_rate",
        )
    rate = NANOS_PER_DOLLAR if exchange_rate is None else rules.parse_units(exchange_rate, name="exchange_rate")
    if rate == 0:
        raise InvalidRequestError("exchange_rate can't be 0.", param="exchange_rate")
    own = rules.tax_rate_ppm(settings.seller_tax_rate) if party.tax_rate_ppm is None else party.tax_rate_ppm
    return Terms(
        currency=party.currency,
        exponent=exponent,
        exchange_rate_nanos=rate,
        tax_rate_ppm=0 if party.is_reverse_charge else own,
    )


def terms_of(row: Invoice) -> Terms:
    """The terms that an invoice keeps."""
    return Terms(
        currency=row.currency,
        exponent=row.exponent,
        exchange_rate_nanos=row.exchange_rate_nanos,
        tax_rate_ppm=row.tax_rate_ppm,
    )


def store(
    session: Session,
    *,
    kind: str,
    payer: str,
    projects: list[Any],
    month: str,
    seller: dict[str, Any],
    buyer: dict[str, Any],
    terms: Terms,
    tax_note: str,
    net_nanos: int,
    amounts: Totals,
    lines: Sequence[Line],
    corrections: Mapping[str, str] | None = None,
    posted: Posted | None = None,
    **more: Any,
) -> Invoice:
    """Stores a draft and its rows."""
    now = database_now_ms(session)
    row = Invoice(
        id=ids.invoice_id(),
        kind=kind,
        status=InvoiceStatus.DRAFT,
        status_ms=now,
        created_ms=now,
        project_id=payer,
        projects=projects,
        month=month,
        seller=seller,
        buyer=buyer,
        **asdict(terms),
        tax_note=tax_note,
        net_nanos=net_nanos,
        **asdict(posted or rules.posted(net_nanos, amounts, terms)),
        **asdict(amounts),
        **more,
    )
    session.add(row)
    session.flush()
    queries.insert_lines(
        session, [{"invoice_id": row.id, "no": no, **asdict(line)} for no, line in enumerate(lines, 1)]
    )
    queries.insert_corrections(session, row.id, corrections or {})
    return row
