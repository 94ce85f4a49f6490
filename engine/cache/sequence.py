"""One request on its way: its tokens, how far their KV is computed, and the blocks that hold it.

    position   0 ………………… computed_tokens ………………… len(tokens)
               KV exists      | work of the next steps |

The invariant is `committed_tokens <= computed_tokens <= len(tokens)`; between the first two lies what was scheduled and
not read back yet. A prefix hit starts above 0, preemption goes back, a chunk goes forward; nothing else is needed to
tell prefill from decode. Draft tokens are no tokens of the sequence: a step computes them behind its end, and those
that turn out right are advanced over when the step is read (`accept`). A step that computes up to the end samples one
more token.
Its id isn't known until the step commits, so a PLACEHOLDER is appended at once and read later: steps can be scheduled
before the one in front of them is read.

Three counts stay apart: `computed_tokens` is progress and falls on preemption; `hit_tokens` is what the cache held at
the first admission and never changes again, because it reaches the bill; the work done is counted by the scheduler.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

import numpy as np

from engine.cache.prefix import Entry, Scope
from engine.request import FinishReason, Lane, Request

PLACEHOLDER = -1
"""Stands in `tokens` for a token that was sampled but not read yet: the runner takes it from its own last step."""


class SequenceState(StrEnum):
    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(slots=True, eq=False)
class Sequence:
    """`rank` orders sequences: smaller runs first and is preempted last. `max_outputs` is what params and context
    allow. `block_ids` cover positions [0, computed_tokens), and a little more once a chunk is under way."""

    request: Request
    rank: int
    max_outputs: int
    scope: Scope | None = None
    tokens: list[int] = field(default_factory=list)
    state: SequenceState = SequenceState.WAITING
    computed_tokens: int = 0
    committed_tokens: int = 0
    hit_tokens: int | None = None
    num_unread: int = 0
    num_drafted: int = 0  # of the step in flight; nothing else of the sequence is computed until it is read
    num_preemptions: int = 0
    num_overtaken: int = 0
    last_step: int = -1
    num_steps: int = 0  # that it took part in
    block_ids: list[int] = field(default_factory=list)
    block_keys: list[bytes] = field(default_factory=list)  # of the full blocks whose tokens are known
    entries: list[Entry] = field(default_factory=list)  # of block_ids[: len(entries)], as in the index
    finish_reason: FinishReason | None = None
    error_code: str | None = None
    error_message: str | None = None
    pooled: np.ndarray[tuple[int], np.dtype[np.float64]] | None = None  # sum of states, of a pooled request

    def __post_init__(self) -> None:
        self.tokens = [*self.request.prompt_ids, *self.request.resume_ids]

    @property
    def id(self) -> str:
        return self.request.id

    @property
    def lane(self) -> Lane:
        return Lane.of(self.request.lane)

    @property
    def is_interactive(self) -> bool:
        """Whether it goes before all batch work."""
        return self.request.lane <= Lane.INTERACTIVE

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.request.prompt_ids)

    @property
    def decodes(self) -> bool:
        """Whether it computes anything after its prompt; with one token to sample it doesn't."""
        return self.max_outputs > 1

    @property
    def num_outputs(self) -> int:
        """Sampled tokens, read or not."""
        return len(self.tokens) - len(self.request.prompt_ids)

    @property
    def num_known(self) -> int:
        """Tokens whose ids are known: all but the placeholders at the end."""
        return len(self.tokens) - self.num_unread

    @property
    def output_ids(self) -> list[int]:
        return self.tokens[self.num_prompt_tokens : self.num_known]

    @property
    def num_pending(self) -> int:
        """Tokens whose KV is to be computed; 0 once the last token that may be sampled has been."""
        return len(self.tokens) - self.computed_tokens if self.num_outputs < self.max_outputs else 0

    def is_ready(self, step: int) -> bool:
        """Whether it can be computed in a step. A placeholder can only be computed right after the step that samples
        it. Behind a draft, and where a grammar decides which tokens may come, it must be read first; where penalties
        count those before, they must have been."""
        params = self.request.params
        may_guess = self.last_step == step - 1 and not params.grammar and not self.num_drafted
        may_guess &= self.num_unread == 1 or not params.has_penalties
        return self.state is SequenceState.RUNNING and (not self.num_unread or may_guess)

    def admit(self, hit_tokens: int) -> None:
        """Starts, or starts again, with the KV of the first `hit_tokens` tokens in place."""
        assert hit_tokens < len(self.tokens), "the last token is always computed, to have logits to sample from"
        assert not self.num_unread, "a sequence is admitted once its tokens are read"
        self.state = SequenceState.RUNNING
        self.computed_tokens = self.committed_tokens = hit_tokens
        if self.hit_tokens is None:
            self.hit_tokens = hit_tokens

    def advance(self, num_tokens: int) -> bool:
        """Counts a chunk as computed. True when it reached the end, so that a token is sampled after it."""
        self.computed_tokens += num_tokens
        assert self.computed_tokens <= len(self.tokens), f"{self.id}: computed beyond its tokens"
        if self.computed_tokens < len(self.tokens):
            return False
        self.tokens.append(PLACEHOLDER)
        self.num_unread += 1
        return True

    def read(self, token_id: int) -> None:
        """Replaces the oldest placeholder."""
        assert self.num_unread, f"{self.id}: no token to read"
        self.tokens[len(self.tokens) - self.num_unread] = token_id
        self.num_unread -= 1

    def accept(self, *, is_held: bool) -> None:
        """The token read last was drafted, so the step in flight computed it too, and sampled the next one. `is_held`:
        the blocks with its KV are still the sequence's."""
        if is_held:
            self.computed_tokens += 1
        self.tokens.append(PLACEHOLDER)
        self.num_unread += 1

    def pool(self, states: bytes) -> None:
        """Adds a chunk's sum of states (float32)."""
        more = np.frombuffer(states, "<f4").astype(np.float64)
        self.pooled = more if self.pooled is None else self.pooled + more

    def unsample(self) -> None:
        """Takes the last placeholder away: the step that was to sample it wasn't computed."""
        assert self.num_unread, f"{self.id}: no token to take back"
        self.tokens.pop()
        self.num_unread -= 1
        self.num_drafted = 0

    def rewind(self) -> None:
        """Preempted: no KV any more. Admission finds again what is still cached."""
        self.state = SequenceState.WAITING
        self.computed_tokens = self.committed_tokens = 0
        self.pooled = None
        self.num_preemptions += 1

    def finish(self, reason: FinishReason, code: str | None = None, message: str | None = None) -> None:
        self.state = SequenceState.FINISHED
        self.finish_reason, self.error_code, self.error_message = reason, code, message
        del self.tokens[self.num_known :]
        self.num_unread = 0
        self.computed_tokens = min(self.computed_tokens, len(self.tokens))
