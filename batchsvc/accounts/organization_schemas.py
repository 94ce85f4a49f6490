"""Wire shapes of projects, keys, service accounts and limits as the official client's `admin.organization` has them.

What we have and OpenAI hasn't stands beside: `scopes` and `limits` of keys, open batches and stored bytes of limits.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from batchsvc import mode
from batchsvc.accounts.key_administration import MOST_LIFE_S, MadeKey
from batchsvc.accounts.limits import MOST_PER_MINUTE, Limits
from batchsvc.accounts.service import limits_of
from batchsvc.accounts.tables import ApiKey, Project, ServiceAccount

RATE_LIMIT_ID = "rl-all-models"
UNLIMITED = 2**53 - 1  # the client wants a number where there is no limit: the largest that every JSON reader keeps

LifeS = Annotated[int, Field(ge=1, le=MOST_LIFE_S)]
Scopes = Annotated[list[Annotated[str, Field(max_length=64)]], Field(max_length=32)]
PerMinute = Annotated[int, Field(ge=1, le=MOST_PER_MINUTE)]
Amount = Annotated[int, Field(ge=0, le=UNLIMITED)]


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class CreateProject(_Body):
    """Body of a new project."""

    name: str


class RenameProject(_Body):
    """Body of a change to a project; `/v1/admin/projects` has what else can be changed."""

    name: str


class ChangeKey(_Body):
    """Body of a change to a key; what isn't named stays. No scopes are no restriction; null of the others: none."""

    scopes: Scopes = Field(default_factory=list)
    expires_in_seconds: LifeS | None = None


class CreateServiceAccount(_Body):
    """Body of a new service account, which comes with a key unless it is wanted alone."""

    name: str
    create_service_account_only: bool | None = None
    expires_in_seconds: LifeS | None = None


class ChangeServiceAccount(_Body):
    """Body of a change to a service account."""

    name: str = ""
    role: Literal["member", "owner"] = "member"


class CreateServiceAccountKey(_Body):
    """Body of another key of a service account."""

    name: str | None = None
    scopes: Scopes = Field(default_factory=list)
    expires_in_seconds: LifeS | None = None


class CreateAdminKey(_Body):
    """Body of a new admin key."""

    name: str
    scopes: Scopes = Field(default_factory=list)
    expires_in_seconds: LifeS | None = None


class ChangeLimits(_Body):
    """Body of a change to the limits of a project. Null takes a limit away; tokens a minute aren't limited here."""

    max_requests_per_1_minute: PerMinute | None = None
    max_open_batches: Amount | None = None
    max_stored_bytes: Amount | None = None


def project_object(row: Project) -> dict[str, Any]:
    """A project."""
    return {
        "id": row.id,
        "object": "organization.project",
        "name": row.name,
        "created_at": row.created_ms // 1000,
        "archived_at": _seconds(row.archived_ms),
        "status": "active" if row.archived_ms is None else "archived",
    }


def project_key_object(row: ApiKey, project: Project, owners: Mapping[str, ServiceAccount]) -> dict[str, Any]:
    """A key of a project, without its text."""
    owner = owners.get(row.service_account_id or "")
    is_active = project.archived_ms is None and (owner is None or owner.deleted_ms is None)
    return {
        "id": row.id,
        "object": "organization.project.api_key",
        "name": row.name,
        "redacted_value": redacted(row),
        "created_at": row.created_ms // 1000,
        "expires_at": _seconds(row.expires_ms),
        "last_used_at": _seconds(row.last_used_ms),
        "owner_project_access": "active" if is_active else "inactive",
        "owner": {
            "type": "user" if owner is None else "service_account",
            "user": None,
            "service_account": None if owner is None else {**account_object(owner), "object": None},
        },
        "scopes": row.scopes or [],
        "limits": limits_object(limits_of(row)),
        "replaced_by": row.replaced_by_id,
    }


def admin_key_object(row: ApiKey, project: Project) -> dict[str, Any]:
    """An admin key, without its text; its owner is the project that it belongs to."""
    return {
        "id": row.id,
        "object": "organization.admin_api_key",
        "name": row.name,
        "redacted_value": redacted(row),
        "created_at": row.created_ms // 1000,
        "expires_at": _seconds(row.expires_ms),
        "last_used_at": _seconds(row.last_used_ms),
        "owner": {
            "type": "service_account",
            "object": "organization.project",
            "id": project.id,
            "name": project.name,
            "created_at": project.created_ms // 1000,
            "role": "owner",
        },
        "scopes": row.scopes or [],
        "replaced_by": row.replaced_by_id,
    }


def account_object(row: ServiceAccount) -> dict[str, Any]:
    """A service account."""
    return {
        "id": row.id,
        "object": "organization.project.service_account",
        "name": row.name,
        "role": row.role,
        "created_at": row.created_ms // 1000,
    }


def account_key_object(made: MadeKey) -> dict[str, Any]:
    """A key of a service account that was just made, with its text."""
    row, text = made
    return {
        "id": row.id,
        "object": "organization.project.service_account.api_key",
        "name": row.name,
        "value": text,
        "created_at": row.created_ms // 1000,
        "expires_at": _seconds(row.expires_ms),
        "scopes": row.scopes or [],
    }


def rate_limit_object(limits: Limits) -> dict[str, Any]:
    """The limits that hold for a project; they count all models together."""
    return {
        "id": RATE_LIMIT_ID,
        "object": "project.rate_limit",
        "model": "*",
        "max_requests_per_1_minute": _or_unlimited(limits.requests_per_minute),
        "max_tokens_per_1_minute": UNLIMITED,
        "max_open_batches": _or_unlimited(limits.max_open_batches),
        "max_stored_bytes": _or_unlimited(limits.max_stored_bytes),
    }


def limits_object(limits: Limits) -> dict[str, int | None]:
    """Limits as extensions show them; null is none."""
    return {
        "requests_per_minute": limits.requests_per_minute,
        "max_open_batches": limits.max_open_batches,
        "max_stored_bytes": limits.max_stored_bytes,
    }


def deleted_object(object_id: str, kind: str) -> dict[str, Any]:
    """What is said of a deleted object of this kind."""
    return {"id": object_id, "object": f"{kind}.deleted", "deleted": True}


def redacted(row: ApiKey) -> str:
    """The public part of a key's text."""
    return f"sk_{'test_' if mode.is_test(row.project_id) else ''}{row.id}_***"


def _or_unlimited(limit: int | None) -> int:
    return UNLIMITED if limit is None else limit


def _seconds(ms: int | None) -> int | None:
    return None if ms is None else ms // 1000
