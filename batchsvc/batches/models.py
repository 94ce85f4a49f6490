"""The registry of models that batches may name, and of other names for them.

An alias points at a model, never at another alias, so that one look-up resolves a name. A batch pins the alias table
when it is created: what a name means doesn't change under a batch that waits.

A model may be a project's own, because its lines have trained it: to other projects it doesn't exist, under any name.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sqlalchemy.orm import Session

from batchsvc.accounts import service as accounts
from batchsvc.batches import queries
from batchsvc.batches.tables import Model
from batchsvc.clock import now_ms
from batchsvc.errors import InvalidRequestError, NotFoundError

_NAME_CHARS = 255


def register(
    session: Session,
    name: str,
    path: str,
    *,
    digest: str,
    context_tokens: int,
    weight_format: str = "bf16",
    kv_format: str = "bf16",
    project_id: str | None = None,
) -> Model:
    """Make a model known under `name`, or update it. A path or hf: name may stand under its own spelling.

    `project_id` is the project that alone may use it, if its own lines have trained it.
    """
    _check_name(name, "name")
    if project_id is not None and not accounts.has_project(session, project_id):
        raise InvalidRequestError(
            f"{name} learned from lines of the project {project_id}, which isn't one of this service's: nobody may "
            "use it here.",
            param="project_id",
        )
    other = next((other for other in queries.models_of(session, digest) if other.project_id != project_id), None)
    if other is not None:
        whose = "for everybody" if other.project_id is None else f"for the project {other.project_id} alone"
        raise InvalidRequestError(
            f"The model at {path} is registered already as {other.id}, {whose}: register it for the same, or train "
            "another, as a model that learned from a project's lines is that project's alone.",
            param="project_id",
        )
    row = queries.model(session, name)
    if row is not None and row.alias_of is not None:
        raise InvalidRequestError(f"{name} is an alias of {row.alias_of}: delete the alias first.", param="name")
    if row is None:
        row = Model(id=name, created_ms=now_ms())
        session.add(row)
    row.path, row.digest, row.context_tokens = path, digest, context_tokens
    row.weight_format, row.kv_format, row.quality = weight_format, kv_format, None
    row.project_id = project_id
    session.flush()
    return row


def resolve(
    session: Session, name: str, aliases: Mapping[str, Any] | None = None, *, project_id: str | None
) -> Model | None:
    """The model behind a name, or None. `aliases` is the table that a batch has pinned; without it, today's.

    `project_id` is whose look it is, who sees no other project's own models; None: an operator's, who sees all.
    """
    if not _is_name(name):  # PostgreSQL refuses to even look for a NUL or half a surrogate pair
        return None
    row = queries.model(session, name if aliases is None else str(aliases.get(name, name)))
    if row is not None and row.alias_of is not None:
        row = queries.model(session, row.alias_of) if aliases is None else None
    return row if row is None or _is_visible(row, project_id) else None


def alias(session: Session, name: str, target: str) -> Model:
    """Let `name` mean the model `target`; an alias that exists is pointed anew."""
    _check_name(name, "name")
    real = resolve(session, target, project_id=None)
    if real is None:
        raise NotFoundError(f"There is no model {target}.", code="model_not_found", param="target")
    row = queries.model(session, name)
    if row is not None and row.alias_of is None:
        raise InvalidRequestError(f"{name} is a model of its own, so it can't be an alias.", param="name")
    if row is None:
        row = Model(id=name, created_ms=now_ms())
        session.add(row)
    row.alias_of = real.id
    session.flush()
    return row


def unalias(session: Session, name: str) -> None:
    """Forget an alias. Batches that pinned it keep what it meant."""
    row = queries.model(session, name)
    if row is None or row.alias_of is None:
        raise NotFoundError(f"There is no alias {name}.", code="model_not_found", param="name")
    session.delete(row)
    session.flush()


def alias_table(session: Session) -> dict[str, str]:
    """Every alias with the name of its model: what a new batch pins."""
    return {row.id: row.alias_of for row in queries.models(session) if row.alias_of is not None}


def list_models(session: Session, *, project_id: str | None) -> list[Model]:
    """All models that the project sees (None: an operator), then all aliases of these, each oldest first."""
    rows = queries.models(session)
    seen = {row.id for row in rows if row.alias_of is None and _is_visible(row, project_id)}
    return sorted(
        (row for row in rows if (row.alias_of or row.id) in seen),
        key=lambda row: (row.alias_of is not None, row.created_ms, row.id),
    )


def likely(session: Session, most: int) -> list[tuple[str, str]]:
    """Path and digest of the models that calls will probably name: those of workers, then the newest."""
    served = queries.served_digests(session, since_ms=0)  # a worker that is gone is soon forgotten
    rows = [row for row in queries.models(session) if row.alias_of is None]
    rows.sort(key=lambda row: (row.digest in served, row.created_ms), reverse=True)
    return list(dict.fromkeys((row.path, row.digest) for row in rows))[:most]


def _is_visible(row: Model, project_id: str | None) -> bool:
    return project_id is None or row.project_id in (None, project_id)


def _check_name(name: str, param: str) -> None:
    if not _is_name(name):
        raise InvalidRequestError(f"A model's name must be 1 to {_NAME_CHARS} printable characters.", param=param)


def _is_name(name: str) -> bool:
    return bool(name.strip()) and len(name) <= _NAME_CHARS and name.isprintable()
