"""Wire shapes of how long files of a project live."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

from batchsvc.files.retention import LEAST_LIFE_S, MOST_DEFAULT_S
from batchsvc.files.tables import RetentionDefault

Life = Annotated[int, Field(ge=LEAST_LIFE_S, le=MOST_DEFAULT_S)]


class ChangeRetention(BaseModel):
    """Body of a change, in seconds; what isn't named stays, null means the setting's again."""

    model_config = ConfigDict(extra="forbid", strict=True)

    input_seconds: Life | None = None
    output_seconds: Life | None = None


def retention_object(project_id: str, row: RetentionDefault | None) -> dict[str, Any]:
    """What was set for a project; null: the setting holds."""
    return {
        "object": "project.retention",
        "project_id": project_id,
        "input_seconds": None if row is None else row.input_life_s,
        "output_seconds": None if row is None else row.output_life_s,
        "updated_at": None if row is None else row.updated_ms // 1000,
    }
