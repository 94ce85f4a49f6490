"""A deterministic engine without weights, for tests and for a dry system; it tells a witness what it runs.

What it says is a function of the request alone and has the shape that is asked for: several answers, forms, calls of
tools, logprobs, vectors (engine/fake_answers.py). Requests begin oldest first, at most `max_running` at once, and share
`tokens_per_s` output tokens a second in turn (0: as fast as it can); interactive ones come before batch work, which
gives its places to them. The witness file gets JSON lines:
{"event": "start" | "end", "id", "t"} when a request begins to run and when it ends, so that tests can count how often
something was executed, and {"event": "tokens", "tokens": {id: count}, "t"} for each step, so that they can count what
was generated and see when. What a request resumes was not generated here.
"""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from engine.errors import MemoryShortageError
from engine.fake_answers import FakeAnswers, vectors_of
from engine.fake_job import Job
from engine.faults import Faults
from engine.intake import EngineStats, Intake, refusal, run_requests
from engine.request import Completion, Expectation, FinishReason, Lane, Request, StepOutput
from engine.sched.counters import Counters
from engine.sched.limits import StepLimits
from engine.signals import Signals
from engine.structure import forms
from engine.structure.grammar import GrammarError
from engine.text import TextModel

_TICK_S = 0.05  # a paced step takes about this long


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
        vocab_size: int = 1 << 16,
    ) -> None:
        vocab_size = text.meta.vocab_size if text is not None else vocab_size
        context_tokens = text.meta.context_tokens if text is not None else 1 << 20
        self._hidden = text.meta.hidden if text is not None else 64
        self._answers = FakeAnswers(vocab_size=vocab_size, context_tokens=context_tokens)
        self._tokens_per_s = tokens_per_s
        self._max_running = max_running
        if tokens_per_s:
            step_tokens = max(1, min(step_tokens, int(tokens_per_s * _TICK_S)))
        self._limits = StepLimits(step_tokens=step_tokens, max_running=max_running)
        self._faults = faults or Faults()
        self._decode = text.tokenizer.decode if text is not None else None
        # unbuffered: a line is one write, whole whatever other processes append and whenever this one is killed
        self._witness = witness.open("ab", buffering=0) if witness is not None else None
        self._intake = Intake(lambda request: refusal(request, vocab_size=vocab_size, context_tokens=context_tokens))
        self._waiting: dict[Lane, deque[Request]] = {lane: deque() for lane in Lane}
        self._running: dict[str, Job] = {}
        self._paused: deque[Job] = deque()  # begun, and put aside because memory or places ran short
        self._counters = Counters()
        self._signals = Signals()

    def add(self, request: Request) -> None:
        """As Engine.add."""
        self._signals.arrive(request.id, time.monotonic())
        self._intake.add(request)

    def abort(self, request_id: str) -> None:
        """As Engine.abort."""
        self._intake.abort(request_id)

    def expect(self, name: str, expectation: Expectation | None) -> None:
        """As Engine.expect; without a cache there is nothing to keep."""

    def has_work(self) -> bool:
        return bool(self._intake.has_work() or any(self._waiting.values()) or self._paused or self._running)

    def num_unfinished(self) -> int:
        return self._intake.num_unfinished()

    def step(self) -> StepOutput:
        """Runs the oldest requests as far as one step's tokens go."""
        output = self._intake.take_held()
        began_s = time.monotonic()
        self._take_in(output)
        self._fill()
        if not self._faults.has_room(len(self._running)):
            self._make_smaller()
        elif self._running:
            self._counters.steps += 1
            self._counters.chunks += len(self._running)
            self._spend(output)
            self._limits.observe_step()
            self._faults.hold(self._counters.output_tokens)
            self._signals.step(time.monotonic() - began_s)
        for completion in output.completions:
            self._signals.leave(completion.request_id)
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
        counters = self._counters
        return EngineStats(
            waiting=sum(map(len, self._waiting.values())) + len(self._paused),
            running=sum(job.request.n for job in self._running.values()),  # as sequences, which an engine counts
            steps=counters.steps,
            used_blocks=0,
            num_blocks=0,
            prompt_tokens=counters.prompt_tokens,
            hit_tokens=0,
            computed_tokens=counters.computed_tokens,
            output_tokens=counters.output_tokens,
            preemptions=counters.preemptions,
            mean_running=counters.chunks / max(counters.steps, 1),
            shortages=counters.shortages,
        )

    def signals(self) -> dict[str, Any]:
        """As Engine.signals."""
        return self._signals.shown(self._counters, time.monotonic())

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
                lane = Lane.of(item.lane)
                self._waiting[lane].append(item)
                self._counters.lanes[lane].open += item.n

    def _fill(self) -> None:
        urgent, late = self._waiting[Lane.INTERACTIVE], self._waiting[Lane.BATCH]
        while urgent and self._has_place():
            self._run(self._start(urgent.popleft()))
        while len(self._running) < self._limits.max_running and (self._paused or late):
            self._run(self._paused.popleft() if self._paused else self._start(late.popleft()))

    def _run(self, job: Job) -> None:
        self._running[job.request.id] = job
        self._counters.lanes[Lane.of(job.request.lane)].running += job.request.n

    def _has_place(self) -> bool:
        """For one more interactive request; the batch work that began last gives its own up."""
        if len(self._running) < self._limits.max_running:
            return True
        victim = next((job for job in reversed(self._running.values()) if job.request.lane > Lane.INTERACTIVE), None)
        if victim is not None:
            self._counters.preemptions += 1
            self._put_aside(victim)
        return victim is not None

    def _put_aside(self, job: Job) -> None:
        del self._running[job.request.id]
        self._counters.lanes[Lane.of(job.request.lane)].running -= job.request.n
        self._paused.appendleft(job)

    def _start(self, request: Request) -> Job:
        lane = self._counters.lanes[Lane.of(request.lane)]
        lane.prompt_tokens += len(request.prompt_ids)
        lane.computed_tokens += len(request.prompt_ids)
        try:
            job = Job.begin(request, self._answers.of(request))
        except GrammarError as error:
            job = Job(request, error=(forms.CODE, forms.sentence(str(error))))
        if self._faults.spoils(request.prompt_ids, self._decode):
            job.error = ("invalid_logits", "The model's output for this request is not a number.")
        self._testify({"event": "start", "id": request.id})
        self._faults.strike(request.prompt_ids, self._decode)
        return job

    def _make_smaller(self) -> None:
        """What a real engine does when memory ran short: all wait, and fewer go on together."""
        self._counters.shortages += 1
        if not self._limits.lower(self._limits.step_tokens, len(self._running)):
            raise MemoryShortageError("A step needs more memory than there is.")
        for job in reversed(list(self._running.values())):
            self._put_aside(job)

    def _spend(self, output: StepOutput) -> None:
        left = self._limits.step_tokens
        served: dict[str, int] = {}
        jobs = sorted(self._running.values(), key=lambda job: Lane.of(job.request.lane))
        now_s = time.monotonic()
        for num_others, job in zip(reversed(range(len(jobs))), jobs, strict=True):
            share = min(max(left // (num_others + 1), 1), left, job.num_left)
            request_id = job.request.id
            if share:
                served[request_id] = share
                output.add_all(job.take(share))
                lane = Lane.of(job.request.lane)
                self._counters.lanes[lane].output_tokens += share
                self._counters.lanes[lane].computed_tokens += share
                self._signals.token(request_id, request_id, lane, now_s)
            job.steps += bool(share)
            left -= share
            if job.error is not None:
                self._end(job, FinishReason.ERROR, output)
            elif not job.num_left:
                self._end(job, job.answers[0].choice.finish_reason, output)
            else:
                self._running[request_id] = self._running.pop(request_id)  # the others come first next time
            if left == 0:
                break
        if served:
            self._testify({"event": "tokens", "tokens": served})
        if self._tokens_per_s:
            time.sleep(sum(served.values()) / self._tokens_per_s)

    def _abort(self, request_id: str, output: StepOutput) -> None:
        job = self._running.get(request_id)
        if job is not None:
            self._end(job, FinishReason.ABORT, output)
            return
        for paused in self._paused:
            if paused.request.id == request_id:
                self._paused.remove(paused)
                self._end(paused, FinishReason.ABORT, output)
                return
        for request in [*self._waiting[Lane.INTERACTIVE], *self._waiting[Lane.BATCH]]:
            if request.id == request_id:
                self._waiting[Lane.of(request.lane)].remove(request)
                self._counters.lanes[Lane.of(request.lane)].open -= request.n
                output.completions.append(Job(request).completion(FinishReason.ABORT))
                return

    def _end(self, job: Job, reason: FinishReason, output: StepOutput) -> None:
        lane = self._counters.lanes[Lane.of(job.request.lane)]
        lane.open -= job.request.n
        if self._running.pop(job.request.id, None) is not None:
            lane.running -= job.request.n
        self._signals.end(job.request.id)
        self._testify({"event": "end", "id": job.request.id})
        completion = job.completion(reason)
        if job.request.pooling is not None and reason is FinishReason.STOP:
            completion = replace(completion, vectors=vectors_of(job.request, self._hidden))
        output.completions.append(completion)

    def _testify(self, entry: dict[str, Any]) -> None:
        if self._witness is not None:
            self._witness.write(json.dumps({**entry, "t": time.time()}).encode() + b"\n")
