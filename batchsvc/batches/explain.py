"""Why a line costs what it costs, and what its engine did for it: pure, from rows that are read elsewhere."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from batchsvc.batches.unit_file import UnitRow
from batchsvc.money import TOKENS_PER_RATE, Rates, divide_half_even, line_cost_nanos
from engine.request import Pooling

GRANULE_TOKENS = 16  # planned cached tokens are a multiple of it
Tokens = np.ndarray[Any, np.dtype[np.int32]]


@dataclass(frozen=True, slots=True)
class SharedPrefix:
    """What a prompt begins with that an earlier one of the plan begins with too; `leader` is the first such one."""

    tokens: int
    leader: UnitRow | None


def shared_prefix(prompt: Tokens, earlier: Iterable[UnitRow]) -> SharedPrefix:
    """The longest prefix, in whole granules, that a prompt shares with requests before it in plan order."""
    best, leader = 0, None
    most = max(len(prompt) - 1, 0) // GRANULE_TOKENS * GRANULE_TOKENS
    for row in earlier:
        other = row.prompt_ids
        wanted = best + GRANULE_TOKENS
        if wanted > most or len(other) < wanted or not np.array_equal(other[best:wanted], prompt[best:wanted]):
            continue  # it can't be longer than what was found
        size = min(len(other), most)
        differs = np.flatnonzero(other[:size] != prompt[:size])
        depth = (int(differs[0]) if len(differs) else size) // GRANULE_TOKENS * GRANULE_TOKENS
        if depth > best:
            best, leader = depth, row
    return SharedPrefix(best, leader)


def arithmetic(rates: Rates, *, input_tokens: int, cached_tokens: int, output_tokens: int) -> str:
    """The cost of a line, spelled out."""
    uncached = input_tokens - cached_tokens
    weighted = uncached * rates.input + cached_tokens * rates.cached_input + output_tokens * rates.output
    whole, rest = divmod(weighted, TOKENS_PER_RATE)
    exact = f"{whole}.{rest:06d}".rstrip("0").rstrip(".")
    cost = line_cost_nanos(rates, input_tokens=input_tokens, cached_tokens=cached_tokens, output_tokens=output_tokens)
    rounded = "" if rest == 0 else f", rounded half to even to {cost}"
    return (
        f"({uncached} * {rates.input} + {cached_tokens} * {rates.cached_input} + {output_tokens} * {rates.output})"
        f" / {TOKENS_PER_RATE} = {exact}{rounded} nano-dollars"
    )


def cached_part(
    row: UnitRow, member: int, prefix: SharedPrefix, same: UnitRow | None, cached_tokens: int | None
) -> dict[str, Any]:
    """Which input tokens of a line are cached, and why. `same` is the earlier request that its own repeats, if one
    does; `cached_tokens` is what it was billed, None while it isn't finished."""
    planned = row.cached_tokens(member)
    beyond = None if cached_tokens is None else max(0, cached_tokens - planned)
    first = row if member > 0 else same
    if first is not None:
        line = named(first)
        why = f"The same request as line {line['line']} ({line['custom_id']}): it runs once, so its prompt is cached."
        return {
            "planned_tokens": planned,
            "beyond_plan_tokens": beyond,
            "duplicate_of": line,
            "leader": None,
            "why": why,
        }
    is_mean = row.params.get("pooling") == Pooling.MEAN
    leader = named(prefix.leader) if prefix.leader is not None and planned else None
    if is_mean:
        why = "The model pools over all tokens of a text, so it computes each of them: no prefix is reused."
    elif prefix.leader is not None and leader is None:
        why = "It begins as an earlier line does, but with nothing that the engine can take from its cache."
    elif leader is None:
        why = "No earlier line of its window begins with the same 16 tokens."
    else:
        why = (
            f"Its first {planned} tokens are those of line {leader['line']} ({leader['custom_id']}),"
            " which comes earlier in the plan and computes them."
        )
    if beyond:
        why += f" The engine's cache held {beyond} tokens more than was planned; they are billed as cached too."
    return {"planned_tokens": planned, "beyond_plan_tokens": beyond, "duplicate_of": None, "leader": leader, "why": why}


def named(row: UnitRow) -> dict[str, Any]:
    """A request by its first line."""
    return {"line": row.line_nos[0], "custom_id": row.custom_ids[0]}


def price_part(rates: Rates, *, version: int, model: str | None, tier: str) -> dict[str, Any]:
    """The pinned price row."""
    return {
        "version": version,
        "model": model,
        "tier": tier,
        "input_nanos_per_mtok": rates.input,
        "cached_input_nanos_per_mtok": rates.cached_input,
        "output_nanos_per_mtok": rates.output,
    }


def engine_part(
    stats: Iterable[dict[str, Any]], *, cost_per_hour_nanos: int, cost_nanos: int, tokens: int
) -> dict[str, Any] | None:
    """What the live workers of a model have done since they started, and what a million tokens cost there; None
    without one that has served. Bytes per output token are None where they only embed. `cost_nanos` and `tokens` (input
    and output) are the batch's."""
    rows = [row for row in stats if row.get("output_tokens") or row.get("prompt_tokens")]
    if not rows:
        return None
    steps = sum(row["steps"] for row in rows)
    output_tokens = sum(row["output_tokens"] for row in rows)
    served = output_tokens + sum(row.get("prompt_tokens", 0) for row in rows)
    busy_ms = sum(row.get("busy_ms", 0) for row in rows)
    chunks = sum(round(row["mean_running"] * row["steps"]) for row in rows)
    weights = sum(row.get("weight_bytes", 0) * row["steps"] for row in rows)
    kv = sum(row.get("block_bytes", 0) * row.get("read_blocks", 0) for row in rows)
    shown: dict[str, Any] = {
        "workers": len(rows),
        "steps": steps,
        "output_tokens": output_tokens,
        "served_tokens": served,
        "busy_ms": busy_ms,
        "mean_batch_thousandths": divide_half_even(1000 * chunks, max(steps, 1)),
        "weight_bytes_per_output_token": divide_half_even(weights, output_tokens) if output_tokens else None,
        "kv_bytes_per_output_token": divide_half_even(kv, output_tokens) if output_tokens else None,
        "weight_bytes_per_served_token": divide_half_even(weights, served),
        "kv_bytes_per_served_token": divide_half_even(kv, served),
        "accelerator_cost_per_hour_nanos": cost_per_hour_nanos,
        "cost_nanos_per_mtok": None,
        "price_nanos_per_mtok": divide_half_even(cost_nanos * 1_000_000, tokens) if tokens else None,
        "margin_nanos_per_mtok": None,
    }
    if busy_ms and cost_per_hour_nanos:
        cost = divide_half_even(cost_per_hour_nanos * busy_ms * 1_000_000, 3_600_000 * served)
        shown["cost_nanos_per_mtok"] = cost
        if tokens:
            shown["margin_nanos_per_mtok"] = shown["price_nanos_per_mtok"] - cost
    return shown
