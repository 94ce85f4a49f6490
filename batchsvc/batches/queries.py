"""SQL of models, batches and workers as the API reads and writes them."""

from __future__ import annotations

from sqlalchemy import select
from sqlalchemy.orm import Session

from batchsvc.batches.tables import Model


def model(session: Session, name: str) -> Model | None:
    """One model or alias by its exact name."""
    return session.get(Model, name)


def models(session: Session) -> list[Model]:
    """All models and aliases."""
    return list(session.scalars(select(Model)))
