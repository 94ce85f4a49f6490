"""The engine: requests in, completions out, one step at a time.

    while engine.has_work():
        plan   = scheduler.schedule()      engine/sched/scheduler.py   what to compute
        result = runner.execute(plan)      engine/runner.py            tokens
        ended  = scheduler.commit(plan, result)                        and their end: engine/answer.py

Where steps run beside this thread (a GPU), the next one is planned and launched before the last one is read: its tokens
are placeholders till then. `EngineConfig.overlap` says it for any device.

`add`, `abort` and `expect` may be called from any thread, all else from the one that steps. A step that memory doesn't
suffice for is taken back and done again in smaller ones. A runner that raises anything else leaves the engine unusable:
the exception goes to whoever stepped, who knows from `add` what was under way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from time import perf_counter
from typing import Any, Protocol, cast

from engine.answer import Answer
from engine.cache.passing import BlockBytes, Origin, Passing
from engine.cache.prefix import PrefixIndex
from engine.cache.sequence import Sequence as RunningSequence
from engine.choices import Choices
from engine.config import EngineConfig
from engine.errors import EngineError, GrammarError, MemoryShortageError
from engine.intake import Announcement, EngineStats, Intake, error_completion, refusal, run_requests
from engine.pooling import PooledRequests, unit_vector
from engine.request import (
    Completion,
    Expectation,
    FinishReason,
    Request,
    StepOutput,
    TokenLogprobs,
    Usage,
)
from engine.sched.costs import work_of
from engine.sched.dial import Dial
from engine.sched.plan import StepPlan, StepResult
from engine.sched.scheduler import Scheduler
from engine.signals import Signals
from engine.spec.choose import speculation_for
from engine.spec.speculation import Speculation
from engine.structure import forms
from engine.text import TextModel, load_text

__all__ = ["Engine", "EngineStats", "Runner"]

_BACKLOG_STEPS = 4  # `run` reads ahead this many times as many requests as can run


class Runner(Protocol):
    """Executes plans in order. `layout_id` names the KV layout, `digest` the model; both are part of block keys."""

    @property
    def num_blocks(self) -> int: ...
    @property
    def vocab_size(self) -> int: ...
    @property
    def context_tokens(self) -> int: ...
    @property
    def eos_ids(self) -> frozenset[int]: ...
    @property
    def layout_id(self) -> str: ...
    @property
    def digest(self) -> str: ...
    def execute(self, plan: StepPlan) -> StepResult: ...


class Launched(Protocol):
    """A step under way."""

    def result(self) -> StepResult:
        """Waits for it."""


class OverlappingRunner(Runner, Protocol):
    """One whose steps can be launched before the last one was read. `overlaps`: they run beside this thread."""

    @property
    def overlaps(self) -> bool: ...
    def launch(self, plan: StepPlan) -> Launched: ...


class Engine:
    """One model on one device. Raises ModelError or ConfigError when it can't be served.

    `scheduler` is open to read for tests and metrics. A `runner` given here is used with `text` as it is; without
    one, both are loaded from `config.model`. A `speculation` given here takes the place of what `config.spec` says.
    `say` is told what runs slower than it could.
    """

    def __init__(
        self,
        config: EngineConfig,
        *,
        runner: Runner | None = None,
        text: TextModel | None = None,
        speculation: Speculation | None = None,
        say: Callable[[str], None] = lambda sentence: None,
    ) -> None:
        self.device = "cpu"  # or "cuda": where steps run
        self._weight_bytes = self._block_bytes = 0
        if runner is None:
            from engine.runner import ModelRunner

            text = text or load_text(config.model)
            text.tokenizer.token_bytes(0)  # makes the table of all tokens, which the first answer would wait for
            model_runner = ModelRunner(config, say)
            runner, memory = model_runner, model_runner.memory
            self.device = model_runner.device.type
            self._weight_bytes = memory.weight_bytes
            self._block_bytes = memory.kv_bytes // max(runner.num_blocks, 1)
        self._runner = runner
        self._text = text
        self._weight_format = config.weight_format
        self._vocab_size, self._context_tokens = runner.vocab_size, runner.context_tokens
        self._backlog = _BACKLOG_STEPS * config.max_running
        index = PrefixIndex(block_tokens=config.block_tokens, layout=runner.layout_id, model=runner.digest)
        self._speculation = speculation or speculation_for(config, runner, text, say)
        self._overlapping = _overlapping(runner, config.overlap)
        self._dial = Dial(
            ttft_s=_seconds(config.ttft_target_ms),
            itl_s=_seconds(config.itl_target_ms),
            steps_ahead=int(self._overlapping is not None),
        )
        self.scheduler = Scheduler(
            num_blocks=runner.num_blocks,
            block_tokens=config.block_tokens,
            step_tokens=config.step_tokens,
            max_running=config.max_running,
            index=index if config.prefix_cache else None,
            judge=self._judge,
            speculation=self._speculation,
            dial=self._dial,
        )
        self._intake = Intake(
            lambda request: refusal(request, vocab_size=self._vocab_size, context_tokens=self._context_tokens)
        )
        self._answers: dict[str, Answer] = {}
        self._logprobs: dict[str, Iterator[TokenLogprobs]] = {}  # of the step that is being committed
        self._pooled = PooledRequests()
        self._choices = Choices()
        self._forms = forms.Forms(text, vocab_size=runner.vocab_size, eos_ids=runner.eos_ids)
        if self._speculation is not None:
            self._speculation.cut_by(self._forms.cut)
        self._output = StepOutput()
        self._is_broken = False
        self._say = say
        self._signals = Signals()
        self._read_s = 0.0  # when the step that is being committed was read
        self._flight: tuple[StepPlan, Launched, float] | None = None  # launched and not read, and since when
        self._landed_s = 0.0

    def add(self, request: Request) -> None:
        """Queues a request. One that can't be run ends as an error completion; raises RequestError only for an id
        that is still under way. Thread-safe."""
        self._signals.arrive(request.id, perf_counter())
        self._intake.add(request)

    def abort(self, request_id: str) -> None:
        """Ends a request with finish_reason ABORT in the next step; an unknown id is ignored. Thread-safe."""
        self._intake.abort(request_id)

    def expect(self, name: str, expectation: Expectation | None) -> None:
        """Announces under a name what later requests begin with, so that the cache keeps it; None takes it back.
        Changes no result. Thread-safe."""
        self._intake.expect(name, expectation)

    def has_work(self) -> bool:
        """Whether `step` has something to do or to hand out."""
        return self._intake.has_work() or self.scheduler.has_work() or self._flight is not None

    def passing(self) -> Passing:
        """Its cached prefixes, for another engine or from one (engine/split). On the thread that steps."""
        pool: BlockBytes | None = getattr(self._runner, "pool", None)
        if pool is None:
            raise EngineError("The blocks of this engine's runner can't be passed on.")
        origin = Origin(layout=self._runner.layout_id, model=self._runner.digest, weights=self._weight_format)
        return Passing(self.scheduler.tables, pool, origin)

    def num_unfinished(self) -> int:
        """Requests whose completion hasn't been handed out."""
        return self._intake.num_unfinished()

    def step(self) -> StepOutput:
        """Computes one step and returns what it brought; without work, nothing."""
        if self._is_broken:
            raise EngineError("A step of this engine failed before; build a new one.")
        began_s = perf_counter()
        try:
            self._output = self._intake.take_held()
            for completion in self._output.completions:
                self._signals.leave(completion.request_id)
            self._take_in()
            seen = self._land() if self._wants_tokens() else []
            plan = self.scheduler.schedule()
            if self._overlapping is not None:
                ended = seen + self._overlap(self._overlapping, plan)
            else:
                ended = self.scheduler.take_finished() if plan is None else self._execute(plan)
            self._complete(ended)
            if plan is not None and self._overlapping is None:
                self._observe(plan, perf_counter() - began_s)
            if ended and not self.scheduler.has_work() and self._flight is None:
                self.scheduler.check_integrity()
        except BaseException:
            self._is_broken = True
            raise
        return self._output

    def run(self, requests: Iterable[Request]) -> Iterator[Completion]:
        """Runs requests and yields their completions in the order of the requests. May be called again and again,
        also while another `run` is under way on the same thread; results of other requests wait for `step`."""
        return run_requests(self, requests, backlog=self._backlog)

    def hold(self, output: StepOutput) -> None:
        """Keeps results for the caller of the next step, because they weren't for this one."""
        self._intake.hold(output)

    def drop(self, request_ids: Iterable[str]) -> None:
        """Ends requests without a completion. On the thread that steps."""
        if self._is_broken:
            return
        self._output = self._intake.take_held()
        try:
            self._complete(self._land())  # an id may be given again at once, and is another's then
        except BaseException:
            self._is_broken = True
            raise
        self._take_in()
        for request_id in request_ids:
            self._abort(request_id)
        self._complete(self.scheduler.take_finished())
        self._intake.hold(self._output.without(request_ids))

    def stats(self) -> EngineStats:
        """Counts since the start. Thread-safe."""
        counters = self.scheduler.counters
        return EngineStats(
            waiting=self.scheduler.num_waiting,
            running=self.scheduler.num_running,
            steps=counters.steps,
            used_blocks=self.scheduler.num_used_blocks,
            num_blocks=self.scheduler.num_blocks,
            prompt_tokens=counters.prompt_tokens,
            hit_tokens=counters.hit_tokens,
            computed_tokens=counters.computed_tokens,
            output_tokens=counters.output_tokens,
            preemptions=counters.preemptions,
            mean_running=counters.chunks / max(counters.steps, 1),
            shortages=counters.shortages,
            weight_bytes=self._weight_bytes,
            block_bytes=self._block_bytes,
            read_blocks=counters.read_blocks,
            verifications=counters.verifications,
            drafted_tokens=counters.drafted_tokens,
            accepted_tokens=counters.accepted_tokens,
        )

    def signals(self) -> dict[str, Any]:
        """Its speed by lane, as plain data (engine/signals.py); sorts some thousand times. Thread-safe."""
        return self._signals.shown(self.scheduler.counters, perf_counter())

    def close(self) -> None:
        """Takes no more requests."""
        self._intake.close()

    def _execute(self, plan: StepPlan) -> list[RunningSequence]:
        plan = self._forms.masked(plan)
        start = perf_counter()
        try:
            result = self._runner.execute(plan)
        except MemoryShortageError:
            if not self.scheduler.undo(plan):
                raise
            self._say_smaller(plan)
            return self.scheduler.take_finished()
        if self._speculation is not None:
            self._speculation.observe(plan, perf_counter() - start)
        return self._commit(plan, result)

    def _overlap(self, runner: OverlappingRunner, plan: StepPlan | None) -> list[RunningSequence]:
        """Launches a step, then reads the one before it. The sequences that ended with that."""
        if plan is None:
            return self._land()
        plan, launched_s = self._forms.masked(plan), perf_counter()
        try:
            flight = runner.launch(plan)
        except MemoryShortageError:
            ended = self._land()  # what was launched before still counts
            if not self.scheduler.undo(plan):
                raise
            self._say_smaller(plan)
            return ended + self.scheduler.take_finished()
        ended = self._land()
        self._flight = (plan, flight, launched_s)
        return ended

    def _land(self) -> list[RunningSequence]:
        """Reads the step that was launched before, if there is one."""
        if self._flight is None:
            return self.scheduler.take_finished()
        (plan, flight, launched_s), self._flight = self._flight, None
        result = flight.result()
        began_s, self._landed_s = max(launched_s, self._landed_s), perf_counter()
        self._observe(plan, self._landed_s - began_s)
        if self._speculation is not None:
            self._speculation.observe(plan, self._landed_s - began_s)
        return self._commit(plan, result)

    def _observe(self, plan: StepPlan, seconds: float) -> None:
        """A step took so long, from its plan to its answers or, where steps overlap, from the end of the one before."""
        self._signals.step(seconds)
        if self._dial.is_set:
            self._dial.observe(work_of(plan), seconds)

    def _wants_tokens(self) -> bool:
        """Whether drafts may be worth more than planning ahead."""
        if self._flight is None or self._speculation is None:
            return False
        return self._speculation.wants_tokens(self.scheduler.num_running)

    def _commit(self, plan: StepPlan, result: StepResult) -> list[RunningSequence]:
        self._read_s = perf_counter()
        self._logprobs = {seq_id: iter(found) for seq_id, found in result.logprobs.items()}
        if self._speculation is not None:
            self._speculation.see(result.states)
        return self.scheduler.commit(plan, self._forms.follow(plan, result))

    def _say_smaller(self, plan: StepPlan) -> None:
        self._say(f"Memory did not suffice for a step of {plan.num_tokens} tokens; the next ones are smaller.")

    def _take_in(self) -> None:
        for item in self._intake.take():
            if isinstance(item, str):
                self._abort(item)
                continue
            if isinstance(item, Announcement):
                self.scheduler.expect(item.name, item.expectation)
                continue
            self._start(item)

    def _abort(self, request_id: str) -> None:
        several = self._pooled.sequence_ids(request_id) or self._choices.sequence_ids(request_id)
        for sequence_id in several or (request_id,):
            self.scheduler.abort(sequence_id)

    def _start(self, request: Request) -> None:
        """Queues a request, unless what it resumes had come to its end already."""
        if request.pooling is not None:
            for sequence in self._pooled.begin(request):
                self.scheduler.add(sequence, 1)
            return
        if request.n > 1:
            for sequence in self._choices.begin(request):
                self._start(sequence)
            return
        try:
            matcher = self._forms.start(request)
        except GrammarError as error:
            self._give(error_completion(request, forms.CODE, forms.sentence(str(error))))
            return
        answer = self._answers[request.id] = Answer(request, self._text, self._runner.eos_ids, matcher)
        max_outputs = min(request.params.max_tokens, self._context_tokens - len(request.prompt_ids))
        for count, token_id in enumerate(request.resume_ids, 1):
            if matcher is not None:
                matcher.push(token_id)
            if request.resume_logprobs:
                answer.note(request.resume_logprobs[count - 1])
            reason = answer.push(token_id) or (FinishReason.LENGTH if count >= max_outputs else None)
            if reason is not None:
                self._hand_out(request, request.resume_ids[:count], request.resume_hit_tokens, reason)
                return
        if request.fork_of:
            self.scheduler.fork(request.fork_of, request, max_outputs)
        else:
            self.scheduler.add(request, max_outputs)

    def _judge(self, seq: RunningSequence, token_id: int) -> FinishReason | None:
        request_id, answer = self._choices.request_id(seq.id), self._answers[seq.id]
        choice = seq.request.choice if request_id != seq.id else None
        self._signals.token(request_id, seq.id, seq.lane, self._read_s)
        if seq.num_known == seq.num_prompt_tokens + 1 and not choice:
            self._output.hit_tokens[request_id] = seq.hit_tokens or 0
        logprobs = next(self._logprobs[seq.id]) if seq.id in self._logprobs else None
        if logprobs is not None:
            answer.note(logprobs)
        self._output.add(request_id, token_id, choice, logprobs)
        reason = answer.push(token_id)
        if seq.request.streams and reason is None and (news := answer.take(choice or 0)) is not None:
            self._output.texts.setdefault(request_id, []).append(news)
        return reason

    def _complete(self, ended: list[RunningSequence]) -> None:
        for seq in ended:
            assert seq.finish_reason is not None, f"{seq.id} ended without a reason"
            request = seq.request
            self._signals.end(seq.id)
            if request.pooling is not None:
                self._complete_pooled(seq)
                continue
            hit_tokens = request.resume_hit_tokens if request.resume_ids else seq.hit_tokens or 0
            error = (seq.error_code, seq.error_message)
            self._hand_out(request, seq.output_ids, hit_tokens, seq.finish_reason, *error, steps=seq.num_steps)

    def _complete_pooled(self, seq: RunningSequence) -> None:
        """One prompt of a pooled request came to its end, and perhaps the request with it."""
        assert seq.finish_reason is not None, f"{seq.id} ended without a reason"
        vector = unit_vector(seq.pooled) if seq.pooled is not None else None
        reason, code, message = seq.finish_reason, seq.error_code, seq.error_message
        if reason is FinishReason.STOP and vector is None:
            reason, code, message = FinishReason.ERROR, "invalid_logits", "The model's vector for this input is zero."
        completion = self._pooled.end(
            Completion(
                request_id=seq.id,
                token_ids=(),
                text="",
                finish_reason=reason,
                usage=Usage(seq.num_prompt_tokens, seq.hit_tokens or 0, 0),
                error_code=code,
                error_message=message,
                vectors=(vector,) if vector is not None else (),
            )
        )
        if completion is not None:
            self._give(completion)

    def _give(self, ended: Completion) -> None:
        """A sequence ended, and perhaps the request with it."""
        completion = self._choices.end(ended)
        if completion is not None:
            self._output.completions.append(completion)
            self._signals.leave(completion.request_id)
            self._intake.done([completion.request_id])

    def _hand_out(
        self,
        request: Request,
        token_ids: Sequence[int],
        hit_tokens: int,
        reason: FinishReason,
        error_code: str | None = None,
        error_message: str | None = None,
        *,
        steps: int = 0,
    ) -> None:
        self._forms.end(request.id)
        answer = self._answers.pop(request.id)
        text = answer.text()
        self._give(
            Completion(
                request_id=request.id,
                token_ids=tuple(token_ids),
                text=text,
                finish_reason=reason,
                usage=Usage(len(request.prompt_ids), hit_tokens, len(token_ids), steps),
                error_code=error_code,
                error_message=error_message,
                logprobs=answer.logprobs(text),
                stopped_by=answer.stopped_by if reason is FinishReason.STOP else None,
            )
        )


def _seconds(milliseconds: float | None) -> float | None:
    return None if milliseconds is None else milliseconds / 1000


def _overlapping(runner: Runner, wanted: bool | None) -> OverlappingRunner | None:
    """The runner, if its steps are to be launched before the last one was read."""
    if wanted is False or not hasattr(runner, "launch"):
        return None
    able = cast(OverlappingRunner, runner)
    return able if wanted or able.overlaps else None
