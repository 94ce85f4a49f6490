"""Audits what an invoice makes of its net amount, and what was paid: tax, rounding and payable by their own rates.

Fractions, rounded half to even by Python itself. What a payer has paid has to cover the invoices that say so.
"""

from __future__ import annotations

from fractions import Fraction
from typing import Any

from batchsvc.batches.reconcile import Report
from batchsvc.batches.reconcile_queries import Reader, Snapshot

_BILLION, _MILLION = 10**9, 10**6
_FIELDS = ("net_nanos", "tax_nanos", "rounding_nanos", "payable_nanos", "net", "tax", "rounding", "payable_minor")
_CORRECTED = (
    "SELECT * FROM invoices WHERE number = :number OR (corrects = :number AND number < :before) ORDER BY number"
)
_PAYERS = "SELECT DISTINCT project_id FROM invoices WHERE status <> 'draft'"
_DOCUMENTS = (
    "SELECT number, kind, corrects, status, payable_nanos FROM invoices WHERE status <> 'draft' AND project_id = :payer"
)
_POSTED = (
    "SELECT t.kind, t.key, e.amount_nanos FROM ledger_transactions t JOIN ledger_entries e ON e.transaction_id = t.id"
    " WHERE e.account = :account AND t.kind IN ('payment', 'settlement')"
)
_BALANCE = "SELECT COALESCE(SUM(amount_nanos), 0) FROM ledger_entries WHERE account = :account"


def compare_amounts(now: Snapshot, report: Report, place: str, row: dict[str, Any]) -> None:
    """The amounts of a document, each computed anew."""
    minor = 10 ** (9 - row["exponent"])
    net, tax, rounding = (int(row[name]) for name in ("net", "tax", "rounding"))  # stored as text: they may be long
    report.compare(place, "net + tax + rounding", net + tax + rounding, row["payable_minor"] * minor)
    gross = row["net_nanos"] + row["tax_nanos"] + row["rounding_nanos"]
    report.compare(place, "payable_nanos", row["payable_nanos"], gross)
    if row["kind"] == "invoice" or row["corrects"] is None:
        wanted = _of_net(row, minor)
    else:
        wanted = _of_credit_note(now, row, minor, rounding)
    for name, amount in wanted.items():
        report.compare(place, name, int(row[name]), amount)


def _of_net(row: dict[str, Any], minor: int) -> dict[str, int]:
    """An invoice begins with its net amount in dollars."""
    net = round(Fraction(row["net_nanos"] * row["exchange_rate_nanos"], _BILLION))
    tax = round(Fraction(net * row["tax_rate_ppm"], _MILLION))
    payable_minor = round(Fraction(net + tax, minor))
    payable, tax_nanos = payable_minor * minor, _dollars(tax, row)
    payable_nanos = _dollars(payable, row)
    return {
        "net": net,
        "tax": tax,
        "rounding": payable - net - tax,
        "payable_minor": payable_minor,
        "tax_nanos": tax_nanos,
        "payable_nanos": payable_nanos,
        "rounding_nanos": payable_nanos - row["net_nanos"] - tax_nanos,
    }


def _of_credit_note(now: Snapshot, row: dict[str, Any], minor: int, rounding: int) -> dict[str, int]:
    """A credit note over a part begins with its gross amount, one over the rest makes its documents sum to 0, or (where
    something was given back beside them) begins with what is left of the net amount."""
    others = now.rows(_CORRECTED, number=row["corrects"], before=row["number"])
    rest = {name: -sum(int(other[name]) for other in others) for name in _FIELDS}
    if rest["payable_minor"] == row["payable_minor"] and rest["net_nanos"] == row["net_nanos"]:
        return rest
    if rounding:
        return _of_net(row, minor)
    gross = row["payable_minor"] * minor
    tax = round(Fraction(gross * row["tax_rate_ppm"], _MILLION + row["tax_rate_ppm"]))
    tax_nanos, payable_nanos = _dollars(tax, row), _dollars(gross, row)
    by_gross = {
        "net": gross - tax,
        "tax": tax,
        "net_nanos": _dollars(gross - tax, row),
        "tax_nanos": tax_nanos,
        "payable_nanos": payable_nanos,
    }
    by_net = _of_net(row, minor)
    return by_net if all(int(row[name]) == amount for name, amount in by_net.items()) else by_gross


def _dollars(units: int, row: dict[str, Any]) -> int:
    return round(Fraction(units * _BILLION, row["exchange_rate_nanos"]))


def compare_payments(reader: Reader, report: Report) -> None:
    """Each payment of an invoice is of one that is paid, and no more than it was; together they cover the paid ones."""
    with reader.snapshot() as now:
        payers = [row["project_id"] for row in now.rows(_PAYERS)]
    for payer in payers:
        with reader.snapshot() as now:
            _compare_payer(now, report, payer)


def _compare_payer(now: Snapshot, report: Report, payer: str) -> None:
    documents = now.rows(_DOCUMENTS, payer=payer)
    by_number = {row["number"]: row for row in documents}
    account = f"receivable:{payer}"
    for posting in now.rows(_POSTED, account=account):
        kind, key, amount = posting["kind"], posting["key"], posting["amount_nanos"]
        number = key.removeprefix(f"payment:{payer}:invoice:" if kind == "payment" else "settlement:")
        row = by_number.get(number)
        if row is None:
            if kind == "settlement":
                report.compare(f"settlement {number}", "document", number, None)
            continue  # a payment that names no invoice
        place = f"{kind} of {number}"
        report.compare(place, "state of the invoice", row["status"], "paid")
        if kind == "settlement" or amount > row["payable_nanos"]:
            report.compare(place, "amount", amount, row["payable_nanos"])
    owed = 0
    for row in documents:
        is_open = row["kind"] == "invoice" and row["status"] in ("issued", "disputed")
        open_number = row["number"] if row["kind"] == "invoice" else row["corrects"]
        if is_open or (row["corrects"] and by_number.get(open_number, {}).get("status") in ("issued", "disputed")):
            owed += row["payable_nanos"]
    on_account = now.number(_BALANCE, account=account) + owed
    if on_account < 0:
        report.compare(f"payments of {payer}", "paid beyond its paid invoices", on_account, 0)
