"""What a batch, or a quote, has pinned of the models that its lines run on: one for all of them, or one by line.

A row of a batch whose lines name several models (`models: "by_line"`) has none of its own. Its column `models` holds,
by model id, what the columns of other rows hold of their one model; planning adds each model when a line names it
first. Units are cut within one model, and name it; whatever is billed is billed at the rates of the unit's model.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Literal, NamedTuple, Protocol

BY_LINE: Literal["by_line"] = "by_line"
"""What create's extension `models` says."""


class Pinning(Protocol):
    """The columns that pin models (of a batch or a quote)."""

    @property
    def model_id(self) -> str | None: ...
    @property
    def model_digest(self) -> str | None: ...
    @property
    def rates(self) -> dict[str, Any] | None: ...
    @property
    def models(self) -> dict[str, Any] | None: ...


class Served(Protocol):
    """The columns of a model that say in which formats it is served."""

    @property
    def weight_format(self) -> str: ...
    @property
    def kv_format(self) -> str: ...
    @property
    def quality(self) -> dict[str, Any] | None: ...


class ModelPin(NamedTuple):
    """A pinned model. `rates` are those of the batch's tier and of the standard tier."""

    id: str
    digest: str
    rates: Mapping[str, Any]


def pin_of(row: Pinning, model_id: str | None) -> ModelPin | None:
    """What is pinned of the model of a unit; `model_id` None: the one model of the row. None: nothing is yet."""
    if row.models is None:
        return ModelPin(row.model_id or "", row.model_digest or "", row.rates) if row.rates else None
    pin = row.models.get(model_id or "")
    return None if pin is None else ModelPin(model_id or "", pin["digest"], pin["rates"])


def formats_of(model: Served) -> dict[str, Any]:
    """What is pinned of the formats that a model is served in: columns of a batch with one model."""
    return {"weight_format": model.weight_format, "kv_format": model.kv_format, "quality": model.quality}


def pins_of(row: Pinning) -> list[ModelPin]:
    """Everything that is pinned, by the names of the models."""
    names: Iterable[str | None] = [None] if row.models is None else sorted(row.models)
    return [pin for name in names if (pin := pin_of(row, name)) is not None]
