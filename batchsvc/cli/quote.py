"""`batchsvc quote`: what a file would cost, before anything runs: exact for its input, low to high for its output."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Annotated, Any

import typer

from batchsvc.cli import outcome
from batchsvc.cli.console import Console
from batchsvc.cli.exits import ApiError, CommandError, Exit
from batchsvc.cli.input_file import InputOptions, Source, endpoint_of, model_to_serve
from batchsvc.cli.options import ServerOptions, grouped
from batchsvc.cli.prompt import Prompting, requests_of
from batchsvc.cli.run import LineOptions, given_to
from batchsvc.cli.target import names_itself
from batchsvc.money import format_dollars
from batchsvc.stack.options import CANCELLING

if TYPE_CHECKING:
    from batchsvc.cli.client import Client

_POLL_S = 0.5
_SHOWN_PROBLEMS = 20
_BOUNDS = ("low", "expected", "high")


@grouped
def quote(
    *,
    given: InputOptions,
    prompting: Prompting,
    wanted: LineOptions,
    sample: Annotated[
        int | None,
        typer.Option("--sample", min=1, max=100_000, metavar="N", help="Estimate from N random lines: no quote."),
    ] = None,
    server: ServerOptions,
) -> None:
    """Say what a file would cost, and hold its prices: validated, tokenized and planned, but not run.

    `batchsvc run FILE --quote ID` runs it at these prices; its input never costs more than quoted.
    """
    console, source = server.console, given.chosen()
    target, model = server.target, wanted.spelled_model
    wishes = wanted.extensions()
    wishes |= {name: value for name, value in (("model", model), ("sample", sample)) if value}
    with requests_of(source, prompting, console, model=wanted.line_model, skip_invalid=wanted.skip_invalid) as requests:
        wishes["endpoint"] = endpoint_of(requests, prompting.url)
        named = model or model_to_serve(target, requests)
        is_ours = named is None or names_itself(named)
        with server.opened(roles=CANCELLING, purpose="quote", model=named, needs_model=is_ours) as session:
            try:
                found = _asked(session.client, console, requests, wishes)
            except ApiError as error:
                if error.status in (400, 413, 415, 422):
                    raise CommandError(error.message, Exit.REFUSED) from error
                raise
    console.result(found)
    if found["status"] == "failed":
        outcome.tell_problems(found, console, all_by=f"batchsvc quote {source} --json")
        raise typer.Exit(Exit.REFUSED)
    same = " and the same options" if prompting.prompt is not None else ""
    _show(found, console, source, target.flags(), same)


def _asked(client: Client, console: Console, source: Source, wishes: dict[str, Any]) -> dict[str, Any]:
    """Upload, ask, and wait until it is planned."""
    found = client.post("/batches/quote", {"input_file_id": given_to(client, source, console), **wishes})
    if found["status"] == "queued":
        console.say(f"{found['id']} is being planned.")
    while found["status"] == "queued":
        time.sleep(_POLL_S)
        found = client.get(f"/batches/quote/{found['id']}")
    return found


def _show(found: dict[str, Any], console: Console, source: Source, flags: str, same: str) -> None:
    is_quote = found["object"] == "quote"
    counts, usage, cost = found["request_counts"], found["usage"], found["cost"]
    models = found["model"] or " and ".join(found.get("models") or ())
    rejected = f", {counts['rejected']:,} of them rejected" if counts.get("rejected") else ""
    fields = {
        "Quote" if is_quote else "Estimate": found["id"],
        "Lines": f"{counts['total']:,}{rejected}",
        "Model": f"{models}, tier {found['tier']}, price book {found['price_version']}",
        "Input": _tokens(usage["input_tokens"], usage["input_tokens_details"]["cached_tokens"]),
    }
    if is_quote:
        fields["Valid"] = f"until {outcome.local_time(found['expires_at'])}"
    else:
        fields["Sample"] = f"{found['sample']['lines']:,} of {found['sample']['of']:,} lines: no quote, it may be wrong"
    console.fields(fields)
    console.out("")
    inputs = cost["input_nanos"] if not is_quote else dict.fromkeys(_BOUNDS, cost["input_nanos"])
    rows = [("input", inputs), ("output", cost["output_nanos"]), ("total", cost["total_nanos"])]
    console.table(
        [{"cost": name} | {bound: format_dollars(nanos[bound]) for bound in _BOUNDS} for name, nanos in rows],
        ("cost", *_BOUNDS),
    )
    console.out("")
    console.out(_basis(found))
    for says in _problems(found):
        console.out(says)
    if is_quote:
        for says in _advice(found.get("advice")):
            console.out(says)
        console.out(f"Run it at these prices: `batchsvc run {source} --quote {found['id']}{flags}`{same}.")


def _tokens(total: Any, cached: Any) -> str:
    if isinstance(total, dict):
        bounds = f"{total['low']:,} to {total['high']:,} tokens"
        return f"{bounds}, of them {cached['low']:,} to {cached['high']:,} cached"
    share = f"{100 * cached / total:.1f} %" if total else "0 %"
    return f"{total:,} tokens, of them {cached:,} cached ({share})"


def _basis(found: dict[str, Any]) -> str:
    if found["output_basis"] == "finished_lines":
        by = f"what {found['finished_lines']:,} finished lines of this project and model showed"
    else:
        by = "the lines' max_tokens, as too few lines of this project and model have finished"
    most = found["cost"].get("most_nanos")
    limit = "" if most is None else f" If every answer were as long as it may be, it would be {format_dollars(most)}."
    return f"The output is told by {by}.{limit}"


def _problems(found: dict[str, Any]) -> list[str]:
    problems = found["problems"]
    says = [f"  line {one['line']}: {one['message']} ({one['code']})" for one in problems["data"][:_SHOWN_PROBLEMS]]
    more = problems["total"] - len(says)
    lines = "line" if problems["total"] == 1 else "lines"
    head = [f"{problems['total']:,} {lines} would get an error line, which costs nothing:"] if says else []
    return [*head, *says, *([f"  ... and {more:,} more: --json lists them."] if more > 0 else [])]


def _advice(advice: dict[str, Any] | None) -> list[str]:
    if not advice:
        return []
    says = [
        f"Advice: in {advice['moved_lines']:,} of {advice['lines']:,} lines, text that many prompts share stands after "
        f"text of their own. With the shared text first, {advice['more_cached_tokens']:,} more tokens would be cached, "
        f"which saves {format_dollars(advice['saved_nanos'])}:"
    ]
    for one in advice["misplaced"]:
        says.append(f"  line {one['line']}, message {one['message'] + 1}, in {one['lines']:,} lines: {one['text']!r}")
    return says
