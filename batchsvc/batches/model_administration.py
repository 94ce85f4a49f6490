"""What an operator changes about models and aliases, with its audit row in the same transaction."""

from __future__ import annotations

from typing import Any

from sqlalchemy.orm import Session

from batchsvc.audit.actions import Action
from batchsvc.audit.actor import Actor
from batchsvc.audit.service import record
from batchsvc.batches import models
from batchsvc.batches.tables import Model


def register(session: Session, actor: Actor, name: str, **model: Any) -> Model:
    """Make a model known, or update it: arguments as of models.register."""
    row = models.register(session, name, **model)
    details = {"digest": row.digest, "weight_format": row.weight_format, "kv_format": row.kv_format}
    record(session, actor, Action.MODEL_REGISTERED, name, project_id=row.project_id, details=details)
    return row


def alias(session: Session, actor: Actor, name: str, target: str) -> Model:
    """Let a name mean a model."""
    row = models.alias(session, name, target)
    record(session, actor, Action.MODEL_ALIASED, name, details={"model": row.alias_of})
    return row


def unalias(session: Session, actor: Actor, name: str) -> None:
    """Forget an alias."""
    models.unalias(session, name)
    record(session, actor, Action.MODEL_ALIASED, name, details={"model": None})
