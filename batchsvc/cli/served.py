"""Whether the stack that a command started can run a batch: a command's own stack has one engine worker."""

from __future__ import annotations

from typing import Any

from batchsvc.cli.exits import CommandError
from batchsvc.cli.target import Session
from batchsvc.stack.datadir import DataDir


def model_of_batch(directory: DataDir, batch_id: str) -> str | None:
    """What an engine worker has to load for a batch of this directory; None if that isn't known (yet)."""
    if not directory.database.exists():
        return None
    from sqlalchemy.exc import OperationalError

    from batchsvc.batches.tables import Batch
    from batchsvc.db.session import Database
    from batchsvc.stack.prepare import registered_path

    database = Database(directory.database_url)
    try:
        with database.reading() as session:
            batch = session.get(Batch, batch_id)
    except OperationalError:  # made by an older version; the start will migrate it
        return None
    finally:
        database.dispose()
    asked = (batch.model_id or batch.model_requested) if batch else None
    if batch is None or asked is None:
        return None
    return registered_path(directory, str((batch.aliases or {}).get(asked, asked)))


def check(session: Session, batch: dict[str, Any]) -> None:
    """Raises CommandError if a batch would wait for ever for a model that the command's own stack doesn't have."""
    if not session.is_own or batch["status"] != "in_progress" or not batch.get("waiting_for"):
        return
    digests = {row["id"]: row["digest"] for row in session.client.models()["data"]}
    served = digests.get(session.model)
    if batch.get("models") is not None:
        lacking = [name for name, pin in batch["models"].items() if served not in (None, pin["digest"])]
        if lacking:
            every = " ".join(f"--model {name}" for name in batch["models"])
            raise CommandError(
                f"{batch['id']} needs workers for {' and '.join(lacking)} too, and this command has started "
                f"{session.model} alone: go on with it while `batchsvc up {every}{session.target.flags()}` runs."
            )
        return
    if digests.get(session.model, batch["model_digest"]) != batch["model_digest"]:
        raise CommandError(
            f"{batch['id']} needs the model {batch['model']}, and this command has started {session.model}: "
            f"go on with `batchsvc watch {batch['id']}{session.target.flags()}`."
        )
