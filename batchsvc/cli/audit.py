"""`batchsvc audit`: who changed what, when and from where."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer

from batchsvc.cli.amounts import moment_s
from batchsvc.cli.options import AdminOptions, grouped
from batchsvc.cli.organization import opened_organization
from batchsvc.cli.outcome import local_time
from batchsvc.clock import now_ms

_PAYLOADS = ("data", "changes_requested")


@grouped
def audit(
    *,
    action: Annotated[
        list[str] | None, typer.Option("--type", metavar="T", help="Such as api_key.created; again for more.")
    ] = None,
    actor: Annotated[
        list[str] | None, typer.Option("--actor", metavar="A", help="Id of a key, or user@host; again for more.")
    ] = None,
    project: Annotated[
        list[str] | None, typer.Option("--project", metavar="P", help="Id or name; again for more.")
    ] = None,
    target: Annotated[
        list[str] | None, typer.Option("--target", metavar="ID", help="What was changed; again for more.")
    ] = None,
    since: Annotated[
        str | None, typer.Option("--since", metavar="WHEN", help="A date or time in UTC, or how long ago: 24h.")
    ] = None,
    until: Annotated[str | None, typer.Option("--until", metavar="WHEN", help="Likewise; not included.")] = None,
    most: Annotated[int, typer.Option("--limit", min=1, max=10_000, help="Most rows.")] = 100,
    server: AdminOptions,
) -> None:
    """List changes to keys, projects, prices, limits, invoices and stores, and what operators did; newest first."""
    now_s = now_ms() // 1000
    filters: dict[str, list[str]] = {
        "event_types[]": action or [],
        "actor_ids[]": actor or [],
        "project_ids[]": project or [],
        "resource_ids[]": target or [],
        "effective_at[gte]": [] if since is None else [str(moment_s("--since", since, now_s))],
        "effective_at[lt]": [] if until is None else [str(moment_s("--until", until, now_s))],
    }
    with opened_organization(server) as organization:
        found = organization.audit({name: values for name, values in filters.items() if values}, most)
    server.console.result({"object": "list", "data": found})
    server.console.table([_row(row) for row in found], ("when", "who", "from", "what", "target", "details"))


def _row(row: dict[str, Any]) -> dict[str, str]:
    actor, happened = row["actor"], row[row["type"]]
    by_key = actor.get("api_key")
    payload = next((happened[name] for name in _PAYLOADS if name in happened), None)
    details = {name: value for name, value in happened.items() if name != "id"} if payload is None else payload
    return {
        "when": local_time(row["effective_at"]),
        "who": by_key["id"] if by_key else actor["session"]["user"]["id"],
        "from": (by_key or actor["session"])["ip_address"] or "",
        "what": row["type"],
        "target": happened["id"],
        "details": " ".join(f"{name}={_text(value)}" for name, value in details.items()),
    }


def _text(value: object) -> str:
    return value if isinstance(value, str) and " " not in value else json.dumps(value, ensure_ascii=False)
