"""Wire shapes of keys."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict

from batchsvc.accounts.tables import ApiKey


class CreateKey(BaseModel):
    """Body of a new key. `project` is an id or a name, made on first use; without it: the caller's project."""

    model_config = ConfigDict(extra="forbid", strict=True)

    name: str
    project: str | None = None
    is_admin: bool = False


def key_object(row: ApiKey) -> dict[str, Any]:
    """A key without its text."""
    return {
        "id": row.id,
        "object": "api_key",
        "name": row.name,
        "project_id": row.project_id,
        "is_admin": row.is_admin,
        "created_at": row.created_ms // 1000,
        "revoked_at": None if row.revoked_ms is None else row.revoked_ms // 1000,
    }
