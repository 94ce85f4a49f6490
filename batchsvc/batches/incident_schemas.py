"""Bodies of the calls with which an operator handles incidents."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

Reason = Annotated[str | None, Field(max_length=255, description="Why, in a line; batches and status show it.")]


class Why(BaseModel):
    """Of a drain or a pause."""

    model_config = ConfigDict(extra="forbid")

    reason: Reason = None


class PauseClaims(BaseModel):
    """Whose claims to pause: those of one model, or all."""

    model_config = ConfigDict(extra="forbid")

    model: str | None = Field(default=None, max_length=255)
    reason: Reason = None


class ResumeClaims(BaseModel):
    """Whose claims go on."""

    model_config = ConfigDict(extra="forbid")

    model: str | None = Field(default=None, max_length=255)


class Release(BaseModel):
    """Lines of the input (counted from 1) to run again; none named: all that is in quarantine."""

    model_config = ConfigDict(extra="forbid")

    lines: list[Annotated[int, Field(ge=1, le=2**53)]] = Field(default_factory=list, max_length=1_000)


class LoadModel(BaseModel):
    """A registered model, and by which worker, by its name; without one, by all."""

    model_config = ConfigDict(extra="forbid")

    model: str = Field(max_length=255)
    worker: str | None = Field(default=None, max_length=128)
