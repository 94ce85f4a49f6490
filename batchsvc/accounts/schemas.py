"""Wire shapes of keys and projects."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

from batchsvc import mode
from batchsvc.accounts.key_administration import OVERLAP_S
from batchsvc.accounts.organization_schemas import Amount, ChangeKey, LifeS, PerMinute, Scopes, limits_object
from batchsvc.accounts.service import limits_of
from batchsvc.accounts.tables import ApiKey, Project
from batchsvc.money import MOST_NANOS


class CreateKey(BaseModel):
    """Body of a new key. `project` is an id or a name, made on first use; without it: the caller's project."""

    model_config = ConfigDict(extra="forbid", strict=True)

    name: str
    project: str | None = None
    is_admin: bool = False
    is_test: bool = False  # of the project's twin for tests
    scopes: Scopes = Field(default_factory=list)
    expires_in_seconds: LifeS | None = None


class ChangeKeyAndLimits(ChangeKey):
    """Body of a change to any key, by an operator; what isn't named stays. A limit of null is none."""

    requests_per_minute: PerMinute | None = None
    max_open_batches: Amount | None = None
    max_stored_bytes: Amount | None = None


class RotateKey(BaseModel):
    """Body of a rotation: for how long the old key works on."""

    model_config = ConfigDict(extra="forbid", strict=True)

    overlap_seconds: int = Field(default=OVERLAP_S, ge=0, le=90 * 86_400)


class ChangeProject(BaseModel):
    """Body of a change to a project; what isn't named stays. `quota_tokens: null` means the setting's quota again, as
    it does of the three limits, `budget_nanos: null` no monthly budget, `alert_percents: null` the usual shares of a
    limit to be told of."""

    model_config = ConfigDict(extra="forbid", strict=True)

    weight: int = Field(default=1, ge=1, le=1_000)
    quota_tokens: int | None = Field(default=None, ge=1, le=2**53)
    budget_nanos: int | None = Field(default=None, ge=0, le=MOST_NANOS)
    is_prepaid: bool = False
    alert_percents: list[Annotated[int, Field(ge=1, le=100)]] | None = Field(default=None, max_length=20)
    requests_per_minute: PerMinute | None = None
    max_open_batches: Amount | None = None
    max_stored_bytes: Amount | None = None


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
        **limits_object(limits_of(row)),
        "created_at": row.created_ms // 1000,
        "archived_at": None if row.archived_ms is None else row.archived_ms // 1000,
    }


def key_object(row: ApiKey) -> dict[str, Any]:
    """A key without its text."""
    return {
        "id": row.id,
        "object": "api_key",
        "name": row.name,
        "project_id": row.project_id,
        "is_admin": row.is_admin,
        "mode": "test" if mode.is_test(row.project_id) else "live",
        "created_at": row.created_ms // 1000,
        "expires_at": None if row.expires_ms is None else row.expires_ms // 1000,
        "last_used_at": None if row.last_used_ms is None else row.last_used_ms // 1000,
        "revoked_at": None if row.revoked_ms is None else row.revoked_ms // 1000,
        "replaced_by": row.replaced_by_id,
        "service_account_id": row.service_account_id,
        "scopes": row.scopes or [],
        **limits_object(limits_of(row)),
    }
