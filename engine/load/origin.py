"""What a model that we wrote says of where it comes from: `batchsvc.json` in its directory; no torch.

A quantized copy names the model that it was made from, a student the teacher that it was distilled from. Both may be
bound to a project: whose lines have trained a student may use it, and nobody else.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.errors import ModelError
from engine.load.fetch import KNOWN_MODELS
from engine.load.meta import HEADS_FILE, ModelMeta, read_json

FILE = "batchsvc.json"
_HEADS_CONFIG = "heads.json"


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


def project_of(path: Path) -> str | None:
    """The project that alone may use the model at `path`; None: everybody may. Raises ModelError for a file that says
    nothing usable."""
    file = path / FILE
    if not path.is_dir() or not file.exists():
        return None
    found = read_json(file).get("project")
    if found is not None and not (isinstance(found, str) and found):
        raise ModelError(f"{file} doesn't say whose the model is (project).")
    return found


def draft_project_of(path: Path) -> str | None:
    """The project whose requests alone what lies at `path` may draft for, be it a model or heads; None: it may for all.

    Heads say it in their own heads.json, as they may be copied to the files of a model that everybody uses. Raises
    ModelError where it can't be told.
    """
    project = project_of(path)
    if not (path / HEADS_FILE).is_file():
        return project
    file = path / _HEADS_CONFIG
    found = read_json(file).get("project", "")
    if found is None:
        return project
    if not (isinstance(found, str) and found):
        raise ModelError(f"{file} doesn't say whose lines have trained the heads (project); train them again.")
    if project not in (None, found):
        raise ModelError(f"{file} names another project than {FILE} beside it; give each a directory of its own.")
    return found


def described(model: str, meta: ModelMeta, recipe: dict[str, Any]) -> dict[str, Any]:
    """What that file holds for a copy of the model that is called `model`, made by this recipe."""
    project = project_of(meta.path)
    bound = {} if project is None else {"project": project}
    return {"made_from": source(model, meta), **bound, **recipe}


def source(model: str, meta: ModelMeta) -> dict[str, str]:
    """The model that is called `model`, as such a file names it: how to find it again, and its digest."""
    is_name = model in KNOWN_MODELS or model.startswith("hf:")
    return {"model": model if is_name else str(meta.path.resolve()), "digest": meta.digest}
