"""What the engine without weights says: a function of prompt, parameters, seed and choice, and of nothing else.

An answer is words drawn by a hash, one word a token, never empty; where it must have a form, a walk through the form's
grammar (engine/fake_forms.py). It is cut at the first stop string. Logprobs are made up: each token is as likely as
the next ones of the list of words are less.
"""

from __future__ import annotations

import codecs
import hashlib
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np

from engine.fake_forms import WORDS, FakeForms
from engine.pooling import segments_of, unit_vector
from engine.request import Choice, FinishReason, Request, SpelledLogprob, TokenLogprobs

_USUAL_TOKENS = 48  # longest answer that isn't asked to be longer
_LOGPROB = -0.5  # of every token


@dataclass(frozen=True, slots=True)
class FakeAnswer:
    """One answer. `logprobs` are those of all tokens, where they are asked for; those of the choice, of its text.
    `ends` are the lengths of the text that is certain with each token."""

    token_ids: tuple[int, ...]
    choice: Choice
    logprobs: tuple[TokenLogprobs, ...] = ()
    ends: tuple[int, ...] = ()


class FakeAnswers:
    """Answers for a model of this vocabulary and context."""

    def __init__(self, *, vocab_size: int, context_tokens: int) -> None:
        self._vocab_size = vocab_size
        self._context_tokens = context_tokens
        self._forms = FakeForms()

    def of(self, request: Request) -> tuple[FakeAnswer, ...]:
        """All answers that this request always gets. Raises GrammarError where its form can't be followed."""
        if request.pooling is not None:
            return (FakeAnswer((), Choice("", FinishReason.STOP)),)
        choices = range(request.n) if request.n > 1 else (request.choice,)
        return tuple(self._answer(request, choice) for choice in choices)

    def _answer(self, request: Request, choice: int) -> FakeAnswer:
        params = request.params
        most = min(params.max_tokens, self._context_tokens - len(request.prompt_ids))
        digest = hashlib.blake2b(array("q", request.prompt_ids).tobytes() + f"{params.seed}/{choice}".encode())
        if params.grammar:
            least = most if params.ignore_eos else max(1, params.min_tokens)
            said = self._forms.walk(params.grammar, digest.digest(), least=least, most=most)
            pieces, token_ids, is_whole = said.pieces, said.token_ids, said.is_whole
        else:
            pieces, token_ids, is_whole = _words(request, digest.digest(), most)
        reason = FinishReason.STOP if is_whole else FinishReason.LENGTH
        text, stop = _cut(b"".join(pieces).decode(errors="replace"), params.stop)
        num_shown = len(pieces)
        if stop is not None:
            reason, size = FinishReason.STOP, len(text.encode())
            num_shown = sum(start < size for start in accumulate(map(len, pieces[:-1]), initial=0))
            pieces, token_ids = pieces[: max(num_shown, 1)], token_ids[: max(num_shown, 1)]
        ids = tuple(token_id % self._vocab_size for token_id in token_ids)
        ends = tuple(min(end, len(text)) for end in _ends(pieces))
        if params.logprobs is None:
            return FakeAnswer(ids, Choice(text, reason, None, stop), ends=ends)
        tops = [_top(piece, token_id, params.logprobs) for piece, token_id in zip(pieces, ids, strict=True)]
        spelled = tuple(SpelledLogprob(piece, _LOGPROB, top.spelled) for piece, top in zip(pieces, tops, strict=True))
        logprobs = tuple(TokenLogprobs(token_id, _LOGPROB, top.ids) for token_id, top in zip(ids, tops, strict=True))
        return FakeAnswer(ids, Choice(text, reason, spelled[:num_shown], stop), logprobs, ends)


def vectors_of(request: Request, size: int) -> tuple[bytes, ...]:
    """The vectors that the prompts of this request always get: numbers drawn by a hash."""
    ids, vectors = list(request.prompt_ids), []
    for length in segments_of(request):
        prompt, ids = ids[:length], ids[length:]
        seed = int.from_bytes(hashlib.blake2b(array("q", prompt).tobytes(), digest_size=8).digest(), "big")
        vector = unit_vector(np.random.default_rng(seed).standard_normal(size))
        assert vector is not None, "numbers that are drawn aren't all zero"
        vectors.append(vector)
    return tuple(vectors)


def _words(request: Request, draw: bytes, most: int) -> tuple[list[bytes], list[int], bool]:
    """Words, their ids, and whether the answer ends by itself."""
    params = request.params
    usual = max(1, params.min_tokens) + draw[0] % _USUAL_TOKENS
    length = most if params.ignore_eos else min(usual, most)
    picks = [draw[1 + i % (len(draw) - 1)] + i // (len(draw) - 1) for i in range(length)]
    pieces = [f"{' ' if i else ''}{WORDS[pick % len(WORDS)]}".encode() for i, pick in enumerate(picks)]
    return pieces, picks, length < most


def _ends(pieces: Sequence[bytes]) -> Iterator[int]:
    """How many whole characters there are after each piece."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    return accumulate(len(decoder.decode(piece)) for piece in pieces)


def _cut(text: str, stops: Sequence[str]) -> tuple[str, str | None]:
    """The text before the first stop string, and that one; None: there is none."""
    ends = [(text.find(stop), stop) for stop in stops if stop in text]
    if not ends:
        return text, None
    end, stop = min(ends)
    return text[:end], stop


@dataclass(frozen=True, slots=True)
class _Top:
    ids: tuple[tuple[int, float], ...]
    spelled: tuple[tuple[bytes, float], ...]


def _top(piece: bytes, token_id: int, count: int) -> _Top:
    """The likeliest tokens where this one was chosen, the likeliest first."""
    others = [(i, f" {word}".encode()) for i, word in enumerate(WORDS) if word.encode() != piece.strip()]
    tokens = [(token_id, piece), *others][:count]
    logprobs = [_LOGPROB - at for at in range(len(tokens))]
    return _Top(
        tuple((one, logprob) for (one, _), logprob in zip(tokens, logprobs, strict=True)),
        tuple((spelled, logprob) for (_, spelled), logprob in zip(tokens, logprobs, strict=True)),
    )
