"""Finds the batch that a repeated `run` means, so that nobody pays twice for the same unfinished input.

`run` notes the input's SHA-256 in the batch's metadata, or its address in S3. The same input with the same name (or
both without one), the same --model, --skip-invalid and --output-s3 is the same work. Unfinished work is picked up; with
a name, finished work too, as long as its results were not written where this run would write them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from batchsvc.cli.exits import CommandError, Exit
from batchsvc.cli.follow import ENDED

SHA_KEY, URI_KEY = "input_sha256", "input_s3"
MODEL_KEY = "model_override"
_LOOK_BACK = 500  # batches, newest first


class Listing(Protocol):
    """Batches from the newest on; the client is one."""

    def newest_batches(self, most: int) -> Iterator[dict[str, Any]]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Wish:
    """What this run asks for."""

    sha256: str | None  # of a file
    uri: str | None = None  # of an object in S3
    name: str | None
    model: str | None
    endpoint: str
    on_invalid: str
    has_results: bool  # whether the file that it would write is there already
    quote_id: str | None = None  # at whose prices, if it matters
    is_by_line: bool = False  # each line on the model that it names
    output_s3: str | None = None  # the prefix that the results go to, too
    awaited: frozenset[str] = frozenset()  # batches that were left before their results were written


def find(listing: Listing, wish: Wish) -> dict[str, Any] | None:
    """The batch to go on with, or None. Raises CommandError if the name belongs to other unfinished work."""
    for batch in listing.newest_batches(_LOOK_BACK):
        if batch.get("name") != wish.name or batch["status"] in ("failed", "expired", "cancelled", "cancelling"):
            continue
        is_ended = batch["status"] in ENDED
        if is_same_work(batch, wish):
            if not is_ended or (not wish.has_results and (wish.name or batch["id"] in wish.awaited)):
                return batch
            return None  # a newer run of the same work has its results: this is a new one
        if wish.name and not is_ended:
            raise CommandError(
                f"{batch['id']} has the name {wish.name!r}, is {batch['status']} and has another input or other "
                "options: choose another --name, or cancel it first.",
                Exit.USAGE,
            )
    return None


def is_same_work(batch: dict[str, Any], wish: Wish) -> bool:
    """Whether a batch does what this run asks for."""
    metadata = batch.get("metadata") or {}
    return (
        batch.get("parent_batch_id") is None  # else it runs only some of the lines
        and (metadata.get(SHA_KEY), metadata.get(URI_KEY)) == (wish.sha256, wish.uri)
        and metadata.get(MODEL_KEY) == wish.model
        and batch.get("endpoint", wish.endpoint) == wish.endpoint
        and (batch.get("on_invalid") or "fail") == wish.on_invalid
        and (batch.get("models") is not None) == wish.is_by_line
        and wish.quote_id in (None, batch.get("quote_id"))
        and wish.output_s3 == (batch.get("output_s3") or {}).get("prefix")
    )


def sha256_of(path: Path) -> str:
    """SHA-256 of a file, read in pieces."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
