"""The growing text of one answer: whether it ends with a token, and what is left of it and of its logprobs then."""

from __future__ import annotations

from typing import TYPE_CHECKING

from engine.request import FinishReason, NewText, Request, SpelledLogprob, TokenLogprobs
from engine.sample.stop import StopMatcher
from engine.text import Detokenizer, TextModel

if TYPE_CHECKING:
    from engine.structure.matchers import Matcher


class Answer:
    """Ends and stop strings count once there are more tokens than `min_tokens`; the token that ends an answer is
    counted and is not in its text. An answer that has the form it must have, and can't go on in it, ends at once."""

    def __init__(
        self, request: Request, text: TextModel | None, eos_ids: frozenset[int], matcher: Matcher | None = None
    ) -> None:
        params = request.params
        self._min_tokens = params.min_tokens
        self._own_ends = frozenset() if params.ignore_eos else eos_ids
        self._end_ids = self._own_ends | set(params.stop_token_ids)
        self._detokenizer = Detokenizer(text.tokenizer) if text is not None else None
        self._stops = StopMatcher(params.stop)
        self._pieces: list[str] = []
        self._num_tokens = 0
        self._num_chars = 0  # of the text that is certain, stop string included
        self._matcher = matcher
        self._tokenizer = text.tokenizer if text is not None else None
        self._logprobs: list[tuple[int, TokenLogprobs]] | None = None if params.logprobs is None else []
        self._num_taken = self._taken_chars = self._num_taken_logprobs = 0  # pieces, characters, logprobs
        self._has_end_token = False
        self._stop_token: int | None = None

    @property
    def stopped_by(self) -> str | int | None:
        """The stop string or stop token that ended the answer; None if the model did."""
        return self._stops.found if self._stop_token is None else self._stop_token

    def note(self, found: TokenLogprobs) -> None:
        """The logprobs of the token that is pushed next."""
        assert self._logprobs is not None, "nobody asked for logprobs"
        self._logprobs.append((self._num_chars, found))

    def push(self, token_id: int) -> FinishReason | None:
        """Reads a token. Why the answer ends with it, if it does."""
        self._num_tokens += 1
        may_end = self._num_tokens > self._min_tokens
        if may_end and token_id in self._end_ids:
            self._has_end_token = True
            self._stop_token = None if token_id in self._own_ends else token_id
            return FinishReason.STOP
        if self._detokenizer is None:
            return None
        piece = self._detokenizer.push(token_id)
        self._num_chars += len(piece)
        self._pieces.append(self._stops.push(piece) if may_end else piece)
        complete_at = self._matcher.complete_at if self._matcher is not None else None
        is_complete = complete_at is not None and self._num_tokens >= complete_at
        return FinishReason.STOP if self._stops.is_stopped or is_complete else None

    def take(self, choice: int = 0) -> NewText | None:
        """What became certain since the last call; None: nothing. All that is taken is the beginning of `text()` and of
        `logprobs()`: a token's logprobs come with its first character, because a stop string may yet take that away."""
        text = "".join(self._pieces[self._num_taken :])
        self._num_taken = len(self._pieces)
        if not text:
            return None
        self._taken_chars += len(text)
        first = self._num_taken_logprobs
        for start, _ in (self._logprobs or ())[first:]:
            if start >= self._taken_chars:
                break
            self._num_taken_logprobs += 1
        return NewText(text, choice, tuple(self._spelled_range(first, self._num_taken_logprobs)))

    def text(self) -> str:
        """The whole text; nothing may be pushed afterwards."""
        if self._detokenizer is not None:
            self._pieces.append(self._stops.push(self._detokenizer.finish()))
            self._pieces.append(self._stops.finish())
        return "".join(self._pieces)

    def logprobs(self, text: str) -> tuple[SpelledLogprob, ...] | None:
        """Those of the tokens that make the text: not of one that ends it, nor of those that begin in a stop string."""
        if self._logprobs is None:
            return None
        found = self._logprobs[: -1 if self._has_end_token else None]
        most_chars = len(text) if self._stops.is_stopped else self._num_chars + 1
        return tuple(self._spelled_range(0, sum(start < most_chars for start, _ in found)))

    def _spelled_range(self, start: int, end: int) -> list[SpelledLogprob]:
        found = self._logprobs or []
        spelled = [self._spelled(one) for _, one in found[start:end]]
        if self._tokenizer is not None and self._tokenizer.strips_leading_space:
            token_bytes = self._tokenizer.token_bytes
            first = next((i for i, (_, one) in enumerate(found) if token_bytes(one.token_id)), None)
            if first is not None and start <= first < end:
                at = first - start
                spelled[at] = spelled[at]._replace(piece=spelled[at].piece.removeprefix(b" "))
        return spelled

    def _spelled(self, found: TokenLogprobs) -> SpelledLogprob:
        def spelled(token_id: int) -> bytes:
            return self._tokenizer.spelled(token_id) if self._tokenizer is not None else b""

        top = tuple((spelled(token_id), logprob) for token_id, logprob in found.top)
        return SpelledLogprob(spelled(found.token_id), found.logprob, top)
