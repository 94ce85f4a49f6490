"""Wire shapes of files: OpenAI's file object, with `sha256` as an extension."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from batchsvc.files.tables import File


class ExpiresAfter(BaseModel):
    """How long a file lives, from its own creation on."""

    model_config = ConfigDict(extra="forbid", strict=True)

    anchor: Literal["created_at"]
    seconds: int = Field(ge=3_600, le=2_592_000)


def file_object(row: File) -> dict[str, Any]:
    """A file as the API shows it. `status` is `processed` from the start: nothing is judged before a batch reads it.

    Of an object in a tenant's store it is `uploaded`, without a SHA-256, until the bytes were copied, or `error` if
    they never will be.
    """
    is_here = bool(row.sha256) or row.source_uri is None
    return {
        "id": row.id,
        "object": "file",
        "bytes": row.size_bytes,
        "created_at": row.created_ms // 1000,
        "expires_at": None if row.expires_ms is None else row.expires_ms // 1000,
        "filename": row.filename,
        "purpose": row.purpose,
        "status": "processed" if is_here else "error" if row.source_error else "uploaded",
        "status_details": row.source_error,
        "sha256": row.sha256 or None,
        "source": {"uri": row.source_uri, "etag": row.source_etag} if row.source_uri else None,
    }
