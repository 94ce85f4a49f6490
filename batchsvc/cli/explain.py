"""`batchsvc explain`: why a line or a batch costs what it costs."""

from __future__ import annotations

from typing import Annotated, Any
from urllib.parse import quote

import typer

from batchsvc.cli.exits import ApiError
from batchsvc.cli.options import BatchArgument, ServerOptions, grouped
from batchsvc.cli.target import Session
from batchsvc.money import format_dollars
from batchsvc.stack.options import READING

_FORBIDDEN = 403


@grouped
def explain(
    *,
    batch_id: BatchArgument,
    custom_id: Annotated[
        str | None, typer.Argument(metavar="CUSTOM_ID", help="One of its lines; default: the batch as a whole.")
    ] = None,
    server: ServerOptions,
) -> None:
    """Explain a bill: cached tokens and why, price row, arithmetic; with an admin key the engine's side too."""
    console = server.console
    with server.opened(roles=READING, purpose="explain") as session:
        if custom_id is not None:
            line = _asked(session, f"/batches/{quote(batch_id, safe='')}/lines/{quote(custom_id, safe='')}")
            console.fields(_line_fields(line))
            console.result(line)
            return
        batch = _asked(session, f"/batches/{quote(batch_id, safe='')}/explanation")
    console.result(batch)
    console.fields(_batch_fields(batch))
    console.table(
        [{**item, "amount": format_dollars(item["amount_nanos"])} for item in batch["items"]],
        ("kind", "tokens", "nanos_per_mtok", "amount"),
    )
    if batch.get("engine"):
        console.fields(engine_fields(batch["engine"]))


def _asked(session: Session, path: str) -> dict[str, Any]:
    """The answer as an operator gets it, if the key is an operator's; the user of a data directory is one."""
    directory = session.target.directory
    if directory is not None:
        key = directory.admin_key.read_text(encoding="utf-8").strip()
        from batchsvc.cli.client import Client

        with Client(session.client.url, key, is_local=True) as operator:
            return operator.get(f"/admin{path}")
    try:
        return session.client.get(f"/admin{path}")
    except ApiError as error:
        if error.status != _FORBIDDEN:
            raise
        return session.client.get(path)


def _line_fields(line: dict[str, Any]) -> dict[str, Any]:
    unit, part, attempts, cached = (line[name] or {} for name in ("unit", "part", "attempts", "cached"))
    usage, price = line["usage"] or {}, line["price"] or {}
    error = line["error"] or {}
    fields = {
        "Line": f"{line['line']} ({line['custom_id']}), {line['status']}",
        "Unit": f"{unit['no']} ({unit['id']}) of window {line['window']}" if unit else None,
        "Part": part.get("id"),
        "Attempts": f"{attempts['failed']} failed; its unit was leased {attempts['unit_was_leased']} times"
        if attempts
        else None,
        "Engine steps": f"{line['engine_steps']:,}" if line.get("engine_steps") else None,
        "Tokens": f"{usage['input_tokens']} in, {usage['cached_tokens']} of them cached, {usage['output_tokens']} out"
        if usage
        else None,
        "Cached": cached.get("why"),
        "Price": f"{price['model']}, {price['tier']}, version {price['version']} of the price book" if price else None,
        "Cost": None if line["cost_nanos"] is None else format_dollars(line["cost_nanos"]),
        "Because": line["arithmetic"],
        "Error": error.get("message"),
        "Gone": " ".join(line.get("gone") or ()),
    }
    return {name: value for name, value in fields.items() if value}


def _batch_fields(batch: dict[str, Any]) -> dict[str, Any]:
    lines, price = batch["lines"], batch["price"] or {}
    fields = {
        "Batch": f"{batch['batch_id']}, {batch['status']}",
        "Lines": f"{lines['answered']:,} answered and {lines['failed']:,} failed of {lines['total']:,}",
        "Price": f"{price['model']}, {price['tier']}, version {price['version']} of the price book" if price else None,
        "Cost": format_dollars(batch["cost_nanos"]),
        "Saved by cache": format_dollars(batch["saved_by_cache_nanos"]),
        "Saved by tier": format_dollars(batch["saved_by_tier_nanos"]),
        "Gone": " ".join(batch.get("gone") or ()),
    }
    return {name: value for name, value in fields.items() if value}


def engine_fields(engine: dict[str, Any]) -> dict[str, Any]:
    cost, margin = engine["cost_nanos_per_mtok"], engine["margin_nanos_per_mtok"]
    price = engine["price_nanos_per_mtok"]
    kind = "served" if engine["weight_bytes_per_output_token"] is None else "output"  # of embeddings there is no output
    return {
        "Engine": f"{engine['workers']} workers, {engine['steps']:,} steps, busy for {engine['busy_ms'] / 1000:,.1f} s",
        "Mean batch": f"{engine['mean_batch_thousandths'] / 1000:.1f}",
        "Weights read": f"{engine[f'weight_bytes_per_{kind}_token']:,} bytes per {kind} token",
        "KV read": f"{engine[f'kv_bytes_per_{kind}_token']:,} bytes per {kind} token",
        "Price per million tokens": "nothing was billed" if price is None else format_dollars(price),
        "Cost per million tokens": "set BATCHSVC_ACCELERATOR_COST_PER_HOUR" if cost is None else format_dollars(cost),
        "Margin": "unknown" if margin is None else format_dollars(margin),
    }
