"""What an embedded stack has in place before its processes start: schema, prices, project, keys and model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sqlalchemy.exc import OperationalError
from sqlalchemy.orm import Session

from batchsvc.accounts import administration, key_administration
from batchsvc.accounts import service as accounts
from batchsvc.audit.actor import service as part_of_service
from batchsvc.batches import models
from batchsvc.billing import service as billing
from batchsvc.db.migrate import upgrade
from batchsvc.db.session import Database
from batchsvc.errors import AuthenticationError, UnavailableError
from batchsvc.stack.datadir import DataDir
from engine.load.wheels import Accept

PROJECT = "default"
_ACTOR = part_of_service("stack")


def prepare_database(directory: DataDir, database: Database) -> None:
    """Bring the schema to this version and put prices, project and the two keys in place. Repeatable."""
    upgrade(database.url)
    database.run(billing.seed_prices)
    _prepare_key(directory, database, directory.api_key, "first", is_admin=False)
    _prepare_key(directory, database, directory.admin_key, "admin", is_admin=True)


def project_id(session: Session) -> str:
    """The project that an embedded stack works for, made on first use."""
    found = accounts.project_named(session, PROJECT)
    return found.id if found else administration.create_project(session, _ACTOR, PROJECT).id


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundModel:
    """A model on this machine, and what the registry keeps of it.

    `source` names it to other machines: its own name if each can fetch it, else its path.
    """

    path: Path
    source: str
    digest: str
    context_tokens: int
    project_id: str | None = None  # who alone may use it, as its files say: see engine/load/origin.py

    def registration(self, name: str) -> dict[str, Any]:
        """Arguments of `models.register`, which are also the body of POST /v1/admin/models."""
        found = {"path": self.source, "digest": self.digest, "context_tokens": self.context_tokens}
        bound = {} if self.project_id is None else {"project_id": self.project_id}
        return {"name": name, **found, **bound}


def located(model: str, say: Callable[[str], None], accept: Accept | None = None) -> FoundModel:
    """Find a model, or pull it; `accept` is asked where a licence binds its users. Raises UnavailableError in one
    sentence."""
    from engine.errors import EngineError
    from engine.load.fetch import KNOWN_MODELS, locate
    from engine.load.meta import read_meta
    from engine.load.origin import project_of

    try:
        path = locate(model, say=say, accept=accept)
        meta, project = read_meta(path), project_of(path)
    except EngineError as error:
        raise UnavailableError(str(error)) from error
    source = model if model in KNOWN_MODELS or model.startswith("hf:") else str(path)
    return FoundModel(
        path=path, source=source, digest=meta.digest, context_tokens=meta.context_tokens, project_id=project
    )


def prepare_model(database: Database, name: str, say: Callable[[str], None]) -> None:
    """Find or pull a model and register it, so that batches may name it."""
    registration = located(name, say).registration(name)

    def register(session: Session) -> None:
        models.register(session, **registration)

    database.run(register)


def registered_path(directory: DataDir, name: str) -> str | None:
    """What to load for the model that a name means here: a path, or a name to fetch it by; None for an unknown name."""
    if not directory.database.exists():
        return None
    database = Database(directory.database_url)
    try:
        with database.reading() as session:
            row = models.resolve(session, name, project_id=None)
            return None if row is None else row.path
    except OperationalError:  # made by an older version; the start will migrate it
        return None
    finally:
        database.dispose()


def _prepare_key(directory: DataDir, database: Database, path: Path, name: str, *, is_admin: bool) -> None:
    known = path.read_text(encoding="utf-8").strip() if path.exists() else ""

    def missing(session: Session) -> str | None:
        project = project_id(session)
        try:
            accounts.caller(session, known)
        except AuthenticationError:
            return key_administration.create_key(session, _ACTOR, project, name, is_admin=is_admin).text
        return None

    fresh = database.run(missing)
    if fresh is not None:
        directory.write_secret(path.name, fresh)
