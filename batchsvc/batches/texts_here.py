"""The text sides of models that are on this machine: nobody's call waits while one is fetched."""

from __future__ import annotations

import threading
from collections import OrderedDict
from concurrent.futures import Future
from pathlib import Path

from engine.load.fetch import KNOWN_MODELS, cached_path, locate
from engine.text import TextModel, load_text

MOST_TEXTS = 4
"""That a process keeps: those which were used last."""

_Key = tuple[str, str | None]
_texts: OrderedDict[_Key, Future[TextModel]] = OrderedDict()
_lock = threading.Lock()


class NotHereError(Exception):
    """The model isn't on this machine, or another one is in its place."""


def text_here(path: str, digest: str | None = None) -> TextModel:
    """The text side of the model at a path, which must have this digest, if one is given. Raises NotHereError, or
    ModelError for one that can't be read. However many ask for one at the same time, it is read once."""
    key = (path, digest)
    with _lock:
        found = _texts.get(key)
        is_mine = found is None
        if found is None:
            found = _texts[key] = Future()
        _texts.move_to_end(key)
        if len(_texts) > MOST_TEXTS:
            _texts.popitem(last=False)  # who waits for it gets it all the same
    if is_mine:
        try:
            found.set_result(_read(path, digest))
        except BaseException as error:
            with _lock:
                if _texts.get(key) is found:
                    del _texts[key]  # it may be there the next time
            found.set_exception(error)
    return found.result()


def _read(path: str, digest: str | None) -> TextModel:
    is_missing = cached_path(path) is None if path in KNOWN_MODELS else not Path(path).exists()
    if is_missing:
        raise NotHereError(path)
    text = load_text(locate(path))
    if digest is not None and text.meta.digest != digest:
        raise NotHereError(path)
    return text
