"""`batchsvc webhooks`: receivers of a project's events, and what was sent to them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any
from urllib.parse import quote, urlsplit

import typer

from batchsvc.cli.console import Console
from batchsvc.cli.exits import CommandError, Exit
from batchsvc.cli.options import DataDirOption, JsonOption, KeyOption, UrlOption
from batchsvc.cli.outcome import local_time
from batchsvc.cli.target import opened, select
from batchsvc.stack.options import READING

if TYPE_CHECKING:
    from batchsvc.cli.client import Client

app = typer.Typer(no_args_is_help=True, help="Webhooks: who is told when a batch ends.", rich_markup_mode=None)

_ENDS = "batch.completed,batch.failed,batch.expired,batch.cancelled"
_ROUTE = "/webhook_endpoints"

EndpointArgument = Annotated[str, typer.Argument(metavar="ENDPOINT", help="Id of the webhook endpoint (we_...).")]


@app.command()
def create(
    receiver: Annotated[str, typer.Argument(metavar="RECEIVER", help="The https:// URL that events are sent to.")],
    events: Annotated[
        str,
        typer.Option(
            "--events",
            metavar="LIST",
            help="Events with commas between; all: every one, batch.at_risk and spend.alert too.",
        ),
    ] = _ENDS,
    name: Annotated[
        str | None, typer.Option("--name", metavar="N", help="What it is; default: the URL's host.")
    ] = None,
    data_dir: DataDirOption = None,
    url: UrlOption = None,
    api_key: KeyOption = None,
    as_json: JsonOption = False,
) -> None:
    """Have events of the project sent to a URL. The signing secret is shown this once."""
    console = Console(as_json=as_json)
    with _client(console, data_dir, url, api_key) as client:
        wanted = client.get("/webhook_event_types")["data"] if events == "all" else _listed(events)
        body = {"url": receiver, "event_types": wanted, "name": name or _host(receiver)}
        made = client.post(_ROUTE, body)
    console.out(made["signing_secret"])
    console.say(f"{made['id']} is told of {', '.join(made['event_types'])}. The line above is its signing secret.")
    console.result(made)


@app.command("list")
def list_endpoints(
    data_dir: DataDirOption = None, url: UrlOption = None, api_key: KeyOption = None, as_json: JsonOption = False
) -> None:
    """List the receivers of the project, without their secrets."""
    console = Console(as_json=as_json)
    with _client(console, data_dir, url, api_key) as client:
        page = client.get(f"{_ROUTE}?limit=100")
    console.result(page)
    rows = [{**row, "events": ",".join(row["event_types"]), "state": _state(row)} for row in page["data"]]
    console.table(rows, ("id", "name", "url", "events", "state"))


@app.command()
def delete(
    endpoint: EndpointArgument,
    data_dir: DataDirOption = None,
    url: UrlOption = None,
    api_key: KeyOption = None,
    as_json: JsonOption = False,
) -> None:
    """Delete a receiver; what is on its way to it is not sent any more."""
    console = Console(as_json=as_json)
    with _client(console, data_dir, url, api_key) as client:
        gone = client.delete(_path(endpoint))
    console.out(f"{gone['id']} is deleted.")
    console.result(gone)


@app.command()
def rotate(
    endpoint: EndpointArgument,
    keep_old: Annotated[
        bool, typer.Option("--keep-old", help="Let the old secret sign beside the new one for 24 hours.")
    ] = False,
    data_dir: DataDirOption = None,
    url: UrlOption = None,
    api_key: KeyOption = None,
    as_json: JsonOption = False,
) -> None:
    """Make a new signing secret, which is shown this once; the old one ends."""
    console = Console(as_json=as_json)
    with _client(console, data_dir, url, api_key) as client:
        made = client.post(_path(endpoint, "rotate_secret"), {"keep_old_secret_active_for_24_hours": keep_old})
    console.out(made["signing_secret"])
    console.result(made)


@app.command("test")
def send_test(
    endpoint: EndpointArgument,
    event: Annotated[str, typer.Option("--event", metavar="TYPE", help="The event to send.")] = "batch.completed",
    data_dir: DataDirOption = None,
    url: UrlOption = None,
    api_key: KeyOption = None,
    as_json: JsonOption = False,
) -> None:
    """Send a sample event to a receiver now, and say what it answered. Exits 1 unless that was a 2xx."""
    console = Console(as_json=as_json)
    with _client(console, data_dir, url, api_key) as client:
        answer = client.post(_path(endpoint, "test"), {"event_type": event})
    console.out(f"{endpoint} answered {answer['status_code']} to {answer['event_type']}.")
    console.result(answer)
    if not 200 <= answer["status_code"] < 300:
        raise typer.Exit(Exit.FAILED)


@app.command()
def deliveries(
    endpoint: EndpointArgument,
    limit: Annotated[int, typer.Option("--limit", min=1, max=100, help="The newest so many.")] = 20,
    data_dir: DataDirOption = None,
    url: UrlOption = None,
    api_key: KeyOption = None,
    as_json: JsonOption = False,
) -> None:
    """List what was sent to a receiver, or will be, with what it answered last."""
    console = Console(as_json=as_json)
    with _client(console, data_dir, url, api_key) as client:
        page = client.get(f"{_path(endpoint, 'deliveries')}?limit={limit}")
    console.result(page)
    rows = [
        {
            "event": row["event_id"],
            "type": row["event_type"],
            "state": row["state"],
            "attempts": len(row["attempts"]),
            "last answer": _last_answer(row["attempts"]),
            "created": local_time(row["created_at"]),
            "next attempt": local_time(row["next_attempt_at"]) if row["next_attempt_at"] else "",
        }
        for row in page["data"]
    ]
    console.table(rows, ("event", "type", "state", "attempts", "last answer", "created", "next attempt"))


@contextmanager
def _client(console: Console, data_dir: Path | None, url: str | None, api_key: str | None) -> Iterator[Client]:
    target = select(data_dir, url, api_key, os.environ)
    with opened(target, console, roles=READING, purpose="webhooks") as session:
        yield session.client


def _path(endpoint: str, *more: str) -> str:
    return "/".join((_ROUTE, quote(endpoint, safe=""), *more))


def _listed(text: str) -> list[str]:
    events = [part.strip() for part in text.split(",") if part.strip()]
    if not events:
        raise CommandError("--events names at least one event, such as batch.completed.", Exit.USAGE)
    return events


def _host(receiver: str) -> str:
    try:
        return urlsplit(receiver).hostname or "webhook"
    except ValueError:
        return "webhook"  # the API says what is wrong with the URL


def _state(row: dict[str, Any]) -> str:
    if row["paused_until"]:
        return f"failing, paused until {local_time(row['paused_until'])}"
    return f"{row['failures_in_a_row']} failures in a row" if row["failures_in_a_row"] else "ok"


def _last_answer(attempts: list[dict[str, Any]]) -> str:
    if not attempts:
        return ""
    last = attempts[-1]
    return str(last["status_code"] or last["error"])
