"""Wire shapes of batches and models: OpenAI's objects, with our extensions as further fields."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, StrictFloat, StrictInt, StrictStr

from batchsvc.batches.lifecycle import Status
from batchsvc.batches.manifest import MANIFEST
from batchsvc.batches.outlook import Outlook
from batchsvc.batches.scaling_queries import Demand
from batchsvc.batches.tables import Batch, Export, Model
from batchsvc.files.schemas import ExpiresAfter

MOST_REQUESTS = 100_000  # in a call; a file may have more


class CreateBatch(BaseModel):
    """Body of POST /v1/batches. All from `model` on are extensions (`extra_body` of the client).

    The input is a file, an object as `s3://bucket/key`, or, without one, the `requests` themselves, each as a line of a
    file would be; their method and url may be left out.
    """

    model_config = ConfigDict(extra="forbid", strict=True)

    input_file_id: str | None = None
    endpoint: str
    completion_window: str
    metadata: dict[str, str] | None = None
    output_expires_after: ExpiresAfter | None = None
    model: str | None = Field(default=None, min_length=1, max_length=255)
    models: Literal["one", "by_line"] = "one"  # of all lines, or of each its own
    on_invalid: Literal["fail", "skip"] = "fail"
    name: str | None = Field(default=None, min_length=1, max_length=128)
    priority: int = Field(default=0, ge=-10, le=10)
    on_quota: Literal["wait", "fail"] = "wait"
    quote_id: str | None = Field(default=None, min_length=1, max_length=64)
    max_cost: StrictInt | StrictFloat | StrictStr | None = None  # dollars
    output_s3: str | None = Field(default=None, min_length=1, max_length=1100)  # a prefix that results go to, too
    requests: list[dict[str, Any]] | None = Field(default=None, min_length=1, max_length=MOST_REQUESTS)


class RunAgain(BaseModel):
    """Body of a retry or a continuation. What isn't given is as it was for the batch whose lines run again."""

    model_config = ConfigDict(extra="forbid", strict=True)

    completion_window: str | None = None
    metadata: dict[str, str] | None = None
    name: str | None = Field(default=None, min_length=1, max_length=128)
    priority: int | None = Field(default=None, ge=-10, le=10)
    on_quota: Literal["wait", "fail"] | None = None
    max_cost: StrictInt | StrictFloat | StrictStr | None = None  # dollars


class RegisterModel(BaseModel):
    """Body of a new model: its path on every machine or a name to fetch it by, and what the operator read from it."""

    model_config = ConfigDict(extra="forbid", strict=True)

    name: str
    path: str = Field(min_length=1, max_length=1024)
    digest: str = Field(pattern=r"^[0-9a-f]{64}$")
    context_tokens: int = Field(ge=1, le=2**31 - 1)
    weight_format: str = Field(default="bf16", min_length=1, max_length=16)
    kv_format: str = Field(default="bf16", min_length=1, max_length=16)
    project_id: str | None = Field(default=None, min_length=1, max_length=64)


class CreateAlias(BaseModel):
    """Body of a new alias: another name for a model."""

    model_config = ConfigDict(extra="forbid", strict=True)

    name: str
    target: str


