"""Token by token the same text comes out as at once, however characters are split over tokens."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.text import Detokenizer, Tokenizer, load_text

HARD = ["🧑‍🚀", "👨‍👩‍👧‍👦", "汉字かな", "é", "e\u0301", "\u200d", "🇩🇪", "a", " ", "\n", "�", "\x00", "ﷺ", "𝔘"]


@pytest.fixture(scope="module")
def tokenizer(tiny_model: Path) -> Tokenizer:
    return load_text(tiny_model).tokenizer


def pieces(tokenizer: Tokenizer, ids: list[int]) -> list[str]:
    detokenizer = Detokenizer(tokenizer)
    return [*(detokenizer.push(i) for i in ids), detokenizer.finish()]


@settings(max_examples=300, deadline=None)
@given(text=st.lists(st.sampled_from(HARD), max_size=20).map("".join), data=st.data())
def test_pieces_join_to_the_text_for_any_split_into_tokens(
    tokenizer: Tokenizer, text: str, data: st.DataObject
) -> None:
    """Single-byte tokens let every split of a character occur; merged tokens are mixed in at random."""
    single = {tokenizer.token_bytes(i): i for i in range(tokenizer.vocab_size) if len(tokenizer.token_bytes(i)) == 1}
    ids: list[int] = []
    for piece in text:
        if data.draw(st.booleans()):
            ids += [single[bytes([byte])] for byte in piece.encode()]
        else:
            ids += tokenizer.encode(piece)
    got = pieces(tokenizer, ids)
    assert "".join(got) == text == tokenizer.decode(ids)
    assert all("�" not in piece for piece in got) or "�" in text


@settings(max_examples=300, deadline=None)
@given(ids=st.lists(st.integers(0, 400), max_size=60))
def test_any_ids_at_all_give_what_decoding_at_once_gives(tokenizer: Tokenizer, ids: list[int]) -> None:
    """Models do emit bytes that are no UTF-8, special tokens and ids outside the vocabulary."""
    assert "".join(pieces(tokenizer, ids)) == tokenizer.decode(ids)


def test_a_leading_space_stays(tokenizer: Tokenizer) -> None:
    assert pieces(tokenizer, tokenizer.encode(" the"))[0].startswith(" ")


def test_half_a_character_waits_and_ends_as_a_replacement(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("🧑")
    assert pieces(tokenizer, ids[:-1]) == [""] * (len(ids) - 1) + ["�"]


def test_broken_bytes_come_out_at_once(tokenizer: Tokenizer) -> None:
    """Replacement characters must not pile up until the end: each costs constant work."""
    lone = next(i for i in range(tokenizer.vocab_size) if tokenizer.token_bytes(i) == b"\x80")
    assert pieces(tokenizer, [lone] * 5) == ["�"] * 5 + [""]
