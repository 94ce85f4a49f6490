"""`batchsvc top`: what the engine workers do right now, live on a terminal and as plain lines elsewhere."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Annotated, Any, Protocol

import typer

from batchsvc.cli.admin import opened_way
from batchsvc.cli.console import is_live
from batchsvc.cli.options import AdminOptions, grouped

if TYPE_CHECKING:
    from rich.table import Table

    from batchsvc.cli.client import Client
    from batchsvc.db.session import Database

_RENEW_S = 5.0  # the setting's default; it decides who counts as alive
_COLUMNS = (
    "worker",
    "model",
    "lane",
    "running",
    "waiting",
    "tokens/s",
    "share",
    "ttft p50",
    "ttft p99",
    "itl p50",
    "itl p99",
    "kv",
    "hits",
    "busy",
)
_NUMBERS = frozenset(_COLUMNS[3:])


class Workers(Protocol):
    """Who knows the workers. Raises ServiceError or CommandError with one sentence."""

    def look(self) -> dict[str, Any]: ...


class HttpWorkers:
    """A server's admin route."""

    def __init__(self, client: Client) -> None:
        self._client = client

    def look(self) -> dict[str, Any]:
        return self._client.get("/admin/workers")


class DatabaseWorkers:
    """The service's own database."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def look(self) -> dict[str, Any]:
        from batchsvc.batches import worker_service

        with self._database.reading() as session:
            return worker_service.shown_workers(session, _RENEW_S)


@grouped
def top(
    *,
    once: Annotated[bool, typer.Option("--once", help="Show it once and end.")] = False,
    every: Annotated[
        float, typer.Option("--every", metavar="S", min=0.2, max=3600, help="Seconds between two looks.")
    ] = 1.0,
    server: AdminOptions,
) -> None:
    """Show the engine workers: requests by lane, tokens a second, first tokens, KV and cache; workers tell it with
    their heartbeats. Ctrl-C ends it."""
    console = server.console
    by_http: type[Workers] = HttpWorkers
    with opened_way(by_http, DatabaseWorkers, server) as workers:
        page = workers.look()
        console.result(page)
        if once or console.as_json or not _may_paint():
            _plain(server, page)
            while not (once or console.as_json):
                time.sleep(every)
                _plain(server, workers.look())
            return
        _paint(_pages(workers, page, every))


def _pages(workers: Workers, page: dict[str, Any], every: float) -> Iterator[dict[str, Any]]:
    while True:
        yield page
        time.sleep(every)
        page = workers.look()


def _may_paint() -> bool:
    return sys.stdout.isatty() and is_live(os.environ)


def _paint(pages: Iterator[dict[str, Any]]) -> None:
    from rich.console import Console as RichConsole
    from rich.live import Live

    with Live(console=RichConsole(), auto_refresh=False, screen=True) as live:
        for page in pages:
            live.update(_table(page), refresh=True)


def _table(page: Mapping[str, Any]) -> Table:
    from rich.table import Table

    table = Table(title=summary(page), title_justify="left", box=None, header_style="bold")
    for name in _COLUMNS:
        table.add_column(name, justify="right" if name in _NUMBERS else "left", no_wrap=True)
    for row in rows(page):
        table.add_row(*(row[name] for name in _COLUMNS), style=None if row["lane"] == "interactive" else "dim")
    return table


def _plain(server: AdminOptions, page: Mapping[str, Any]) -> None:
    server.console.out(summary(page))
    if page["data"]:
        server.console.table(rows(page), _COLUMNS)


def summary(page: Mapping[str, Any]) -> str:
    """All workers in a line."""
    workers = page["data"]
    if not workers:
        return "No engine worker is alive."
    lanes = [lane for worker in workers for lane in worker["lanes"].values()]
    running, waiting, tps = (sum(lane[name] for lane in lanes) for name in ("running", "waiting", "output_tps"))
    count = "1 worker" if len(workers) == 1 else f"{len(workers)} workers"
    return f"{count}: {running:,} running, {waiting:,} waiting, {tps:,.0f} tokens/s"


def rows(page: Mapping[str, Any]) -> list[dict[str, str]]:
    """A row for each lane of each worker; what belongs to the whole worker stands in its first row."""
    found = []
    for worker in page["data"]:
        whole = {
            "worker": _short(worker["id"]) + (" (draining)" if worker["is_draining"] else ""),
            "model": worker["model"],
            "kv": _percent(worker["kv_share"]),
            "hits": _percent(worker["hit_share"]),
            "busy": _percent(worker["busy_share"]),
        }
        for name, lane in worker["lanes"].items():
            own = {
                "lane": name,
                "running": f"{lane['running']:,}",
                "waiting": f"{lane['waiting']:,}",
                "tokens/s": f"{lane['output_tps']:,.1f}",
                "share": _percent(lane["share"]),
                "ttft p50": _time(lane["ttft_p50_s"]),
                "ttft p99": _time(lane["ttft_p99_s"]),
                "itl p50": _time(lane["itl_p50_s"]),
                "itl p99": _time(lane["itl_p99_s"]),
            }
            found.append(dict.fromkeys(_COLUMNS, "") | whole | own)
            whole = {}
    return found


def _short(worker_id: str) -> str:
    """Host and process; what makes each start unique is left out."""
    return ":".join(worker_id.split(":")[:2])


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"


def _time(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    return f"{1000 * seconds:.0f} ms" if seconds < 1 else f"{seconds:.1f} s"
