"""Wire shapes of registered stores. A secret comes in and never goes out."""

from __future__ import annotations

import re
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, SecretStr, field_validator

from batchsvc.files.tables import TenantStore

_PLAIN = r"[\x21-\x7e]+"


class RegisterStore(BaseModel):
    """Body of a registration: what a project may reach from now on, and with which keys."""

    model_config = ConfigDict(extra="forbid", strict=True)

    project: str = Field(min_length=1, max_length=128)
    uri: str = Field(max_length=1100)
    endpoint: str | None = Field(default=None, max_length=2048)
    region: str = Field(default="us-east-1", pattern=r"^[a-z0-9-]{1,64}$")
    access_key: str = Field(min_length=1, max_length=256, pattern=f"^{_PLAIN}$")
    secret_key: SecretStr = Field(min_length=1, max_length=256)

    @field_validator("secret_key")
    @classmethod
    def _is_plain(cls, secret: SecretStr) -> SecretStr:
        if not re.fullmatch(_PLAIN, secret.get_secret_value()):
            raise ValueError("it has characters that no key of S3 has")
        return secret


def store_object(row: TenantStore) -> dict[str, Any]:
    """A registered store as the API shows it: of its keys the one that is no secret."""
    return {
        "id": row.id,
        "object": "store",
        "project_id": row.project_id,
        "uri": f"s3://{row.bucket}/{row.prefix}",
        "endpoint": row.endpoint,
        "region": row.region,
        "access_key": row.access_key,
        "created_at": row.created_ms // 1000,
        "updated_at": row.updated_ms // 1000,
    }


def deleted_object(store_id: str) -> dict[str, Any]:
    """What a removal answers."""
    return {"id": store_id, "object": "store", "deleted": True}
