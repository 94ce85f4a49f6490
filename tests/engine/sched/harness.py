"""Drives a scheduler with the oracle runner, at any distance between schedule and commit."""

from __future__ import annotations

import pickle
from collections import deque
from collections.abc import Callable, Iterable

from engine.cache.prefix import HashBytes, PrefixIndex, blake2b_128
from engine.cache.sequence import Sequence
from engine.request import FinishReason, Request
from engine.sched.dial import Dial
from engine.sched.plan import StepPlan, StepResult
from engine.sched.scheduler import Scheduler
from engine.spec.speculation import Speculation
from tests.engine.oracle import EOS, OracleRunner, answer


def ends_with_eos(seq: Sequence, token_id: int) -> FinishReason | None:
    params = seq.request.params
    num_outputs = seq.num_known - seq.num_prompt_tokens
    if token_id == EOS and not params.ignore_eos and num_outputs > params.min_tokens:
        return FinishReason.STOP
    return None


class Harness:
    """One scheduler and its memory. Checks the books after every operation."""

    def __init__(
        self,
        *,
        num_blocks: int = 64,
        block_tokens: int = 4,
        step_tokens: int = 64,
        max_running: int = 16,
        prefix_cache: bool = True,
        hash_bytes: HashBytes = blake2b_128,
        next_use: Callable[[bytes], float] | None = None,
        speculation: Speculation | None = None,
        dial: Dial | None = None,
    ) -> None:
        index = PrefixIndex(block_tokens=block_tokens, hash_bytes=hash_bytes) if prefix_cache else None
        self.scheduler = Scheduler(
            num_blocks=num_blocks,
            block_tokens=block_tokens,
            step_tokens=step_tokens,
            max_running=max_running,
            index=index,
            judge=ends_with_eos,
            next_use=next_use,
            speculation=speculation,
            dial=dial,
        )
        self.speculation = speculation
        self.runner = OracleRunner(block_tokens, num_blocks)
        self.step_tokens = step_tokens
        self.in_flight: deque[tuple[StepPlan, StepResult]] = deque()
        self.requests: dict[str, Request] = {}
        self.finished: dict[str, Sequence] = {}
        self.plans: list[StepPlan] = []

    def add(self, *requests: Request) -> None:
        for request in requests:
            self.requests[request.id] = request
            self.scheduler.add(request)
            self.check()

    def launch(self) -> StepPlan | None:
        """Schedules and executes one step without committing it. The plan travels as bytes, as to another rank."""
        plan = self.scheduler.schedule()
        self.check()
        if plan is not None:
            assert 1 <= plan.num_tokens <= self.step_tokens
            plan = pickle.loads(pickle.dumps(plan))
            self.in_flight.append((plan, self.runner.execute(plan)))
            self.plans.append(plan)
        return plan

    def commit(self) -> None:
        plan, result = self.in_flight.popleft()
        if self.speculation is not None:
            self.speculation.see(result.states)
        self._collect(self.scheduler.commit(plan, result))
        self.check()

    def run(self, *, depth: int = 1, on_step: Callable[[int], None] | None = None) -> None:
        """Runs until nothing is left, with up to `depth` steps in flight."""
        steps = 0
        while self.scheduler.has_work() or self.in_flight:
            if on_step is not None:
                on_step(steps)
            plan = self.launch()
            steps += 1
            self._collect(self.scheduler.take_finished())
            if plan is None and not self.in_flight:
                assert not self.scheduler.has_work(), "there is work and nothing is computed"
            while self.in_flight and (plan is None or len(self.in_flight) >= depth):
                self.commit()
            assert steps < 20_000, "it doesn't end"
        self.check()
        assert self.scheduler.num_used_blocks == 0, "blocks leaked"
        assert self.scheduler.num_running == self.scheduler.num_waiting == 0

    def outputs(self) -> dict[str, list[int]]:
        return {name: seq.output_ids for name, seq in self.finished.items()}

    def assert_answers(self, names: Iterable[str] | None = None) -> None:
        """Each finished request has exactly the tokens that it has alone."""
        for name in self.requests if names is None else names:
            seq = self.finished[name]
            tokens, reason = answer(self.requests[name])
            assert seq.output_ids == tokens, f"{name} has wrong tokens"
            assert seq.finish_reason is reason

    def check(self) -> None:
        self.scheduler.check_integrity()

    def _collect(self, finished: list[Sequence]) -> None:
        for seq in finished:
            assert seq.id not in self.finished, f"{seq.id} ended twice"
            self.finished[seq.id] = seq
