"""A deterministic engine without weights, for tests and for a dry system; it tells a witness what it runs.

An answer is a function of prompt, seed and choice: words drawn by a hash, one word a token, never empty. Requests run
oldest first, at most `max_running` at once, `tokens_per_s` output tokens a second (0: as fast as it can). The witness
file gets one JSON line when a request begins to run and one when it ends: {"event": "start" | "end", "id", "t"}; so
tests can count how often something was executed.
"""

from __future__ import annotations

import hashlib
import json
import time
from array import array
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from engine.intake import EngineStats, Intake, refusal, run_requests
from engine.request import Completion, Expectation, FinishReason, Request, StepOutput, Usage
from engine.text import TextModel

# fmt: off
_WORDS = (
    "amber", "basin", "cedar", "delta", "ember", "field", "grove", "haven", "inlet", "jetty", "knoll",
    "lemon", "maple", "north", "ocean", "plain", "quiet", "river", "stone", "trail", "umber", "water",
)
# fmt: on
_USUAL_TOKENS = 48  # longest answer that isn't asked to be longer
_TICK_S = 0.05  # a paced step takes about this long


@dataclass(slots=True)
class _Job:
    request: Request
    token_ids: list[int]
    finish_reason: FinishReason
    text: str
    num_done: int = field(default=0)


class FakeEngine:
    """Same methods as Engine, no torch. `text` gives vocabulary and context; without it both are generous."""

    def __init__(
        self,
        text: TextModel | None,
        *,
        witness: Path | None = None,
        tokens_per_s: float = 0,
        max_running: int = 256,
        step_tokens: int = 2048,
    ) -> None:
        self._vocab_size = text.meta.vocab_size if text is not None else 1 << 16
        self._context_tokens = text.meta.context_tokens if text is not None else 1 << 20
        self._tokens_per_s = tokens_per_s
        self._max_running = max_running
        self._step_tokens = step_tokens if not tokens_per_s else max(1, min(step_tokens, int(tokens_per_s * _TICK_S)))
        self._witness = witness.open("a", encoding="utf-8") if witness is not None else None
        self._intake = Intake(
            lambda request: refusal(request, vocab_size=self._vocab_size, context_tokens=self._context_tokens)
        )
        self._waiting: deque[Request] = deque()
        self._running: dict[str, _Job] = {}
        self._steps = self._chunks = self._prompt_tokens = self._output_tokens = 0

    def add(self, request: Request) -> None:
        """As Engine.add."""
        self._intake.add(request)

    def abort(self, request_id: str) -> None:
        """As Engine.abort."""
        self._intake.abort(request_id)

    def expect(self, name: str, expectation: Expectation | None) -> None:
        """As Engine.expect; without a cache there is nothing to keep."""

    def has_work(self) -> bool:
        return bool(self._intake.has_work() or self._waiting or self._running)

    def num_unfinished(self) -> int:
        return self._intake.num_unfinished()

    def step(self) -> StepOutput:
        """Runs the oldest requests as far as one step's tokens go."""
        output = self._intake.take_held()
        self._take_in(output)
        while self._waiting and len(self._running) < self._max_running:
            self._start(self._waiting.popleft())
        if self._running:
            self._steps += 1
            self._chunks += len(self._running)
            self._spend(output)
        self._intake.done(completion.request_id for completion in output.completions)
        return output

    def run(self, requests: Iterable[Request]) -> Iterator[Completion]:
        """As Engine.run."""
        return run_requests(self, requests, backlog=4 * self._max_running)

    def hold(self, output: StepOutput) -> None:
        """As Engine.hold."""
        self._intake.hold(output)

    def drop(self, request_ids: Iterable[str]) -> None:
        """As Engine.drop."""
        output = self._intake.take_held()
        self._take_in(output)
        for request_id in request_ids:
            self._abort(request_id, output)
        self._intake.done(completion.request_id for completion in output.completions)
        self._intake.hold(output.without(request_ids))

    def stats(self) -> EngineStats:
        """As Engine.stats; there are no blocks and no prefix cache."""
        return EngineStats(
            waiting=len(self._waiting),
            running=len(self._running),
            steps=self._steps,
            used_blocks=0,
            num_blocks=0,
            prompt_tokens=self._prompt_tokens,
            hit_tokens=0,
            computed_tokens=self._prompt_tokens + self._output_tokens,
            output_tokens=self._output_tokens,
            preemptions=0,
            mean_running=self._chunks / max(self._steps, 1),
        )

    def close(self) -> None:
        """Takes no more requests and closes the witness file."""
        self._intake.close()
        if self._witness is not None:
            self._witness.close()
            self._witness = None

    def _take_in(self, output: StepOutput) -> None:
        for item in self._intake.take():
            if isinstance(item, str):
                self._abort(item, output)
            elif isinstance(item, Request):
                self._waiting.append(item)

    def _start(self, request: Request) -> None:
        self._prompt_tokens += len(request.prompt_ids)
        self._running[request.id] = _answer(request, self._vocab_size, self._context_tokens)
        self._testify("start", request.id)

    def _spend(self, output: StepOutput) -> None:
        left = self._step_tokens
        for job in list(self._running.values()):
            share = min(left, len(job.token_ids) - job.num_done)
            new = job.token_ids[job.num_done : job.num_done + share]
            output.new_tokens[job.request.id] = new
            job.num_done += share
            left -= share
            if job.num_done == len(job.token_ids):
                self._end(job, job.finish_reason, job.text, output)
            if left == 0:
                break
        self._output_tokens += self._step_tokens - left
        if self._tokens_per_s:
            time.sleep((self._step_tokens - left) / self._tokens_per_s)

    def _abort(self, request_id: str, output: StepOutput) -> None:
        job = self._running.get(request_id)
        if job is not None:
            self._end(job, FinishReason.ABORT, "", output)
            return
        for request in self._waiting:
            if request.id == request_id:
                self._waiting.remove(request)
                output.completions.append(_completion(request, (), "", FinishReason.ABORT))
                return

    def _end(self, job: _Job, reason: FinishReason, text: str, output: StepOutput) -> None:
        del self._running[job.request.id]
        self._testify("end", job.request.id)
        token_ids = tuple(job.token_ids[: job.num_done])
        output.completions.append(_completion(job.request, token_ids, text, reason))

    def _testify(self, event: str, request_id: str) -> None:
        if self._witness is not None:
            self._witness.write(json.dumps({"event": event, "id": request_id, "t": time.time()}) + "\n")
            self._witness.flush()


