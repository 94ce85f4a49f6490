"""The tokens that a model may propose when it drafts, if it is to score only some: `draft_vocab.json` beside it; no
torch.

The model itself keeps its whole head; whoever runs it as a draft multiplies with the rows of these tokens alone, and
proposes no other (engine/distill makes such models).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from engine.errors import ModelError
from engine.load.meta import read_json

FILE = "draft_vocab.json"


def write(directory: Path, token_ids: Sequence[int]) -> None:
    """Says that the model in `directory` drafts with these tokens, which ascend."""
    (directory / FILE).write_text(json.dumps({"token_ids": list(token_ids)}) + "\n", encoding="utf-8")


def draft_vocab(path: Path, vocab_size: int) -> tuple[int, ...] | None:
    """The tokens of the model at `path`, ascending; None: all. Raises ModelError for a file that can't be used."""
    file = path / FILE
    if not path.is_dir() or not file.exists():
        return None
    ids = read_json(file).get("token_ids")
    if not isinstance(ids, list) or not ids or not all(type(one) is int and 0 <= one < vocab_size for one in ids):
        raise ModelError(f"{file} doesn't list token ids below {vocab_size:,} (token_ids).")
    if sorted(set(ids)) != ids:
        raise ModelError(f"{file} doesn't list its token ids in ascending order, each once.")
    return tuple(ids)
