"""What goes into the engine and what comes out of it: plain data, no torch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum, StrEnum
from itertools import repeat
from typing import Any, NamedTuple

from engine.errors import RequestError

MAX_LOGPROBS = 20
"""Most likely tokens that may come with each token."""


class FinishReason(StrEnum):
    """Why a sequence ended. STOP and LENGTH are answers; ERROR and ABORT are not."""

    STOP = "stop"
    LENGTH = "length"
    ERROR = "error"
    ABORT = "abort"


class Lane(IntEnum):
    """Priority class of a request; the lower one runs first. Somebody waits for an interactive answer, so it goes
    before all batch work, which fills what is left of a step and gives way where room is short."""

    INTERACTIVE = 0
    BATCH = 1

    @classmethod
    def of(cls, lane: int) -> Lane:
        """Later lanes are batch work, too."""
        return cls.INTERACTIVE if lane <= cls.INTERACTIVE else cls.BATCH


class Pooling(StrEnum):
    """Which states of a prompt make its vector: that of its last token, or the mean of all."""

    LAST = "last"
    MEAN = "mean"


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How the tokens of one request are chosen. `temperature` 0 is greedy; `top_k` 0 means no limit.

    `seed` is never None here: whoever makes a request decides it, because randomness is keyed by
    (seed, choice, position, purpose) and must not depend on the batch around it. `grammar` is the form that the answer
    must have (engine/structure/grammar.py); "" means any. `logit_bias` are pairs of token id and what is added to its
    logit; `logprobs` is how many of the most likely tokens come with each token and its logprob, None: no logprobs.
    """

    max_tokens: int
    min_tokens: int = 0
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    grammar: str = ""
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    logprobs: int | None = None

    def __post_init__(self) -> None:
        def check(ok: bool, param: str, says: str) -> None:
            if not ok:
                raise RequestError(f"{param} must be {says}.", code="invalid_value", param=param)

        check(self.max_tokens >= 1, "max_tokens", "at least 1")
        check(0 <= self.min_tokens <= self.max_tokens, "min_tokens", "between 0 and max_tokens")
        check(0.0 <= self.temperature <= 2.0, "temperature", "between 0 and 2")
        check(self.top_k >= 0, "top_k", "0 (no limit) or more")
        check(0.0 < self.top_p <= 1.0, "top_p", "above 0 and at most 1")
        check(all(self.stop), "stop", "a list of non-empty strings")
        check(0.0 <= self.min_p <= 1.0, "min_p", "between 0 and 1")
        check(-2.0 <= self.presence_penalty <= 2.0, "presence_penalty", "between -2 and 2")
        check(-2.0 <= self.frequency_penalty <= 2.0, "frequency_penalty", "between -2 and 2")
        check(0.01 <= self.repetition_penalty <= 100.0, "repetition_penalty", "between 0.01 and 100")
        check(all(-100.0 <= bias <= 100.0 for _, bias in self.logit_bias), "logit_bias", "between -100 and 100 each")
        check(0 <= (self.logprobs or 0) <= MAX_LOGPROBS, "top_logprobs", f"between 0 and {MAX_LOGPROBS}")

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def has_penalties(self) -> bool:
        """Whether it matters which tokens came before."""
        return bool(self.presence_penalty or self.frequency_penalty) or self.repetition_penalty != 1.0

    @property
    def needs_logits(self) -> bool:
        """Whether logits are changed or shown, so that a largest one found in the head doesn't do."""
        return bool(self.logit_bias) or self.has_penalties or self.logprobs is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One prompt to complete.

    `prompt_ids` are token ids; `salt` separates prefix caches (one a project); `lane` is one of Lane, or a later one;
    `adapter` is the digest of a LoRA adapter or "" and is part of the block key; `choice` numbers the answers to one
    prompt and is part of the randomness key.

    `resume_ids` are output tokens that an earlier run of the same request generated: they are computed with the prompt,
    count as output, and what follows is what the earlier run would have said. `resume_logprobs` are theirs, where
    logprobs are asked for. Of a request for several answers `resume_choices` has the beginning of each instead.
    `resume_hit_tokens` is what that run's cache held, so that the usage is its usage.

    `n` answers are given, whose randomness differs by `choice`; the prompt is computed once (engine/choices.py).
    `fork_of` is the id of a request added before this one, with the same prompt: this one begins with that one's blocks
    as soon as they hold the prompt. It changes no result.

    With `streams`, a step also says what text became certain in it (`StepOutput.texts`).

    With `pooling` the result is a vector and nothing is sampled (engine/pooling.py); `segments` are then the lengths of
    the prompts that stand one after the other in `prompt_ids`, () for one.

    `magic` is what a prompt of test mode asks for; engines with weights don't look at it.
    """

    id: str
    prompt_ids: Sequence[int]
    params: SamplingParams
    salt: str = ""
    lane: int = Lane.BATCH
    adapter: str = ""
    choice: int = 0
    resume_ids: Sequence[int] = ()
    resume_logprobs: Sequence[TokenLogprobs] = ()
    resume_choices: Sequence[Begun] = ()
    resume_hit_tokens: int = 0
    pooling: Pooling | None = None
    segments: tuple[int, ...] = ()
    fork_of: str = ""
    n: int = 1
    streams: bool = False
    magic: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Expectation:
    """What requests to come begin with, though the engine doesn't have them yet: for each (depth_tokens, count) of
    `uses`, `count` further pieces of work begin with the first `depth_tokens` ids of `prompt_ids`."""

    prompt_ids: Sequence[int]
    uses: tuple[tuple[int, int], ...]
    salt: str = ""
    adapter: str = ""


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens of one request. `hit_tokens` is what the cache held when the request was first admitted."""

    prompt_tokens: int
    hit_tokens: int
    output_tokens: int
    steps: int = field(default=0, compare=False)  # that it took part in, of the engine that ended it


