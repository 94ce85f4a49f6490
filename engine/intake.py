"""The door of an engine: takes requests from any thread, refuses what can't be run, hands results to who asked.

The real engine and the fake one share it, so both treat a bad request, a repeated id and an abort alike.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from engine import pooling
from engine.errors import EngineError, RequestError
from engine.request import Completion, Expectation, FinishReason, Request, StepOutput, Usage


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStats:
    """A snapshot. Token counts are totals since the start; `computed_tokens` counts all work, recomputed or not.
    `shortages` are steps for which memory didn't suffice and that were done again in smaller ones.
    `drafted_tokens` were computed on trial, in as many windows as `verifications`, and `accepted_tokens` of them right.
    `read_blocks` counts KV blocks in use, once a step; `weight_bytes` and `block_bytes` are what a step reads of the
    weights and what a KV block takes."""

    waiting: int
    running: int
    steps: int
    used_blocks: int
    num_blocks: int
    prompt_tokens: int
    hit_tokens: int
    computed_tokens: int
    output_tokens: int
    preemptions: int
    mean_running: float
    shortages: int = 0
    weight_bytes: int = 0
    block_bytes: int = 0
    read_blocks: int = 0
    verifications: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0


def refusal(request: Request, *, vocab_size: int, context_tokens: int) -> RequestError | None:
    """Why a request can't be run by a model of this vocabulary and context; None if it can."""
    if request.pooling is not None:
        return pooling.refusal(request, vocab_size=vocab_size, context_tokens=context_tokens)
    prompt_tokens = len(request.prompt_ids)
    if prompt_tokens == 0:
        return RequestError("The prompt has no tokens.", code="invalid_value", param="messages")
    if prompt_tokens >= context_tokens:
        return RequestError(
            f"The prompt has {prompt_tokens} tokens; this model's context holds {context_tokens}, the answer included.",
            code="context_length_exceeded",
            param="messages",
        )
    if min(request.prompt_ids) < 0 or max(request.prompt_ids) >= vocab_size:
        return RequestError(
            f"The prompt has a token id outside of the model's vocabulary of {vocab_size}.",
            code="invalid_value",
            param="messages",
        )
    unknown = [token for token, _ in request.params.logit_bias if not 0 <= token < vocab_size]
    if unknown:
        return RequestError(
            f"logit_bias names token {unknown[0]}, which is outside of the model's vocabulary of {vocab_size}.",
            code="invalid_value",
            param="logit_bias",
        )
    return None


def error_completion(request: Request, code: str, message: str) -> Completion:
    """The end of a request that never ran."""
    return Completion(
        request_id=request.id,
        token_ids=(),
        text="",
        finish_reason=FinishReason.ERROR,
        usage=Usage(len(request.prompt_ids), 0, 0),
        error_code=code,
        error_message=message,
    )


class Announcement(NamedTuple):
    """Something to expect under a name; None: nothing any more."""

    name: str
    expectation: Expectation | None


class Intake:
    """What came in, in its order, until the thread that steps takes it. Thread-safe."""

    def __init__(self, check: Callable[[Request], RequestError | None]) -> None:
        self._check = check
        self._lock = threading.Lock()
        self._inbox: deque[Request | str | Announcement] = deque()
        self._open: set[str] = set()
        self._held = StepOutput()
        self._is_closed = False

    def add(self, request: Request) -> None:
        """Takes a request. One that can't be run ends as an error completion of the next step. Raises RequestError
        for an id that is still open, EngineError after `close`."""
        error = self._check(request)
        with self._lock:
            if self._is_closed:
                raise EngineError("This engine is closed; it takes no more requests.")
            if request.id in self._open:
                raise RequestError(f"There is an unfinished request {request.id}.", code="invalid_value", param="id")
            self._open.add(request.id)
            if error is None:
                self._inbox.append(request)
            else:
                self._held.completions.append(error_completion(request, error.code, str(error)))

    def abort(self, request_id: str) -> None:
        """Asks for the end of a request; an unknown id is ignored."""
        with self._lock:
            if request_id in self._open:
                self._inbox.append(request_id)

    def expect(self, name: str, expectation: Expectation | None) -> None:
        """Passes an announcement on, in order with the requests."""
        with self._lock:
            self._inbox.append(Announcement(name, expectation))

    def take(self) -> list[Request | str | Announcement]:
        """Requests, ids to abort, and announcements, since the last call."""
        with self._lock:
            taken = list(self._inbox)
            self._inbox.clear()
            return taken

    def take_held(self) -> StepOutput:
        """What waits to be handed out: refused requests, and what `hold` was given."""
        with self._lock:
            held, self._held = self._held, StepOutput()
            self._open.difference_update(completion.request_id for completion in held.completions)
            return held

    def hold(self, output: StepOutput) -> None:
        """Keeps results for the next step's caller; their requests stay unfinished until then."""
        with self._lock:
            self._open.update(completion.request_id for completion in output.completions)
            self._held.add_all(output)

    def done(self, request_ids: Iterable[str]) -> None:
        """These requests ended; their ids are free again."""
        with self._lock:
            self._open.difference_update(request_ids)

    def has_work(self) -> bool:
        return bool(self._inbox or self._held.completions or self._held.new_tokens)

    def num_unfinished(self) -> int:
        return len(self._open)

    def close(self) -> None:
        with self._lock:
            self._is_closed = True


class Stepping(Protocol):
    """What `run_requests` needs of an engine; all of it on the thread that steps."""

    def add(self, request: Request) -> None: ...
    def step(self) -> StepOutput: ...
    def hold(self, output: StepOutput) -> None: ...
    def drop(self, request_ids: Iterable[str]) -> None: ...


def run_requests(engine: Stepping, requests: Iterable[Request], *, backlog: int) -> Iterator[Completion]:
    """Runs requests and yields their completions in the order of the requests, reading at most `backlog` ahead of
    what has ended. Results of others' requests are held for them. Left early, it drops what is unfinished."""
    source = iter(requests)
    order: deque[str] = deque()
    unfinished: set[str] = set()
    ready: dict[str, Completion] = {}
    is_exhausted = False
    try:
        while True:
            while not is_exhausted and len(unfinished) < backlog:
                request = next(source, None)
                if request is None:
                    is_exhausted = True
                    break
                engine.add(request)
                order.append(request.id)
                unfinished.add(request.id)
            if not order:
                return
            output = engine.step()
            others = output.without(unfinished)
            for completion in output.completions:
                if completion.request_id in unfinished:
                    unfinished.remove(completion.request_id)
                    ready[completion.request_id] = completion
            if others.new_tokens or others.completions:
                engine.hold(others)
            while order and order[0] in ready:
                yield ready.pop(order.popleft())
    finally:
        if unfinished:
            engine.drop(unfinished)
