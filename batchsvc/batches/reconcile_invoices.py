"""Audits invoices and credit notes: their rows against the month's usage and prices, their amounts, their postings.

Drafts are no bills yet and are left out; of a void one, only that its postings were taken back.
"""

from __future__ import annotations

from collections import Counter
from datetime import UTC, datetime
from typing import Any

from batchsvc.batches.reconcile import Report, share
from batchsvc.batches.reconcile_amounts import compare_amounts, compare_payments
from batchsvc.batches.reconcile_queries import Reader, Snapshot, decoded

_PAGE = 100
_KINDS = {"input_tokens": "input", "cached_input_tokens": "cached_input", "output_tokens": "output"}
_INVOICES = "SELECT * FROM invoices WHERE status <> 'draft' AND id > :after ORDER BY id LIMIT :page"
_LINES = "SELECT * FROM invoice_lines WHERE invoice_id = :invoice ORDER BY no"
_USAGE = (
    "SELECT model, tier, price_version, SUM(cost_nanos) AS cost_nanos, SUM(input_tokens - cached_tokens) AS"
    " input_tokens, SUM(cached_tokens) AS cached_input_tokens, SUM(output_tokens) AS output_tokens FROM usage"
    " WHERE project_id = :project AND created_ms >= :start AND created_ms < :end GROUP BY model, tier, price_version"
)
_GIVEN_BACK = (
    "SELECT COALESCE(SUM(e.amount_nanos), 0) FROM ledger_transactions t JOIN ledger_entries e"
    " ON e.transaction_id = t.id WHERE t.project_id = :project AND t.kind = :kind AND e.account = :account"
    " AND t.created_ms >= :start AND t.created_ms < :end"
)
_RATE = (
    "SELECT nanos_per_mtok FROM prices WHERE version = :version AND model IN (:model, 'default') AND tier = :tier"
    " AND kind = :kind ORDER BY CASE WHEN model = 'default' THEN 1 ELSE 0 END LIMIT 1"
)
_POSTED = (
    "SELECT e.account, SUM(e.amount_nanos) AS total FROM ledger_transactions t JOIN ledger_entries e"
    " ON e.transaction_id = t.id WHERE t.key IN :keys GROUP BY e.account"
)
_SERIES = (
    "SELECT s.series, s.last, COUNT(i.id) AS num, COUNT(DISTINCT i.no) AS nos, MAX(i.no) AS most FROM invoice_series s"
    " LEFT JOIN invoices i ON i.series = s.series GROUP BY s.series, s.last"
)
_CLAIM = "SELECT invoice_id FROM invoice_claims WHERE project_id = :project AND month = :month"


def compare_invoices(reader: Reader, report: Report) -> None:
    """All that were issued."""
    with reader.snapshot() as now:
        for row in now.rows(_SERIES):
            place = f"invoice numbers {row['series']}"
            report.compare(place, "last", row["last"], row["num"])
            report.compare(place, "different ones", row["nos"], row["num"])
            report.compare(place, "highest", row["most"] or 0, row["last"])
    after = ""
    while True:
        with reader.snapshot() as now:
            page = now.rows(_INVOICES, after=after, page=_PAGE)
            for row in page:
                report.invoices += 1
                _compare_invoice(now, report, row)
        if not page:
            break
        after = page[-1]["id"]
    compare_payments(reader, report)


def _compare_invoice(now: Snapshot, report: Report, row: dict[str, Any]) -> None:
    place = f"{row['kind'].replace('_', ' ')} {row['number']}"
    lines = now.rows(_LINES, invoice=row["id"])
    rates: dict[tuple[Any, ...], int | None] = {}
    for line in lines:
        if line["rate_nanos"] is not None:
            where = f"{place} line {line['no']}"
            report.compare(where, "amount_nanos", line["amount_nanos"], share(line["tokens"], line["rate_nanos"]))
            row_of = (line["price_version"], line["model"], line["tier"], _KINDS.get(line["kind"]))
            if row_of not in rates:
                version, model, tier, kind = row_of
                found = now.one(_RATE, version=version, model=model, tier=tier, kind=kind)
                rates[row_of] = found["nanos_per_mtok"] if found else None
            report.compare(where, "rate_nanos", line["rate_nanos"], rates[row_of])
    report.compare(place, "net_nanos", row["net_nanos"], sum(line["amount_nanos"] for line in lines))
    compare_amounts(now, report, place, row)
    if _bills_a_month(row) and row["status"] != "void":
        for project in decoded(row["projects"]):
            _compare_month(now, report, place, row, project["id"], lines)
    _compare_postings(now, report, place, row, lines)


