"""Wire shapes of keys and projects."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

from batchsvc.accounts.tables import ApiKey, Project
from batchsvc.money import MOST_NANOS


class CreateKey(BaseModel):
    """Body of a new key. `project` is an id or a name, made on first use; without it: the caller's project."""

    model_config = ConfigDict(extra="forbid", strict=True)

    name: str
    project: str | None = None
    is_admin: bool = False


class ChangeProject(BaseModel):
    """Body of a change to a project; what isn't named stays. `quota_tokens: null` means the setting's quota again,
    `budget_nanos: null` no monthly budget, `alert_percents: null` the usual shares of a limit to be told of."""

    model_config = ConfigDict(extra="forbid", strict=True)

    weight: int = Field(default=1, ge=1, le=1_000)
    quota_tokens: int | None = Field(default=None, ge=1, le=2**53)
    budget_nanos: int | None = Field(default=None, ge=0, le=MOST_NANOS)
    is_prepaid: bool = False
    alert_percents: list[Annotated[int, Field(ge=1, le=100)]] | None = Field(default=None, max_length=20)


def project_object(row: Project) -> dict[str, Any]:
    """A project, without its salt."""
    return {
        "id": row.id,
        "object": "project",
        "name": row.name,
        "weight": row.weight,
        "quota_tokens": row.quota_tokens,
        "budget_nanos": row.budget_nanos,
        "is_prepaid": row.is_prepaid,
        "alert_percents": row.alert_percents,
        "created_at": row.created_ms // 1000,
    }


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
