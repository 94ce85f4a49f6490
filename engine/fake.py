"""A deterministic engine without weights, for tests and for a dry system; it tells a witness what it runs.

An answer is a function of prompt, seed and choice: words drawn by a hash, one word a token, never empty. Requests begin
oldest first, at most `max_running` at once, and share `tokens_per_s` output tokens a second in turn (0: as fast as it
can). The witness file gets JSON lines: {"event": "start" | "end", "id", "t"} when a request begins to run and when it
ends, so that tests can count how often something was executed, and {"event": "tokens", "tokens": {id: count}, "t"} for
each step, so that they can count what was generated and see when. What a request resumes was not generated here.
"""

from __future__ import annotations

import hashlib
import json
import re
import time
from array import array
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from engine.errors import MemoryShortageError
from engine.faults import Faults
from engine.intake import EngineStats, Intake, refusal, run_requests
from engine.pooling import segments_of, unit_vector
from engine.request import Choice, Completion, Expectation, FinishReason, Request, SpelledLogprob, StepOutput, Usage
from engine.sched.limits import StepLimits
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
    steps: int = 0
    error: tuple[str, str] | None = None
    parts: tuple[Choice, ...] = ()  # of a request that wants several answers: its tokens are those of all


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
        faults: Faults | None = None,
    ) -> None:
        self._vocab_size = text.meta.vocab_size if text is not None else 1 << 16
        self._hidden = text.meta.hidden if text is not None else 64
        self._context_tokens = text.meta.context_tokens if text is not None else 1 << 20
        self._tokens_per_s = tokens_per_s
        self._max_running = max_running
        if tokens_per_s:
            step_tokens = max(1, min(step_tokens, int(tokens_per_s * _TICK_S)))
        self._limits = StepLimits(step_tokens=step_tokens, max_running=max_running)
        self._faults = faults or Faults()
        self._decode = text.tokenizer.decode if text is not None else None
        # unbuffered: a line is one write, whole whatever other processes append and whenever this one is killed
        self._witness = witness.open("ab", buffering=0) if witness is not None else None
        self._intake = Intake(
            lambda request: refusal(request, vocab_size=self._vocab_size, context_tokens=self._context_tokens)
        )
        self._waiting: deque[Request] = deque()
        self._running: dict[str, _Job] = {}
        self._paused: deque[_Job] = deque()  # begun, and put aside because memory ran short
        self._steps = self._chunks = self._prompt_tokens = self._output_tokens = self._shortages = 0

    def add(self, request: Request) -> None:
        """As Engine.add."""
        self._intake.add(request)

    def abort(self, request_id: str) -> None:
        """As Engine.abort."""
        self._intake.abort(request_id)

    def expect(self, name: str, expectation: Expectation | None) -> None:
        """As Engine.expect; without a cache there is nothing to keep."""

    def has_work(self) -> bool:
        return bool(self._intake.has_work() or self._waiting or self._paused or self._running)

    def num_unfinished(self) -> int:
        return self._intake.num_unfinished()

    def step(self) -> StepOutput:
        """Runs the oldest requests as far as one step's tokens go."""
        output = self._intake.take_held()
        self._take_in(output)
        while len(self._running) < self._limits.max_running and (self._paused or self._waiting):
            job = self._paused.popleft() if self._paused else self._start(self._waiting.popleft())
            self._running[job.request.id] = job
        if not self._faults.has_room(len(self._running)):
            self._make_smaller()
        elif self._running:
            self._steps += 1
            self._chunks += len(self._running)
            self._spend(output)
            self._limits.observe_step()
            self._faults.hold(self._output_tokens)
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
            waiting=len(self._waiting) + len(self._paused),
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
            shortages=self._shortages,
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

    def _start(self, request: Request) -> _Job:
        self._prompt_tokens += len(request.prompt_ids)
        job = _answer(request, self._vocab_size, self._context_tokens)
        job.num_done = min(len(request.resume_ids), len(job.token_ids))
        assert job.token_ids[: job.num_done] == list(request.resume_ids), f"{request.id} resumes another answer"
        if self._faults.spoils(request.prompt_ids, self._decode):
            job.error = ("invalid_logits", "The model's output for this request is not a number.")
        self._testify({"event": "start", "id": request.id})
        self._faults.strike(request.prompt_ids, self._decode)
        return job

    def _make_smaller(self) -> None:
        """What a real engine does when memory ran short: all wait, and fewer go on together."""
        self._shortages += 1
        if not self._limits.lower(self._limits.step_tokens, len(self._running)):
            raise MemoryShortageError("A step needs more memory than there is.")
        self._paused.extendleft(reversed(self._running.values()))
        self._running.clear()

    def _spend(self, output: StepOutput) -> None:
        left = self._limits.step_tokens
        served: dict[str, int] = {}
        for num_others, job in zip(reversed(range(len(self._running))), list(self._running.values()), strict=True):
            share = min(max(left // (num_others + 1), 1), left, len(job.token_ids) - job.num_done)
            request_id = job.request.id
            if share:
                served[request_id] = share
                output.new_tokens[request_id] = job.token_ids[job.num_done : job.num_done + share]
                if not job.num_done:
                    output.hit_tokens[request_id] = 0
            job.num_done += share
            job.steps += bool(share)
            left -= share
            if job.error is not None:
                self._end(job, FinishReason.ERROR, "", output)
            elif job.num_done == len(job.token_ids):
                self._end(job, job.finish_reason, job.text, output)
            else:
                self._running[request_id] = self._running.pop(request_id)  # the others come first next time
            if left == 0:
                break
        self._output_tokens += sum(served.values())
        if served:
            self._testify({"event": "tokens", "tokens": served})
        if self._tokens_per_s:
            time.sleep(sum(served.values()) / self._tokens_per_s)

    def _abort(self, request_id: str, output: StepOutput) -> None:
        job = self._running.get(request_id)
        if job is not None:
            self._end(job, FinishReason.ABORT, "", output)
            return
        for paused in self._paused:
            if paused.request.id == request_id:
                self._paused.remove(paused)
                self._end(paused, FinishReason.ABORT, "", output)
                return
        for request in self._waiting:
            if request.id == request_id:
                self._waiting.remove(request)
                output.completions.append(_completion(request, (), "", FinishReason.ABORT))
                return

    def _end(self, job: _Job, reason: FinishReason, text: str, output: StepOutput) -> None:
        self._running.pop(job.request.id, None)
        self._testify({"event": "end", "id": job.request.id})
        token_ids = tuple(job.token_ids[: job.num_done])
        completion = _completion(job.request, token_ids, text, reason, job.error, steps=job.steps)
        if job.request.params.logprobs is not None and reason in (FinishReason.STOP, FinishReason.LENGTH):
            completion = replace(completion, logprobs=_logprobs(text, job.request.params.logprobs))
        if job.parts:
            completion = replace(completion, choices=job.parts)
        if job.request.pooling is not None and reason is FinishReason.STOP:
            completion = replace(completion, vectors=_vectors(job.request, self._hidden))
        output.completions.append(completion)

    def _testify(self, entry: dict[str, Any]) -> None:
        if self._witness is not None:
            self._witness.write(json.dumps({**entry, "t": time.time()}).encode() + b"\n")


def _completion(
    request: Request,
    token_ids: tuple[int, ...],
    text: str,
    reason: FinishReason,
    error: tuple[str, str] | None = None,
    *,
    steps: int = 0,
) -> Completion:
    code, message = error or (None, None)
    return Completion(
        request_id=request.id,
        token_ids=token_ids,
        text=text,
        finish_reason=reason,
        usage=Usage(len(request.prompt_ids), 0, len(token_ids), steps),
        error_code=code if reason is FinishReason.ERROR else None,
        error_message=message if reason is FinishReason.ERROR else None,
    )


def _logprobs(text: str, num_top: int) -> tuple[SpelledLogprob, ...]:
    """Of each word with the space before it: as likely as the next ones of the list of words are less."""
    pieces = re.findall(r" ?[^ ]+", text)
    tops = [[piece, *(f" {word}" for word in _WORDS if word != piece.strip())][:num_top] for piece in pieces]
    return tuple(
        SpelledLogprob(piece.encode(), -0.5, tuple((one.encode(), -0.5 - at) for at, one in enumerate(top)))
        for piece, top in zip(pieces, tops, strict=True)
    )


def _vectors(request: Request, size: int) -> tuple[bytes, ...]:
    """The vectors that the prompts of this request always get: numbers drawn by a hash."""
    ids, vectors = list(request.prompt_ids), []
    for length in segments_of(request):
        prompt, ids = ids[:length], ids[length:]
        seed = int.from_bytes(hashlib.blake2b(array("q", prompt).tobytes(), digest_size=8).digest(), "big")
        vector = unit_vector(np.random.default_rng(seed).standard_normal(size))
        assert vector is not None, "numbers that are drawn aren't all zero"
        vectors.append(vector)
    return tuple(vectors)


def _several(request: Request, vocab_size: int, context_tokens: int) -> _Job:
    """All answers of a request as one job."""
    jobs = [_answer(replace(request, n=1, choice=choice), vocab_size, context_tokens) for choice in range(request.n)]
    num_top = request.params.logprobs
    parts = tuple(
        Choice(job.text, job.finish_reason, None if num_top is None else _logprobs(job.text, num_top)) for job in jobs
    )
    tokens = [token for job in jobs for token in job.token_ids]
    return _Job(request, tokens, jobs[0].finish_reason, jobs[0].text, parts=parts)


def _answer(request: Request, vocab_size: int, context_tokens: int) -> _Job:
    """The answer that this request always gets: a word a token, cut at the first stop string."""
    params = request.params
    if request.n > 1:
        return _several(request, vocab_size, context_tokens)
    if request.pooling is not None:
        return _Job(request, [], FinishReason.STOP, "")
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
