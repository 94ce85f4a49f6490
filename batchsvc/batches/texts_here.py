"""The text sides of models that are on this machine: nobody's call waits while one is fetched."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

from engine.load.fetch import KNOWN_MODELS, cached_path, locate
from engine.text import TextModel, load_text

_TEXTS = 4  # that a process keeps


class NotHereError(Exception):
    """The model isn't on this machine, or another one is in its place."""


@lru_cache(maxsize=_TEXTS)
def text_here(path: str, digest: str | None = None) -> TextModel:
    """The text side of the model at a path, which must have this digest, if one is given. Raises NotHereError, or
    ModelError for one that can't be read."""
    is_missing = cached_path(path) is None if path in KNOWN_MODELS else not Path(path).exists()
    if is_missing:
        raise NotHereError(path)
    text = load_text(locate(path))
    if digest is not None and text.meta.digest != digest:
        raise NotHereError(path)
    return text
