"""Waits until the results of an ended batch are in the store that it names, and says why if they aren't."""

from __future__ import annotations

import time
from typing import Any, Protocol

from batchsvc.cli.console import Console
from batchsvc.cli.exits import CommandError

_POLL_S = 0.5
_PATIENT_ATTEMPTS = 3  # that fail; the server goes on trying, and nobody need watch


class Batches(Protocol):
    """Looks a batch up; the client is one."""

    def batch(self, batch_id: str) -> dict[str, Any]: ...


def wait_for_export(client: Batches, batch: dict[str, Any], console: Console) -> dict[str, Any]:
    """The batch when its results are where they should be. Raises CommandError if they don't get there."""
    told: str | None = None
    while (export := batch.get("output_s3")) and export["state"] == "pending":
        error = export["error"]
        if error and export["attempts"] >= _PATIENT_ATTEMPTS:
            raise _failure(batch, f"{error} The server goes on trying")
        if error and error != told:
            console.say(f"The results aren't in {export['uri']} yet: {error}")
            told = error
        time.sleep(_POLL_S)
        batch = client.batch(batch["id"])
    if export and export["state"] == "failed":
        raise _failure(batch, f"{export['error']} It was given up")
    return batch


def shown(batch: dict[str, Any]) -> str | None:
    """Where the results of a batch go in S3, and how far that is; None: nowhere."""
    export = batch.get("output_s3")
    if not export:
        return None
    why = f": {export['error']}" if export["error"] else ""
    return f"{export['uri']} ({export['state']}{why})"


def _failure(batch: dict[str, Any], says: str) -> CommandError:
    return CommandError(
        f"{batch['id']} is {batch['status']}, and its results aren't in {batch['output_s3']['uri']}. {says}; "
        f"`batchsvc results {batch['id']} -o FILE` has them here."
    )
