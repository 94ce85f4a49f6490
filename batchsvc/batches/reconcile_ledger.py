"""Audits the ledger: of one batch, and of everything: sums of 0, balances, postings that nothing is behind."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

from batchsvc.batches.reconcile import Report
from batchsvc.batches.reconcile_queries import Reader, Snapshot

_UNBALANCED = (
    "SELECT t.key, COUNT(e.id) AS num, COALESCE(SUM(e.amount_nanos), 0) AS total FROM ledger_transactions t"
    " LEFT JOIN ledger_entries e ON e.transaction_id = t.id WHERE {where} GROUP BY t.id, t.key"
    " HAVING COALESCE(SUM(e.amount_nanos), 0) <> 0 OR COUNT(e.id) < 2 ORDER BY t.key LIMIT 1000"
)
_BY_KIND = (
    "SELECT t.kind, e.account, SUM(e.amount_nanos) AS total FROM ledger_transactions t"
    " JOIN ledger_entries e ON e.transaction_id = t.id WHERE t.batch_id = :batch GROUP BY t.kind, e.account"
)
_STRAY_PARTS = (
    "SELECT t.key FROM ledger_transactions t WHERE t.batch_id = :batch AND (t.part_id IS NOT NULL OR t.kind IN"
    " ('part', 'void')) AND NOT EXISTS (SELECT 1 FROM parts p WHERE p.id = t.part_id AND p.batch_id = t.batch_id"
    " AND t.key IN ('part:' || p.id, 'void:' || p.id)) LIMIT 1000"
)
_UNLIKE_CALLS = (
    "SELECT t.part_id AS call, u.cost_nanos AS used, e.amount_nanos AS charged FROM ledger_transactions t"
    " JOIN ledger_entries e ON e.transaction_id = t.id AND e.account IN ('revenue', 'test:revenue')"
    " LEFT JOIN usage u ON u.part_id = t.part_id AND u.project_id = t.project_id AND u.batch_id = ''"
    " WHERE t.kind = 'call' AND (u.cost_nanos IS NULL OR u.cost_nanos <> e.amount_nanos)"
    " UNION ALL SELECT u.part_id, u.cost_nanos, NULL FROM usage u WHERE u.batch_id = '' AND NOT EXISTS"
    " (SELECT 1 FROM ledger_transactions t WHERE t.key = 'call:' || u.part_id) LIMIT 1000"
)
_CALL_SUMS = ", ".join(
    f"COALESCE(SUM({name}), 0) AS {name}"
    for name in ("requests", "input_tokens", "cached_tokens", "output_tokens", "cost_nanos")
)
_HOLDING = ("reserve", "extend", "part", "void", "release")


def revenue_of(project_id: str) -> str:
    """The account that a project's charges go to: none of test mode is money."""
    return "test:revenue" if project_id.startswith("proj_test_") else "revenue"


def compare_ledger(now: Snapshot, report: Report, batch: dict[str, Any], *, is_ended: bool) -> None:
    """The postings of a batch against its columns."""
    place, project = f"{batch['id']} ledger", batch["project_id"]
    _compare_balanced(now, report, place, "t.batch_id = :batch", batch=batch["id"])
    totals = {(row["kind"], row["account"]): int(row["total"]) for row in now.rows(_BY_KIND, batch=batch["id"])}
    available, held, revenue = f"available:{project}", f"reserved:{project}", revenue_of(project)

    def total(account: str, *kinds: str) -> int:
        return sum(totals.get((kind, account), 0) for kind in kinds)

    report.compare(place, "reserved in all", total(held, "reserve", "extend"), batch["reserved_nanos"])
    report.compare(place, "taken for it from what is available", -total(available, "reserve", "extend"),
                   batch["reserved_nanos"])  # fmt: skip
    report.compare(place, "charged", total(revenue, "part", "void"), batch["cost_nanos"])
    report.compare(place, "paid out of its reservation", -total(held, "part", "void"), batch["cost_nanos"])
    rest = batch["reserved_nanos"] - batch["cost_nanos"]
    report.compare(place, "released", total(available, "release"), rest if is_ended else 0)
    report.compare(place, "still reserved", total(held, *_HOLDING), 0 if is_ended else rest)
    refunded = -total(revenue, "refund")
    if refunded > batch["cost_nanos"]:
        report.compare(place, "refunded", refunded, batch["cost_nanos"])
    for (kind, account), amount in totals.items():
        if kind in _HOLDING and account not in (available, held, revenue):
            report.compare(place, f"{kind} on {account}", amount, None)
    for row in now.rows(_STRAY_PARTS, batch=batch["id"]):
        report.compare(f"{place} {row['key']}", "part", row["key"], None)


