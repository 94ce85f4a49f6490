"""Wire shapes of uploads: OpenAI's objects."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from batchsvc.files.schemas import ExpiresAfter, file_object
from batchsvc.files.tables import File, Upload, UploadPart


class CreateUpload(BaseModel):
    """Body of POST /v1/uploads. `mime_type` is what the official client insists on; what a file is, its bytes tell."""

    model_config = ConfigDict(extra="forbid", strict=True)

    bytes: int = Field(ge=1)
    filename: str
    mime_type: str = Field(default="", max_length=255)
    purpose: str
    expires_after: ExpiresAfter | None = None


class CompleteUpload(BaseModel):
    """Body of POST /v1/uploads/{id}/complete: all parts of the file in their order, and the MD5 of the whole."""

    model_config = ConfigDict(extra="forbid", strict=True)

    part_ids: list[str] | None = None
    md5: str | None = None


def upload_object(row: Upload, status: str, file: File | None = None) -> dict[str, Any]:
    """An upload as the API shows it; a completed one with its file."""
    return {
        "id": row.id,
        "object": "upload",
        "bytes": row.size_bytes,
        "created_at": row.created_ms // 1000,
        "expires_at": row.expires_ms // 1000,
        "filename": row.filename,
        "purpose": row.purpose,
        "status": status,
        "file": None if file is None else file_object(file),
    }


def part_object(row: UploadPart) -> dict[str, Any]:
    """A part as the API shows it."""
    return {
        "id": row.id,
        "object": "upload.part",
        "created_at": row.created_ms // 1000,
        "upload_id": row.upload_id,
    }
