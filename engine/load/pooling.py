"""How a model makes vectors of texts, as its files say: Sentence Transformers' pooling module, or a field of GGUF.

A decoder whose files say nothing is pooled by its last token, the only state that has seen the whole text. None means
that the files ask for what a decoder can't do (such as the state of a CLS token).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from engine.errors import ModelError
from engine.request import Pooling

_MODULES = "modules.json"
_POOLING_TYPE = "sentence_transformers.models.Pooling"
_GGUF_TYPES = {0: Pooling.LAST, 1: Pooling.MEAN, 3: Pooling.LAST}
"""0 means no pooling, which is what files of plain decoders say."""


def pooling_files(path: Path) -> list[Path]:
    """The files of a model directory that say how it is pooled."""
    found = _module_directory(path)
    files = [path / _MODULES] + ([found / "config.json"] if found else [])
    return [file for file in files if file.is_file()]


def directory_pooling(path: Path) -> Pooling | None:
    """Of a Hugging Face directory. Raises ModelError when what it says can't be read."""
    if not (path / _MODULES).is_file():
        return Pooling.LAST
    found = _module_directory(path)
    if found is None or not (found / "config.json").is_file():
        return None
    config = _read(found / "config.json")
    if not isinstance(config, dict):
        return None
    modes = {"pooling_mode_lasttoken": Pooling.LAST, "pooling_mode_mean_tokens": Pooling.MEAN}
    chosen = [name for name in config if name.startswith("pooling_mode_") and config[name] is True]
    if chosen:
        return modes.get(chosen[0]) if len(chosen) == 1 else None
    newer = {"lasttoken": Pooling.LAST, "mean": Pooling.MEAN}
    return newer.get(str(config.get("pooling_mode")))


def gguf_pooling(fields: dict[str, Any], family: str) -> Pooling | None:
    """Of a GGUF file."""
    kind = fields.get(f"{family}.pooling_type")
    if kind is None:
        return Pooling.LAST
    return _GGUF_TYPES.get(kind) if isinstance(kind, int) else None


def _module_directory(path: Path) -> Path | None:
    if not (path / _MODULES).is_file():
        return None
    modules = _read(path / _MODULES)
    for module in modules if isinstance(modules, list) else ():
        if isinstance(module, dict) and module.get("type") == _POOLING_TYPE:
            name = module.get("path")
            if isinstance(name, str) and Path(name).name == name != "..":  # a folder of the model, nothing outside it
                return path / name
    return None


def _read(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"{path} can't be read as JSON: {error}.") from error