def compare_books(reader: Reader, report: Report) -> None:
    """What belongs to no batch alone: every posting, all accounts, balances, rows of batches that don't exist."""
    with reader.snapshot() as now:
        _compare_balanced(now, report, "ledger", "t.batch_id IS NULL")
        total = now.number("SELECT COALESCE(SUM(amount_nanos), 0) FROM ledger_entries")
        report.compare("ledger", "sum of all accounts", total, 0)
        for table, name in (("usage", "part_id"), ("usage_hours", "hour_ms"), ("ledger_transactions", "key")):
            strays = now.rows(
                f"SELECT x.{name} AS name, x.batch_id FROM {table} x WHERE x.batch_id <> ''"  # noqa: S608  ours
                " AND NOT EXISTS (SELECT 1 FROM batches b WHERE b.id = x.batch_id) LIMIT 1000"
            )
            for row in strays:
                report.compare(f"{table} {row['name']}", "batch", row["batch_id"], None)
        _compare_calls(now, report)
    for project_id in _projects(reader):
        with reader.snapshot() as now:
            _compare_balance(now, report, project_id)


def _compare_calls(now: Snapshot, report: Report) -> None:
    """The postings of interactive calls against their usage, one by one, and that against its hours."""
    for row in now.rows(_UNLIKE_CALLS):
        report.compare(f"call {row['call']}", "cost_nanos", row["used"], row["charged"])
    used, kept = (
        now.one(f"SELECT {_CALL_SUMS} FROM {table} WHERE batch_id = ''") or {}  # noqa: S608  names of ours
        for table in ("usage", "usage_hours")
    )
    for name, added in used.items():
        report.compare("usage_hours of calls", name, int(kept.get(name, 0)), int(added))


def _compare_balanced(now: Snapshot, report: Report, place: str, where: str, **values: Any) -> None:
    for row in now.rows(_UNBALANCED.format(where=where), **values):
        report.compare(f"{place} {row['key']}", f"sum of its {row['num']} entries", int(row["total"]), 0)


def _projects(reader: Reader) -> Iterator[str]:
    after: str | None = ""
    while True:
        with reader.snapshot() as now:
            found = now.one(
                "SELECT MIN(id) AS id FROM (SELECT MIN(project_id) AS id FROM balances WHERE project_id > :after"
                " UNION ALL SELECT MIN(project_id) FROM ledger_transactions WHERE project_id > :after) AS known",
                after=after,
            )
        after = found["id"] if found else None
        if after is None:
            return
        yield after


def _compare_balance(now: Snapshot, report: Report, project_id: str) -> None:
    place = f"balance of {project_id}"
    entries = (
        " FROM ledger_transactions t JOIN ledger_entries e ON e.transaction_id = t.id WHERE t.project_id = :project"
    )
    stored = now.one("SELECT * FROM balances WHERE project_id = :project", project=project_id) or {}
    for column, account in (
        ("available_nanos", f"available:{project_id}"),
        ("reserved_nanos", f"reserved:{project_id}"),
    ):
        added = now.number(
            "SELECT COALESCE(SUM(amount_nanos), 0) FROM ledger_entries WHERE account = :account", account=account
        )
        report.compare(place, column, stored.get(column, 0), added)
    last_ms = now.number(f"SELECT MAX(t.created_ms) {entries}", project=project_id)
    newest = datetime.fromtimestamp(last_ms // 1000, UTC)
    month = stored.get("month", 0)
    if last_ms and month < newest.year * 12 + newest.month - 1:
        report.compare(place, "month", month, newest.year * 12 + newest.month - 1)
    if not month:
        return
    charged = now.number(
        f"SELECT COALESCE(SUM(e.amount_nanos), 0) {entries} AND e.account IN ('revenue', 'test:revenue')"
        " AND t.kind IN ('part', 'void', 'call') AND t.created_ms >= :start AND t.created_ms < :end",
        project=project_id,
        start=_month_ms(month),
        end=_month_ms(month + 1),
    )
    report.compare(place, "month_nanos", stored["month_nanos"], charged)


def _month_ms(month: int) -> int:
    """The first millisecond of a month that is counted as year * 12 + month - 1."""
    return int(datetime(month // 12, month % 12 + 1, 1, tzinfo=UTC).timestamp()) * 1000