def _compare_month(
    now: Snapshot, report: Report, place: str, row: dict[str, Any], project_id: str, lines: list[dict[str, Any]]
) -> None:
    """What a project used in the month, whatever of it the invoice shows as a correction of an earlier one."""
    year, month = (int(part) for part in row["month"].split("-"))
    bounds: dict[str, Any] = {"project": project_id, "start": _start_ms(year, month), "end": _start_ms(year, month + 1)}
    place = f"{place} {project_id}"
    billed, tokens = Counter[str](), Counter[tuple[Any, ...]]()
    for line in lines:
        if line["project_id"] == project_id:
            billed[line["kind"] if line["kind"] in ("refund", "goodwill") else "usage"] += line["amount_nanos"]
            if line["kind"] in _KINDS:
                tokens[line["model"], line["tier"], line["price_version"], line["kind"]] += line["tokens"]
    used = 0
    for group in now.rows(_USAGE, **bounds):
        used += int(group["cost_nanos"])
        if not group["price_version"]:
            continue  # older than the note of its prices: billed as one sum
        for kind in _KINDS:
            key = (group["model"], group["tier"], group["price_version"], kind)
            report.compare(place, f"{kind} of {group['model']}, {group['tier']}", tokens.pop(key, 0), int(group[kind]))
    for key, count in tokens.items():
        report.compare(place, f"{key[3]} of {key[0]}, {key[1]}", count, 0)
    report.compare(place, "usage of the month", billed["usage"], used)
    for item, kind, account in (("refund", "refund", "revenue"), ("goodwill", "credit", "credits")):
        given = now.number(_GIVEN_BACK, kind=kind, account=account, **bounds)
        report.compare(place, f"{item}s of the month", billed[item], given)
    claim = now.one(_CLAIM, project=project_id, month=row["month"])
    report.compare(place, "invoice of the month", claim["invoice_id"] if claim else None, row["id"])


def _compare_postings(
    now: Snapshot, report: Report, place: str, row: dict[str, Any], lines: list[dict[str, Any]]
) -> None:
    number = row["number"]
    wanted: Counter[str] = Counter()
    if _bills_a_month(row):
        projects = {line["project_id"] for line in lines}
        keys = [*(f"invoice:{number}:{project}" for project in projects), f"tax:{number}", f"rounding:{number}"]
        keys += [f"unbill:{key}" for key in keys]
        for line in lines:
            wanted[f"available:{line['project_id']}"] += line["amount_nanos"]
    else:
        keys = [f"credit_note{which}:{number}" for which in ("", "-tax", "-rounding")]
        wanted["revenue"] = row["net_nanos"]
    wanted["tax"], wanted["rounding"] = row["tax_nanos"], row["rounding_nanos"]
    wanted[f"receivable:{row['project_id']}"] = -row["payable_nanos"]
    posted = {found["account"]: int(found["total"]) for found in now.rows(_POSTED, many="keys", keys=keys)}
    for account in wanted.keys() | posted.keys():
        added = 0 if row["status"] == "void" else wanted[account]
        report.compare(f"{place} ledger", account, posted.get(account, 0), added)


def _bills_a_month(row: dict[str, Any]) -> bool:
    """A month in which more was given back than was used becomes a credit note that corrects no other document."""
    return row["kind"] == "invoice" or row["corrects"] is None


def _start_ms(year: int, month: int) -> int:
    """The first millisecond of a month; month 13 is the next January."""
    return int(datetime(year + (month - 1) // 12, (month - 1) % 12 + 1, 1, tzinfo=UTC).timestamp()) * 1000
