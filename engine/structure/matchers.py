"""Follows answers through their grammars, and says for a whole step which tokens may come next.

A grammar is compiled once and copied for each answer; the compiled ones are kept, the longest unused goes first. The
masks of a step are filled in one call, on all cores but one and without the GIL. A grammar that turns out too complex
in the middle of an answer puts its matcher into error and costs that answer alone.
"""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Sequence
from typing import Protocol

import numpy as np
from llguidance import LLExecutor, LLMatcher, LLTokenizer, TokenizerWrapper
from llguidance.numpy import fill_next_token_bitmask_par, fill_next_token_bitmask_par_with_draft_tokens
from numpy.typing import NDArray

from engine.structure.grammar import LIMITS, GrammarError, as_reason, to_grammar

KEPT_CHARS = 4 << 20
"""Compiled grammars are kept while their specs have so many characters together; a compiled one is larger than it."""

_NO_TEXT = 0xFF  # begins no UTF-8 text; marks special tokens for the library


class Vocabulary(Protocol):
    """What grammars ask of a tokenizer."""

    def token_bytes(self, token_id: int) -> bytes: ...
    def encode(self, text: str) -> list[int]: ...


class Matcher:
    """One answer's way through its grammar. `num_tokens` were read; nothing may follow the first `complete_at` of them.
    `error`: why it can't go on, if so."""

    def __init__(self, state: LLMatcher) -> None:
        self.state = state
        self.num_tokens = 0
        self.complete_at: int | None = None
        self.error: str | None = None

    @property
    def is_ended(self) -> bool:
        return self.complete_at is not None or self.error is not None

    def push(self, token_id: int) -> None:
        """Reads a token of the answer."""
        self.state.consume_token(token_id)
        self.num_tokens += 1
        self.look()

    def fitting(self, token_ids: Sequence[int]) -> int:
        """How many of these may follow, in their order. What reads them is a copy (some 10 us), as one that comes to a
        dead end in them would stay in error."""
        return int(self.state.deep_copy().validate_tokens(list(token_ids)))

    def look(self) -> None:
        """Notes whether the grammar has come to an end, of whatever kind."""
        if not self.state.is_stopped():
            return
        if self.state.is_error():
            self.error = _reason(self.state)
        else:
            self.complete_at = self.num_tokens

    def blame(self, before: LLMatcher) -> None:
        """Takes the reason from the state before its last token, if nothing could come there: whoever sampled that
        token found out, but on a copy."""
        before.compute_bitmask()
        if before.is_error():
            self.error = _reason(before)


def _reason(state: LLMatcher) -> str:
    reason = as_reason(state.get_error())
    return "no answer can follow it" if reason.startswith("NoExtension") else reason


class Grammars:
    """The grammars of one model. Not thread-safe."""

    def __init__(self, tokenizer: Vocabulary, *, vocab_size: int, eos_ids: frozenset[int]) -> None:
        self.vocab_size = vocab_size
        self._tokenizer = LLTokenizer(
            TokenizerWrapper(_Wrapped(tokenizer, vocab_size, eos_ids)),
            n_vocab=vocab_size,
            eos_token=sorted(eos_ids),
            slices=LLTokenizer.json_slices(),
        )
        cores = len(os.sched_getaffinity(0))
        self._executor = LLExecutor(max(cores - 1, 1))  # one core is for who goes on meanwhile
        self._readers = LLExecutor(cores)  # of tokens, which all wait for
        self._compiled: OrderedDict[str, LLMatcher] = OrderedDict()
        self._kept_chars = 0

    def start(self, spec: str) -> Matcher:
        """A matcher at the beginning of an answer. Raises GrammarError when the spec can't be compiled."""
        compiled = self._compiled.get(spec)
        if compiled is None:
            compiled = self._compile(spec)
        self._compiled.move_to_end(spec)
        return Matcher(compiled.deep_copy())

    def push(self, matchers: Sequence[Matcher], token_ids: Sequence[int]) -> None:
        """Reads a token in each of several answers."""
        if matchers:
            states = [matcher.state for matcher in matchers]
            self._readers.consume_token_par(list(zip(states, token_ids, strict=True)))
        for matcher in matchers:
            matcher.num_tokens += 1
            matcher.look()

    def masks(self, matchers: Sequence[Matcher]) -> NDArray[np.int32]:
        """Bit t of row i, in little-endian words: whether token t may come next in answer i; 0 past the last. May run
        in another thread while these matchers are left alone."""
        bits = self._all_allowed(len(matchers))
        fill_next_token_bitmask_par(self._executor, [(m.state, row) for row, m in enumerate(matchers)], bits)
        return self._without_tail(bits)

    def window_masks(self, matchers: Sequence[Matcher], drafts: Sequence[Sequence[int]]) -> list[NDArray[np.int32]]:
        """For each answer, that has a draft, the masks of what may come next and after each of its tokens,
        [1 + draft, words]; those behind a token that may not come are of no use. The matchers stay as they are: what
        reads a draft is a copy (some 10 us), as one that comes to a dead end in it would stay in error."""
        starts = np.cumsum([0, *(1 + len(draft) for draft in drafts)]).tolist()
        bits = self._all_allowed(starts[-1])
        asked = [
            (m.state.deep_copy(), start, list(draft)) for m, start, draft in zip(matchers, starts, drafts, strict=False)
        ]
        fill_next_token_bitmask_par_with_draft_tokens(self._executor, asked, bits)
        return np.split(self._without_tail(bits), starts[1:-1])

    def _all_allowed(self, rows: int) -> NDArray[np.int32]:
        return np.full((rows, (self.vocab_size + 31) // 32), -1, dtype=np.int32)

    def _without_tail(self, bits: NDArray[np.int32]) -> NDArray[np.int32]:
        if self.vocab_size % 32:
            bits[:, -1] &= np.int32((1 << self.vocab_size % 32) - 1)
        return bits

    def _compile(self, spec: str) -> LLMatcher:
        matcher = LLMatcher(self._tokenizer, to_grammar(spec), log_level=0, limits=LIMITS)
        if matcher.is_error():
            raise GrammarError(as_reason(matcher.get_error()))
        self._compiled[spec] = matcher
        self._kept_chars += len(spec)
        while self._kept_chars > KEPT_CHARS and len(self._compiled) > 1:
            gone, _ = self._compiled.popitem(last=False)
            self._kept_chars -= len(gone)
        return matcher


class _Wrapped:
    """Our tokenizer as llguidance asks for one. Ids that stand for no text never match a grammar."""

    bos_token_id = None

    def __init__(self, tokenizer: Vocabulary, vocab_size: int, eos_ids: frozenset[int]) -> None:
        self.eos_token_id = min(eos_ids)
        self.special_token_ids: list[int] = []
        self._encode = tokenizer.encode
        texts = [tokenizer.token_bytes(token_id) for token_id in range(vocab_size)]
        self.tokens = [text or b"%c[%d]" % (_NO_TEXT, token_id) for token_id, text in enumerate(texts)]

    def __call__(self, text: bytes) -> list[int]:
        return self._encode(text.decode("utf-8", errors="replace"))
