"""What an embedded stack has in place before its processes start: schema, prices, project, keys and model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from sqlalchemy.orm import Session

from batchsvc.accounts import service as accounts
from batchsvc.batches import models
from batchsvc.billing import service as billing
from batchsvc.db.migrate import upgrade
from batchsvc.db.session import Database
from batchsvc.errors import AuthenticationError, UnavailableError
from batchsvc.stack.datadir import DataDir

PROJECT = "default"


def prepare_database(directory: DataDir, database: Database) -> None:
    """Bring the schema to this version and put prices, project and the two keys in place. Repeatable."""
    upgrade(database.url)
    database.run(billing.seed_prices)
    _prepare_key(directory, database, directory.api_key, "first", is_admin=False)
    _prepare_key(directory, database, directory.admin_key, "admin", is_admin=True)


def project_id(session: Session) -> str:
    """The project that an embedded stack works for, made on first use."""
    found = accounts.project_named(session, PROJECT)
    return found.id if found else accounts.create_project(session, PROJECT).id


def prepare_model(database: Database, model: str, say: Callable[[str], None], *, name: str | None = None) -> Path:
    """Find or pull a model and register it, so that batches may name it. Raises UnavailableError in one sentence."""
    from engine.errors import EngineError
    from engine.load.fetch import locate
    from engine.load.meta import read_meta

    try:
        path = locate(model, say=say)
        meta = read_meta(path)
    except EngineError as error:
        raise UnavailableError(str(error)) from error

    def register(session: Session) -> None:
        models.register(session, name or model, str(path), digest=meta.digest, context_tokens=meta.context_tokens)

    database.run(register)
    return path


def is_registered(database: Database, name: str) -> bool:
    """Whether batches may name this model."""
    with database.reading() as session:
        return models.resolve(session, name) is not None


def _prepare_key(directory: DataDir, database: Database, path: Path, name: str, *, is_admin: bool) -> None:
    known = path.read_text(encoding="utf-8").strip() if path.exists() else ""

    def missing(session: Session) -> str | None:
        project = project_id(session)
        try:
            accounts.caller(session, known)
        except AuthenticationError:
            return accounts.create_key(session, project, name, is_admin)[1]
        return None

    fresh = database.run(missing)
    if fresh is not None:
        directory.write_secret(path.name, fresh)
