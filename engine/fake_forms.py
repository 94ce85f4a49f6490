"""Answers that have a form, without a model: a walk through the form's grammar that a hash decides.

What the grammar forces is said at once, as one token. Where it leaves a choice, words are liked best, then letters and
digits, and after some of these whatever ends something; so answers are short and read like what was asked for, if the
form lets them. A form without an end goes on as long as it may.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from engine.structure.grammar import GrammarError
from engine.structure.matchers import Grammars

# fmt: off
WORDS = (
    "amber", "basin", "cedar", "delta", "ember", "field", "grove", "haven", "inlet", "jetty", "knoll",
    "lemon", "maple", "north", "ocean", "plain", "quiet", "river", "stone", "trail", "umber", "water",
)
# fmt: on
_ENOUGH = 40  # tokens, after which whatever ends something is liked best
_BYTES = 0xF8  # from here on none stands in UTF-8
_PROSE = frozenset(b"aZ }@")  # where these may stand, anything may
_PLAIN = frozenset(range(0x20, 0x7F)) - frozenset(b'"\\')


class Said(NamedTuple):
    """An answer token by token; `is_whole`: nothing is missing from its form."""

    pieces: list[bytes]
    token_ids: list[int]
    is_whole: bool


class FakeForms:
    """Walks; the grammars are read when the first one is asked for."""

    def __init__(self) -> None:
        self._grammars: Grammars | None = None
        self._vocabulary = _Vocabulary()

    def walk(self, spec: str, draw: bytes, *, least: int, most: int) -> Said:
        """An answer of at most `most` tokens, and of `least` if its form can be so long. Raises GrammarError where
        there is none."""
        if self._grammars is None:
            size = len(self._vocabulary.tokens)
            self._grammars = Grammars(self._vocabulary, vocab_size=size, eos_ids=frozenset({size - 1}))
        matcher = self._grammars.start(spec)
        pieces: list[bytes] = []
        token_ids: list[int] = []
        state = matcher.state
        while len(pieces) < most and not state.is_stopped():
            piece = state.compute_ff_bytes()
            if not piece:
                if state.is_accepting() and len(pieces) >= least:
                    break
                bits = np.unpackbits(np.frombuffer(state.compute_bitmask(), np.uint8), bitorder="little")
                piece = self._vocabulary.pick(set(bits.nonzero()[0].tolist()), pieces, draw)
            if not piece or not state.consume_tokens(list(piece)):
                break
            pieces.append(piece)
            token_ids.append(self._vocabulary.id_of(piece))
        matcher.look()
        if matcher.error is not None:
            raise GrammarError(matcher.error)
        is_whole = state.is_stopped() or (len(pieces) < most and state.is_accepting())
        return Said(pieces, token_ids, is_whole)


class _Vocabulary:
    """Bytes, words with and without a space before, and an end."""

    def __init__(self) -> None:
        words = [word.encode() for word in WORDS]
        self.tokens = [bytes([byte]) for byte in range(_BYTES)] + words + [b" " + word for word in words] + [b""]
        first, spaced = _BYTES, _BYTES + len(words)
        self._words = (range(first, spaced), range(spaced, spaced + len(words)))
        self._alnum = [byte for byte in range(128) if chr(byte).isalnum()]
        self._marks = sorted(_PLAIN - set(self._alnum) - set(b" ,}]"))

    def token_bytes(self, token_id: int) -> bytes:
        return self.tokens[token_id]

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def id_of(self, piece: bytes) -> int:
        """Some number for a piece, of which there is no end."""
        return int.from_bytes(hashlib.blake2b(piece, digest_size=4).digest(), "big")

    def pick(self, allowed: set[int], pieces: list[bytes], draw: bytes) -> bytes:
        """The next token, of those that are allowed; nothing where that is an end only."""
        number = int.from_bytes(hashlib.blake2b(draw + len(pieces).to_bytes(4, "big"), digest_size=8).digest(), "big")
        is_after_text = bool(pieces) and pieces[-1][-1:].isalnum()
        may_end = len(pieces) > _ENOUGH or (is_after_text and number % 2)
        words = [*self._words[is_after_text], *self._words[not is_after_text]]
        marks = self._marks if number & 2 else []
        groups: list[Sequence[int]]
        if allowed.intersection(words):
            groups = [b'"' if may_end else b"", [] if allowed >= _PROSE else marks, words]
        elif may_end:
            groups = [b"}]", b'",', marks, self._alnum, self._marks]
        else:
            groups = [self._alnum, self._marks, b'"}],']
        for group in (*groups, range(128), range(_BYTES)):
            found = [token_id for token_id in group if token_id in allowed]
            if found:
                return self.tokens[found[(number >> 8) % len(found)]]
        return b""
