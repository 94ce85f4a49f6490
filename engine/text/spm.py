"""SentencePiece's byte-pair encoding as a GGUF file carries it: pieces with scores, of which merges are made here.

SentencePiece joins the two neighbours whose joint piece has the best score, until no two make a piece. That is
byte-pair encoding whose merges are all ways to cut a piece into two others, in the order of the pieces' scores.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import tokenizers
from tokenizers import decoders, models, normalizers

from engine.errors import ModelError

SPACE = "▁"
_NORMAL = 1  # token type of GGUF


def backend_of(
    tokens: Sequence[str],
    scores: Sequence[float],
    kinds: Sequence[int],
    *,
    unknown_id: int | None,
    has_space_prefix: bool,
    path: Path,
) -> tokenizers.Tokenizer:
    """The tokenizer without its special tokens. `has_space_prefix`: a text, and what follows a special token, begins
    with a space that isn't there. Raises ModelError."""
    vocab = {token: i for i, token in enumerate(tokens)}
    if len(vocab) != len(tokens) or len(scores) != len(tokens) or not all(map(math.isfinite, scores)):
        raise ModelError(f"{path} has a broken tokenizer: its tokens and scores don't fit each other.")
    if unknown_id is not None and not 0 <= unknown_id < len(tokens):
        raise ModelError(f"{path} has {len(tokens)} tokens, but its unknown token is {unknown_id}.")
    try:
        backend = tokenizers.Tokenizer(
            models.BPE(
                vocab=vocab,
                merges=_merges(tokens, scores, kinds, vocab),
                unk_token=None if unknown_id is None else tokens[unknown_id],
                fuse_unk=True,
                byte_fallback=True,
            )
        )
    except Exception as error:  # the library raises plain Exception
        raise ModelError(f"{path} has a broken tokenizer: {error}.") from error
    spaces = normalizers.Replace(" ", SPACE)
    text = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE), spaces]) if has_space_prefix else spaces
    backend.decoder = decoders.Sequence([*text, decoders.Strip(" ", 1, 0)] if has_space_prefix else text)
    return backend


def _merges(
    tokens: Sequence[str], scores: Sequence[float], kinds: Sequence[int], vocab: dict[str, int]
) -> list[tuple[str, str]]:
    normal = [i for i, kind in enumerate(kinds) if kind == _NORMAL and len(tokens[i]) > 1]
    merges: list[tuple[str, str]] = []
    for i in sorted(normal, key=lambda i: -scores[i]):
        piece = tokens[i]
        for cut in range(1, len(piece)):
            if (left := piece[:cut]) in vocab and (right := piece[cut:]) in vocab:
                merges.append((left, right))
    return merges