class TokenLogprobs(NamedTuple):
    """A token, the logarithm of its probability, and the most likely tokens with theirs, the likeliest first."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


class Begun(NamedTuple):
    """The beginning of an answer that an earlier run generated; its logprobs where they are asked for."""

    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()


class SpelledLogprob(NamedTuple):
    """A token as its bytes, the logarithm of its probability, and the most likely tokens with theirs."""

    piece: bytes
    logprob: float
    top: tuple[tuple[bytes, float], ...] = ()


class Choice(NamedTuple):
    """One of several answers to a request."""

    text: str
    finish_reason: FinishReason
    logprobs: tuple[SpelledLogprob, ...] | None = None
    stopped_by: str | int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """The end of one request. With `finish_reason` ERROR, `error_code` and `error_message` say why. A pooled request
    has `vectors` (little-endian float32, length 1), one a prompt. `logprobs` are those of the tokens that make the
    text, None if they weren't asked for. `stopped_by` is the stop string or stop token that ended the answer, None if
    the model ended it. `choices` are all answers of a request that wants several; tokens and text are then those of
    the first."""

    request_id: str
    token_ids: tuple[int, ...]
    text: str
    finish_reason: FinishReason
    usage: Usage
    error_code: str | None = None
    error_message: str | None = None
    vectors: tuple[bytes, ...] = ()
    logprobs: tuple[SpelledLogprob, ...] | None = None
    stopped_by: str | int | None = None
    choices: tuple[Choice, ...] = ()

    @property
    def answers(self) -> tuple[Choice, ...]:
        """All answers, in order: one, unless more were asked for."""
        return self.choices or (Choice(self.text, self.finish_reason, self.logprobs, self.stopped_by),)


class NewToken(NamedTuple):
    """A token of the answer number `choice` of a request; its logprobs where they are asked for."""

    token_id: int
    choice: int = 0
    logprobs: TokenLogprobs | None = None


class NewText(NamedTuple):
    """Text that certainly belongs to the answer number `choice` of a streamed request, and the logprobs of the tokens
    that begin in it, where they are asked for. What comes with the request's end is in its completion alone."""

    text: str
    choice: int = 0
    logprobs: tuple[SpelledLogprob, ...] = ()


@dataclass(slots=True)
class StepOutput:
    """What one step brought: new tokens by request id (in order), and the requests that ended. `hit_tokens` comes with
    the first token of a request: what its usage will show. `choices` says to which of several answers each new token
    belongs, `logprobs` are those of each, where they are asked for. `texts` are of streamed requests. `idle_s` is how
    long the step only waited for another engine."""

    new_tokens: dict[str, list[int]] = field(default_factory=dict)
    completions: list[Completion] = field(default_factory=list)
    hit_tokens: dict[str, int] = field(default_factory=dict)
    choices: dict[str, list[int]] = field(default_factory=dict)
    logprobs: dict[str, list[TokenLogprobs]] = field(default_factory=dict)
    texts: dict[str, list[NewText]] = field(default_factory=dict)
    idle_s: float = 0.0

    def add(self, request_id: str, token_id: int, choice: int | None, logprobs: TokenLogprobs | None) -> None:
        """A new token. `choice` None: the request has one answer."""
        self.new_tokens.setdefault(request_id, []).append(token_id)
        if choice is not None:
            self.choices.setdefault(request_id, []).append(choice)
        if logprobs is not None:
            self.logprobs.setdefault(request_id, []).append(logprobs)

    def add_all(self, other: StepOutput) -> None:
        """What a later step brought."""
        for mine, theirs in ((self.new_tokens, other.new_tokens), (self.choices, other.choices)):
            for request_id, values in theirs.items():
                mine.setdefault(request_id, []).extend(values)
        for request_id, logprobs in other.logprobs.items():
            self.logprobs.setdefault(request_id, []).extend(logprobs)
        for request_id, texts in other.texts.items():
            self.texts.setdefault(request_id, []).extend(texts)
        self.completions += other.completions
        self.hit_tokens |= other.hit_tokens

    def tokens_of(self, request_id: str) -> Iterator[NewToken]:
        """The new tokens of a request, in order."""
        token_ids = self.new_tokens.get(request_id, [])
        choices = self.choices.get(request_id) or repeat(0)
        logprobs = self.logprobs.get(request_id) or repeat(None)
        return map(NewToken, token_ids, choices, logprobs)

    def without(self, request_ids: Iterable[str]) -> StepOutput:
        """The same, but for these requests."""
        gone = set(request_ids)
        return StepOutput(
            new_tokens=_without(self.new_tokens, gone),
            completions=[completion for completion in self.completions if completion.request_id not in gone],
            hit_tokens=_without(self.hit_tokens, gone),
            choices=_without(self.choices, gone),
            logprobs=_without(self.logprobs, gone),
            texts=_without(self.texts, gone),
        )


def _without(found: Mapping[str, Any], gone: set[str]) -> dict[str, Any]:
    return {request_id: value for request_id, value in found.items() if request_id not in gone}
