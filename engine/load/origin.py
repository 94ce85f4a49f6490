"""What a quantized copy says of the model that it was made from: `batchsvc.json` in its directory; no torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.errors import ModelError
from engine.load.fetch import KNOWN_MODELS
from engine.load.meta import ModelMeta, read_json

FILE = "batchsvc.json"


@dataclass(frozen=True, slots=True)
class Origin:
    """The model that a copy was made from: how to find it, and its digest."""

    model: str
    digest: str


def origin_of(path: Path) -> Origin | None:
    """Of the model at `path`; None where nobody has said. Raises ModelError for a file that says nothing usable."""
    file = path / FILE
    if not path.is_dir() or not file.exists():
        return None
    found = read_json(file).get("made_from")
    if not isinstance(found, dict) or not all(isinstance(found.get(key), str) for key in ("model", "digest")):
        raise ModelError(f"{file} doesn't say which model this one was made from (made_from, with model and digest).")
    return Origin(found["model"], found["digest"])


def described(model: str, meta: ModelMeta, recipe: dict[str, Any]) -> dict[str, Any]:
    """What that file holds for a copy of the model that is called `model`, made by this recipe."""
    is_name = model in KNOWN_MODELS or model.startswith("hf:")
    spelled = model if is_name else str(meta.path.resolve())
    return {"made_from": {"model": spelled, "digest": meta.digest}, **recipe}