def batch_object(
    row: Batch, outlook: Outlook, *, waiting_for: str | None, scheduled_ms: int | None, export: Export | None = None
) -> dict[str, Any]:
    """A batch as the API shows it. `usage` is there from `in_progress` on: before, nobody knows any token."""
    status = shown_status(row)
    has_started = row.in_progress_ms is not None
    shown: dict[str, Any] = {
        "id": row.id,
        "object": "batch",
        "endpoint": row.endpoint,
        "errors": {"object": "list", "data": row.errors} if row.errors else None,
        "warnings": {"object": "list", "data": row.warnings} if row.warnings else None,
        "input_file_id": row.input_file_id,
        "completion_window": row.completion_window,
        "status": status,
        "output_file_id": row.output_file_id,
        "error_file_id": row.error_file_id,
        "created_at": row.created_ms // 1000,
        "in_progress_at": _seconds(row.in_progress_ms),
        "expires_at": row.expires_ms // 1000,
        "finalizing_at": _seconds(row.finalizing_ms),
        "completed_at": _seconds(row.ended_ms if status == Status.COMPLETED else None),
        "failed_at": _seconds(row.ended_ms if status == Status.FAILED else None),
        "expired_at": _seconds(row.ended_ms if status == Status.EXPIRED else None),
        "cancelling_at": _seconds(row.cancelling_ms),
        "cancelled_at": _seconds(row.ended_ms if status == Status.CANCELLED else None),
        "request_counts": {
            "total": row.total if has_started else 0,
            "completed": row.completed if has_started else 0,
            "failed": row.failed if has_started else 0,
        },
        "metadata": row.metadata_json,
        "model": row.model_id or row.model_requested,
        "model_digest": row.model_digest,
        "models": _models(row),
        "weight_format": row.weight_format,
        "kv_format": row.kv_format,
        "quality": row.quality,
        "on_invalid": row.on_invalid,
        "name": row.name,
        "parent_batch_id": row.parent_batch_id,
        "project_id": row.project_id,
        "priority": row.priority,
        "on_quota": row.on_quota,
        "quote_id": row.quote_id,
        "max_cost_nanos": row.max_cost_nanos,
        "lines_over_budget": row.over_budget,
        **outlook.shown(),
        "waiting_for": waiting_for,
        "scheduled_for": _seconds(scheduled_ms),
        "pause_reason": row.pause_reason if row.is_paused else None,
        "errors_total": row.errors_total,
        "output_s3": export_shown(row, export),
    }
    if has_started:
        shown["usage"] = _usage(row)
    return shown


def shown_status(row: Batch) -> Status:
    """The status in OpenAI's sense: a cancelled batch is `cancelling` until its results are there."""
    if row.status == Status.FINALIZING and row.why == Status.CANCELLED:
        return Status.CANCELLING
    return Status(row.status)


def model_object(
    row: Model, target: Model | None, served: Mapping[str, int], notes: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """A model or an alias. An alias shows the digest and formats of its `target`. `notes` say what workers wait for."""
    real = target or row
    return {
        "id": row.id,
        "object": "model",
        "created": row.created_ms // 1000,
        "owned_by": real.project_id or "batchsvc",
        "digest": real.digest,
        "weight_format": real.weight_format,
        "kv_format": real.kv_format,
        "quality": real.quality,
        "context_tokens": real.context_tokens,
        "alias_of": row.alias_of,
        "workers": served.get(real.digest, 0),
        "note": (notes or {}).get(str(real.digest)),
    }


def demand_object(demand: Demand) -> dict[str, Any]:
    """What a model's workers could do now, in numbers that a scaler divides by its target."""
    return {
        "object": "scaling",
        "model": demand.model,
        "digest": demand.digest,
        "units_claimable": demand.units_claimable,
        "backlog_tokens": demand.backlog_tokens,
        "backlog_seconds": round(demand.backlog_seconds, 3),
        "workers": demand.workers,
    }


def _models(row: Batch) -> dict[str, Any] | None:
    """Of a batch whose lines name their models: what is pinned of each. Null: it has one."""
    if row.models is None:
        return None
    shown = ("digest", "weight_format", "kv_format", "quality")
    return {name: {key: pin.get(key) for key in shown} for name, pin in sorted(row.models.items())}


def _usage(row: Batch) -> dict[str, Any]:
    return {
        "input_tokens": row.input_tokens,
        "input_tokens_details": {"cached_tokens": row.cached_tokens},
        "output_tokens": row.output_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": row.input_tokens + row.output_tokens,
        "cost_nanos": row.cost_nanos,
        "standard_nanos": row.standard_nanos,
    }


def export_shown(row: Batch, export: Export | None) -> dict[str, Any] | None:
    """Where the results go in the tenant's store; they are there when the manifest is, and `state` is `done`."""
    if export is None:
        return None
    prefix = f"{row.output_s3}{row.id}/"
    return {
        "prefix": row.output_s3,
        "uri": prefix,
        "manifest": f"{prefix}{MANIFEST}",
        "state": export.state,
        "error": export.error,
        "attempts": export.num_failures + (export.state == "done"),
    }


def _seconds(ms: int | None) -> int | None:
    return None if ms is None else ms // 1000
