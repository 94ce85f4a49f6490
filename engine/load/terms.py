"""Under which licence a model comes, as far as its files or our list of models say; no torch."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

from engine.errors import ModelError
from engine.load.meta import read_json
from engine.load.origin import FILE as ORIGIN
from engine.load.wheels import KNOWN_MODELS

_TEXTS = ("LICENSE*", "LICENCE*")
_MOST_BYTES = 1 << 20
_CARD_LINE = re.compile(r"^licen[sc]e(?:_name)?:\s*(.+?)\s*$", re.MULTILINE)


class Terms(NamedTuple):
    """A licence: what it is called, where it stands, and its text, each as far as it is known."""

    name: str | None = None
    url: str | None = None
    text: str | None = None


def terms_of(model: str, path: Path) -> Terms:
    """Of the model that is called `model` and lies at `path`."""
    known = KNOWN_MODELS.get(model)
    if known is not None and known.licence is not None:
        return Terms(known.licence.name, known.licence.url)
    return _of_directory(path) if path.is_dir() else _of_gguf(path)


def _of_gguf(path: Path) -> Terms:
    from engine.load.gguf import GGUFFile

    fields = GGUFFile(path).fields
    name, url = fields.get("general.license"), fields.get("general.license.link")
    return Terms(name if isinstance(name, str) else None, url if isinstance(url, str) else None)


def _of_directory(path: Path) -> Terms:
    texts = sorted(file for pattern in _TEXTS for file in path.glob(pattern) if file.is_file())
    text = _read(texts[0]) if texts else None
    for file in (ORIGIN, "config.json"):
        try:
            said = read_json(path / file).get("licence" if file == ORIGIN else "license")
        except ModelError:
            continue
        if isinstance(said, str) and said:
            return Terms(said, None, text)
    card = _read(path / "README.md") if (path / "README.md").is_file() else ""
    head = card.split("---", 2)[1] if card.startswith("---") and card.count("---") > 1 else ""
    found = _CARD_LINE.search(head)
    return Terms(found[1].strip("'\"") if found else None, None, text)


def _read(path: Path) -> str:
    try:
        with path.open("rb") as file:
            return file.read(_MOST_BYTES).decode("utf-8", errors="replace")
    except OSError as error:
        raise ModelError(f"{path} can't be read: {error.strerror or error}.") from error
