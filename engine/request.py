"""What goes into the engine and what comes out of it: plain data, no torch."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from engine.errors import RequestError


class FinishReason(StrEnum):
    """Why a sequence ended. STOP and LENGTH are answers; ERROR and ABORT are not."""

    STOP = "stop"
    LENGTH = "length"
    ERROR = "error"
    ABORT = "abort"


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How the tokens of one request are chosen. `temperature` 0 is greedy; `top_k` 0 means no limit.

    `seed` is never None here: whoever makes a request decides it, because randomness is keyed by
    (seed, choice, position, purpose) and must not depend on the batch around it.
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

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One prompt to complete.

    `prompt_ids` are token ids; `salt` separates prefix caches (one a project); `lane` is the priority class
    (0 is batch work, lower runs first); `adapter` is the digest of a LoRA adapter or "" and is part of the
    block key; `choice` numbers the answers to one prompt and is part of the randomness key.

    `resume_ids` are output tokens that an earlier run of the same request generated: they are computed with the prompt,
    count as output, and what follows is what the earlier run would have said. `resume_hit_tokens` is what that run's
    cache held, so that the usage is its usage.
    """

    id: str
    prompt_ids: Sequence[int]
    params: SamplingParams
    salt: str = ""
    lane: int = 0
    adapter: str = ""
    choice: int = 0
    resume_ids: Sequence[int] = ()
    resume_hit_tokens: int = 0


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """The end of one request. With `finish_reason` ERROR, `error_code` and `error_message` say why."""

    request_id: str
    token_ids: tuple[int, ...]
    text: str
    finish_reason: FinishReason
    usage: Usage
    error_code: str | None = None
    error_message: str | None = None


@dataclass(slots=True)
class StepOutput:
    """What one step brought: new tokens by request id (in order), and the requests that ended. `hit_tokens` comes with
    the first token of a request: what its usage will show."""

    new_tokens: dict[str, list[int]] = field(default_factory=dict)
    completions: list[Completion] = field(default_factory=list)
    hit_tokens: dict[str, int] = field(default_factory=dict)

    def without(self, request_ids: Iterable[str]) -> StepOutput:
        """The same, but for these requests."""
        gone = set(request_ids)
        return StepOutput(
            {request_id: tokens for request_id, tokens in self.new_tokens.items() if request_id not in gone},
            [completion for completion in self.completions if completion.request_id not in gone],
            {request_id: tokens for request_id, tokens in self.hit_tokens.items() if request_id not in gone},
        )
