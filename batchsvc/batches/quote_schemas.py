"""Wire shapes of quotes and estimates."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from batchsvc.batches import quote_figures, quote_queries
from batchsvc.batches.quote_figures import Interval
from batchsvc.batches.tables import Quote
from batchsvc.money import Rates


class CreateQuote(BaseModel):
    """Body of POST /v1/batches/quote: what a batch would be created with, and `sample` for an estimate."""

    model_config = ConfigDict(extra="forbid", strict=True)

    input_file_id: str
    endpoint: str = "/v1/chat/completions"
    completion_window: str = "24h"
    model: str | None = Field(default=None, min_length=1, max_length=255)
    models: Literal["one", "by_line"] = "one"
    on_invalid: Literal["fail", "skip"] = "fail"
    sample: int | None = Field(default=None, ge=1, le=100_000)


def quote_object(row: Quote) -> dict[str, Any]:
    """A quote (or an estimate) as the API shows it. Its figures are there when it is ready."""
    is_estimate = row.sample_lines is not None
    shown: dict[str, Any] = {
        "id": row.id,
        "object": "estimate" if is_estimate else "quote",
        "status": row.status,
        "created_at": row.created_ms // 1000,
        "expires_at": None if row.expires_ms is None else row.expires_ms // 1000,
        "input_file_id": row.input_file_id,
        "input_sha256": row.input_sha256 or None,
        "endpoint": row.endpoint,
        "completion_window": row.completion_window,
        "on_invalid": row.on_invalid,
        "model": row.model_id or row.model_requested,
        "model_digest": row.model_digest,
        "models": _models(row),
        "template_sha256": row.template_sha256,
        "tier": row.tier,
        "price_version": row.price_version,
        "rates": row.rates["tier"] if row.rates else None,
        "plan": {**row.plan_limits, "windows": len(row.windows)},
        "errors": {"object": "list", "data": row.errors} if row.errors else None,
        "errors_total": row.errors_total,
        "problems": {"object": "list", "data": row.problems or [], "total": row.num_rejected},
    }
    if row.status != quote_queries.READY:
        return shown
    known = [row.lengths] if row.models is None else [pin["lengths"] for pin in row.models.values()]
    basis = "finished_lines" if known and all(known) else "max_tokens"
    seen = {"output_basis": basis, "finished_lines": sum(lengths["lines"] for lengths in known if lengths)}
    if is_estimate:
        rates = quote_queries.rates_of(row) if row.rates else Rates(input=0, cached_input=0, output=0)
        return shown | _estimate(row.found or {}, rates, row.num_lines) | seen
    found = quote_queries.figures_of(row)
    return {
        **shown,
        "request_counts": {"total": row.num_lines, "runnable": found.lines, "rejected": row.num_rejected},
        "usage": {
            "input_tokens": found.input_tokens,
            "input_tokens_details": {"cached_tokens": found.cached_tokens},
        },
        "cost": quote_queries.costs_of(row),
        **seen,
        "advice": _advice(row),
    }


def _models(row: Quote) -> dict[str, Any] | None:
    """Of each model that lines name: what is pinned of it."""
    if row.models is None:
        return None
    return {
        name: {
            "digest": pin["digest"],
            "template_sha256": pin.get("template_sha256"),
            "rates": pin["rates"]["tier"],
            "lines": (pin.get("found") or {}).get("lines", 0),
        }
        for name, pin in sorted(row.models.items())
    }


def _estimate(found: dict[str, Any], rates: Rates, num_lines: int) -> dict[str, Any]:
    tokens, uncached = Interval(**found["input_tokens"]), Interval(**found["uncached_tokens"])
    cached = Interval(
        low=max(0, tokens.low - uncached.high),
        expected=max(0, tokens.expected - uncached.expected),
        high=max(0, tokens.high - uncached.low),
    )
    return {
        "request_counts": {"total": num_lines, "runnable": found["lines"]},
        "sample": {"lines": found["drawn"], "of": num_lines},
        "usage": {"input_tokens": asdict(tokens), "input_tokens_details": {"cached_tokens": asdict(cached)}},
        "cost": quote_figures.estimated_costs(
            tokens, uncached, sample=quote_figures.from_json(found["sample"]), lines=found["lines"], rates=rates
        ),
    }


def _advice(row: Quote) -> dict[str, Any] | None:
    """What the other order of the prompts would bring, if it brings anything."""
    advice = row.advice
    if not advice or advice["saved_nanos"] <= 0:
        return None
    more = advice["then_cached_tokens"] - advice["cached_tokens"]
    return {**advice, "more_cached_tokens": more}
