"""`usage` and `costs`: what was used and charged, by whatever it can be told apart by; the API's own numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, date, datetime, timedelta
from typing import Annotated, Any

import typer

from batchsvc.billing import focus
from batchsvc.billing.usage import WIDTHS, Kind
from batchsvc.cli.admin import Admin, opened_admin
from batchsvc.cli.console import Console
from batchsvc.cli.exits import CommandError, Exit
from batchsvc.cli.options import AdminOptions, grouped
from batchsvc.cli.report import (
    GROUPS,
    api_groups,
    parsed_by,
    rendered,
    report,
    wants_color,
    write_csv,
    write_parquet,
)
from batchsvc.clock import now_ms

_USAGE = {
    "requests": "num_model_requests",
    "input_tokens": "input_tokens",
    "cached_tokens": "input_cached_tokens",
    "output_tokens": "output_tokens",
    "cost_nanos": "cost_nanos",
}
_COSTS = {"amount_nanos": "amount_nanos"}

MonthOption = Annotated[
    str | None, typer.Option("--month", metavar="YYYY-MM", help="A month of UTC; default: the one that runs.")
]
FromOption = Annotated[str | None, typer.Option("--from", metavar="DATE", help="First day (UTC), such as 2026-11-01.")]
ToOption = Annotated[str | None, typer.Option("--to", metavar="DATE", help="Last day; default: today.")]
CsvOption = Annotated[str | None, typer.Option("--csv", metavar="FILE", help="Write the rows as CSV; - is stdout.")]
ParquetOption = Annotated[str | None, typer.Option("--parquet", metavar="FILE", help="Write the rows as Parquet.")]
FocusOption = Annotated[
    str | None, typer.Option("--focus", metavar="FILE", help="Write charges as FOCUS 1.0 CSV; - is stdout.")
]
SellerOption = Annotated[str, typer.Option("--seller", metavar="NAME", help="Who sells, in the FOCUS file.")]


@grouped
def usage(
    *,
    by: Annotated[
        str, typer.Option("--by", metavar="WORDS", help="day, model, project, key, batch, tier, metadata.KEY.")
    ] = "model",
    month: MonthOption = None,
    first: FromOption = None,
    last: ToOption = None,
    csv_file: CsvOption = None,
    parquet_file: ParquetOption = None,
    server: AdminOptions,
) -> None:
    """Show requests and tokens, for the admin key: by model, day, project, key, batch or metadata."""
    console = server.console
    words = parsed_by(by, ["day", *(word for word in GROUPS if word != "item")])
    days = _days(month, first, last)
    with opened_admin(server) as admin:
        groups = api_groups(words)
        page = _merged([_all_buckets(admin, kind, days, groups) for kind in (Kind.COMPLETIONS, Kind.EMBEDDINGS)])
    _show(console, page, words, days, _USAGE, "cost_nanos", csv_file, parquet_file)


@grouped
def costs(
    *,
    by: Annotated[
        str, typer.Option("--by", metavar="WORDS", help="day, model, project, key, batch, tier, item, metadata.KEY.")
    ] = "model",
    month: MonthOption = None,
    first: FromOption = None,
    last: ToOption = None,
    csv_file: CsvOption = None,
    parquet_file: ParquetOption = None,
    focus_file: FocusOption = None,
    seller: SellerOption = "batchsvc",
    server: AdminOptions,
) -> None:
    """Show what was charged, for the admin key; `--by item` takes it apart by kind of token."""
    console = server.console
    words = parsed_by(by, ["day", *GROUPS])
    days = _days(month, first, last)
    with opened_admin(server) as admin:
        if focus_file is not None:
            charges = focus.charges(
                _all_buckets(admin, Kind.COSTS, days, focus.GROUPS)["data"],
                seller=seller,
                projects={row["id"]: row["name"] for row in admin.list_projects()["data"]},
                keys={row["id"]: row["name"] for row in admin.list_keys()["data"]},
            )
            write_csv(focus_file, focus.COLUMNS, charges, console)
            if not (console.as_json or csv_file or parquet_file):
                return
        page = _all_buckets(admin, Kind.COSTS, days, api_groups(words))
    _show(console, page, words, days, _COSTS, "amount_nanos", csv_file, parquet_file)


def _show(
    console: Console,
    page: Mapping[str, Any],
    words: Sequence[str],
    days: tuple[date, date],
    measures: Mapping[str, str],
    money: str,
    csv_file: str | None,
    parquet_file: str | None,
) -> None:
    found = report(page["data"], words, measures, money)
    if csv_file is not None:
        write_csv(csv_file, (*found.by, *found.measures), found.rows, console)
    if parquet_file is not None:
        write_parquet(parquet_file, found, console)
    console.result(page)
    if csv_file is not None or parquet_file is not None:
        return
    first, last = days[0], days[1] - timedelta(days=1)
    if not found.rows:
        console.out(f"Nothing was used from {first} to {last} (UTC).")
        return
    console.out(f"{first} to {last} (UTC)")
    console.out(rendered(found, color=wants_color()))


def _all_buckets(admin: Admin, kind: Kind, days: tuple[date, date], groups: Sequence[str]) -> dict[str, Any]:
    """One page with the buckets of all pages."""
    start, end = (int(datetime(day.year, day.month, day.day, tzinfo=UTC).timestamp()) for day in days)
    asked = [
        ("start_time", str(start)),
        ("end_time", str(end)),
        ("limit", str(WIDTHS[kind]["1d"].most)),
        *(("group_by[]", group) for group in groups),
    ]
    page = admin.organization(kind, asked)
    buckets = list(page["data"])
    while page["has_more"]:
        page = admin.organization(kind, [*asked, ("page", page["next_page"])])
        buckets += page["data"]
    return {"object": "page", "data": buckets, "has_more": False, "next_page": None}


def _merged(pages: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Pages over the same days as one, whose buckets hold the results of all."""
    buckets: dict[int, dict[str, Any]] = {}
    for page in pages:
        for bucket in page["data"]:
            buckets.setdefault(bucket["start_time"], {**bucket, "results": []})["results"].extend(bucket["results"])
    return {**pages[0], "data": [buckets[start] for start in sorted(buckets)]}


def _days(month: str | None, first: str | None, last: str | None) -> tuple[date, date]:
    """The first day and the one after the last. Raises CommandError for days that can't be meant."""
    today = datetime.fromtimestamp(now_ms() // 1000, UTC).date()
    if month is not None and (first is not None or last is not None):
        raise CommandError("Name either --month or --from with --to, not both.", Exit.USAGE)
    if last is not None and first is None:
        raise CommandError("--to needs --from.", Exit.USAGE)
    if first is None:
        start = today.replace(day=1) if month is None else _date("--month", f"{month}-01", "such as 2026-11")
        return start, (start.replace(day=28) + timedelta(days=4)).replace(day=1)
    begin = _date("--from", first, "such as 2026-11-01")
    end = today if last is None else _date("--to", last, "such as 2026-11-30")
    if end < begin:
        raise CommandError(f"The last day, {end}, is before the first, {begin}.", Exit.USAGE)
    return begin, end + timedelta(days=1)


def _date(option: str, text: str, example: str) -> date:
    try:
        found = date.fromisoformat(text)
    except ValueError:
        found = None
    if found is None or not 1970 <= found.year < 9999:
        raise CommandError(
            f"{option} can't be {text.removesuffix('-01')!r}: it is a date of UTC, {example}.", Exit.USAGE
        )
    return found
