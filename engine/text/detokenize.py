"""Token ids to text one at a time: linear, and never cut inside a UTF-8 character."""

from __future__ import annotations

import codecs
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from engine.text.tokenizer import Tokenizer


class Detokenizer:
    """The text of one growing answer. The pieces it returns join to `tokenizer.decode(all ids)`."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._strip_next = tokenizer.strips_leading_space

    def push(self, token_id: int) -> str:
        """The text that became certain with this token; an unfinished character waits for its other bytes."""
        return self._cut(self._decoder.decode(self._tokenizer.token_bytes(token_id)))

    def finish(self) -> str:
        """What still waited, with U+FFFD for an unfinished character. Nothing may be pushed afterwards."""
        return self._cut(self._decoder.decode(b"", final=True))

    def _cut(self, piece: str) -> str:
        if self._strip_next and piece:
            self._strip_next = False
            return piece.removeprefix(" ")
        return piece
