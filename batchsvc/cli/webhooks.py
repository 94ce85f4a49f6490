"""`batchsvc webhooks`: receivers of a project's events, and what was sent to them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any
from urllib.parse import quote, urlsplit

import typer

from batchsvc.cli.exits import CommandError, Exit
from batchsvc.cli.options import ServerOptions, grouped
from batchsvc.cli.outcome import local_time
from batchsvc.stack.options import READING

if TYPE_CHECKING:
    from batchsvc.cli.client import Client

app = typer.Typer(no_args_is_help=True, help="Webhooks: who is told when a batch ends.", rich_markup_mode=None)

_ENDS = "batch.completed,batch.failed,batch.expired,batch.cancelled"
_ROUTE = "/webhook_endpoints"

EndpointArgument = Annotated[str, typer.Argument(metavar="ENDPOINT", help="Id of the webhook endpoint (we_...).")]


@app.command()
@grouped
def create(
    *,
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
    server: ServerOptions,
) -> None:
    """Have events of the project sent to a URL. The signing secret is shown this once."""
    console = server.console
    with _client(server) as client:
        wanted = client.get("/webhook_event_types")["data"] if events == "all" else _listed(events)
        body = {"url": receiver, "event_types": wanted, "name": name or _host(receiver)}
        made = client.post(_ROUTE, body)
    console.out(made["signing_secret"])
    console.say(f"{made['id']} is told of {', '.join(made['event_types'])}. The line above is its signing secret.")
    console.result(made)


@app.command("list")
@grouped
def list_endpoints(
    server: ServerOptions,
) -> None:
    """List the receivers of the project, without their secrets."""
    console = server.console
    with _client(server) as client:
        page = client.get(f"{_ROUTE}?limit=100")
    console.result(page)
    rows = [{**row, "events": ",".join(row["event_types"]), "state": _state(row)} for row in page["data"]]
    console.table(rows, ("id", "name", "url", "events", "state"))


@app.command()
@grouped
def delete(
    endpoint: EndpointArgument,
    server: ServerOptions,
) -> None:
    """Delete a receiver; what is on its way to it is not sent any more."""
    console = server.console
    with _client(server) as client:
        gone = client.delete(_path(endpoint))
    console.out(f"{gone['id']} is deleted.")
    console.result(gone)


@app.command()
@grouped
def rotate(
    *,
    endpoint: EndpointArgument,
    keep_old: Annotated[
        bool, typer.Option("--keep-old", help="Let the old secret sign beside the new one for 24 hours.")
    ] = False,
    server: ServerOptions,
) -> None:
    """Make a new signing secret, which is shown this once; the old one ends."""
    console = server.console
    with _client(server) as client:
        made = client.post(_path(endpoint, "rotate_secret"), {"keep_old_secret_active_for_24_hours": keep_old})
    console.out(made["signing_secret"])
    console.result(made)


@app.command("test")
@grouped
def send_test(
    *,
    endpoint: EndpointArgument,
    event: Annotated[str, typer.Option("--event", metavar="TYPE", help="The event to send.")] = "batch.completed",
    server: ServerOptions,
) -> None:
    """Send a sample event to a receiver now, and say what it answered. Exits 1 unless that was a 2xx."""
    console = server.console
    with _client(server) as client:
        answer = client.post(_path(endpoint, "test"), {"event_type": event})
    console.out(f"{endpoint} answered {answer['status_code']} to {answer['event_type']}.")
    console.result(answer)
    if not 200 <= answer["status_code"] < 300:
        raise typer.Exit(Exit.FAILED)


@app.command()
@grouped
def deliveries(
    *,
    endpoint: EndpointArgument,
    limit: Annotated[int, typer.Option("--limit", min=1, max=100, help="The newest so many.")] = 20,
    server: ServerOptions,
) -> None:
    """List what was sent to a receiver, or will be, with what it answered last."""
    console = server.console
    with _client(server) as client:
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
def _client(server: ServerOptions) -> Iterator[Client]:
    with server.opened(roles=READING, purpose="webhooks") as session:
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
