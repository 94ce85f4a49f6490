"""The last object of an export: what the batch came to, and which objects beside it hold its results. Pure.

It says the same whoever writes it, and however often: only what is fixed when a batch has ended stands in it. So an
export that is made again after a kill replaces each object by itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import orjson

MANIFEST = "manifest.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportedFile:
    """A result object: its kind (output or error), where it is, and what is in it."""

    kind: str
    uri: str
    num_lines: int
    size_bytes: int
    sha256: str


def object_name(kind: str) -> str:
    """The name of a result object under the batch's own prefix."""
    return f"{kind}.jsonl"


def manifest(batch: dict[str, Any], files: Sequence[ExportedFile]) -> bytes:
    """The manifest of an ended batch, which is given as the API shows it."""
    ended = ("completed_at", "failed_at", "expired_at", "cancelled_at")
    models = ("model", "model_digest", "models")
    told = ("endpoint", *models, "status", "request_counts", "usage", "errors", "errors_total")
    kept = ("input_file_id", "name", "metadata", "parent_batch_id", "created_at")
    found: dict[str, Any] = {"object": "batch.manifest", "batch_id": batch["id"]}
    found |= {name: batch.get(name) for name in (*told, *kept)}
    found["ended_at"] = next((batch[name] for name in ended if batch[name] is not None), None)
    found["files"] = [
        {
            "kind": file.kind,
            "uri": file.uri,
            "lines": file.num_lines,
            "bytes": file.size_bytes,
            "sha256": file.sha256,
        }
        for file in files
    ]
    return orjson.dumps(found, option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE | orjson.OPT_SORT_KEYS)