def _completion(request: Request, token_ids: tuple[int, ...], text: str, reason: FinishReason) -> Completion:
    usage = Usage(len(request.prompt_ids), 0, len(token_ids))
    return Completion(request_id=request.id, token_ids=token_ids, text=text, finish_reason=reason, usage=usage)


def _answer(request: Request, vocab_size: int, context_tokens: int) -> _Job:
    """The answer that this request always gets: a word a token, cut at the first stop string."""
    params = request.params
    most = min(params.max_tokens, context_tokens - len(request.prompt_ids))
    digest = hashlib.blake2b(array("q", request.prompt_ids).tobytes() + f"{params.seed}/{request.choice}".encode())
    draw = digest.digest()
    usual = max(1, params.min_tokens) + draw[0] % _USUAL_TOKENS
    length = most if params.ignore_eos else min(usual, most)
    picks = [draw[1 + i % (len(draw) - 1)] + i // (len(draw) - 1) for i in range(length)]
    reason = FinishReason.LENGTH if length == most else FinishReason.STOP
    text = " ".join(_WORDS[pick % len(_WORDS)] for pick in picks)
    ends = [text.find(stop) for stop in params.stop if stop in text]
    if ends:
        text, reason = text[: min(ends)], FinishReason.STOP
        picks = picks[: text.count(" ") + 1]
    return _Job(request, [pick % vocab_size for pick in picks], reason, text)
