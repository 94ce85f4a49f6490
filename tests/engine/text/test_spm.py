"""SentencePiece's pieces and scores of a GGUF file give the ids that joining the best neighbours gives."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.errors import ModelError
from engine.text import Tokenizer

PIECES = ["▁a", "ab", "▁", "b", "abc", "▁ab", "c", "ca", "a", "bc", "▁▁"]  # the best first
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
TOKENS = ["<unk>", "<s>", "</s>", *BYTES, *PIECES, "\n\n", "<turn>"]
KINDS = [2, 3, 3, *[6] * 256, *[1] * len(PIECES), 4, 3]
SCORES = [0.0] * (3 + 256) + [-float(rank) for rank in range(len(PIECES))] + [-1000.0] * 2
FIELDS: dict[str, Any] = {
    "tokenizer.ggml.model": "llama",
    "tokenizer.ggml.tokens": TOKENS,
    "tokenizer.ggml.scores": np.array(SCORES, np.float32),
    "tokenizer.ggml.token_type": np.array(KINDS, np.int32),
    "tokenizer.ggml.unknown_token_id": 0,
    "tokenizer.ggml.bos_token_id": 1,
    "tokenizer.ggml.add_bos_token": True,
    "tokenizer.ggml.add_space_prefix": False,
}


def made(**changes: Any) -> Tokenizer:
    return Tokenizer.from_gguf(FIELDS | {f"tokenizer.ggml.{key}": value for key, value in changes.items()}, Path("x"))


TOKENIZER = made()


def joined(text: str) -> list[int]:
    """The definition: of all neighbours that make a piece, the best are joined first, the leftmost of equals."""
    parts = list(text.replace(" ", "▁"))
    while True:
        pairs = [(SCORES[TOKENS.index(a + b)], -i) for i, (a, b) in enumerate(pairwise(parts)) if a + b in PIECES]
        if not pairs:
            break
        at = -max(pairs)[1]
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
    known = [[TOKENS.index(part)] if part in PIECES else [3 + byte for byte in part.encode()] for part in parts]
    return [token for ids in known for token in ids]


@given(text=st.text("abc é", max_size=30))
def test_the_best_neighbours_are_joined_first(text: str) -> None:
    assert TOKENIZER.encode(text) == joined(text)
    assert TOKENIZER.decode(TOKENIZER.encode(text)) == text


def test_special_and_user_defined_tokens_are_matched_whole() -> None:
    ids = TOKENIZER.encode("ab\n\n<turn> c")
    assert [TOKENS[i] for i in ids] == ["ab", "\n\n", "<turn>", "▁", "c"]
    assert TOKENIZER.decode(ids) == "ab\n\n c"
    assert TOKENIZER.encode_texts(["a"]) == [[1, TOKENS.index("a")]]


def test_a_space_in_front_is_added_where_the_file_says_so() -> None:
    tokenizer = made(add_space_prefix=None)
    assert [TOKENS[i] for i in tokenizer.encode("abc")] == ["▁ab", "c"]
    assert tokenizer.decode(tokenizer.encode("abc")) == "abc"


@pytest.mark.parametrize(
    "changes",
    [
        {"scores": None},
        {"scores": np.array(SCORES[:-1], np.float32)},
        {"scores": np.array([*SCORES[:-1], float("nan")], np.float32)},
        {"tokens": ["a"] * len(TOKENS)},
        {"unknown_token_id": 10**9},
    ],
)
def test_a_broken_one_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(ModelError, match="x has "):
        made(**changes)
