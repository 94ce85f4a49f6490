"""Random lives of a scheduler: adds, forks, steps at any depth, commits, aborts, preemptions, failing rows; with drafts
that are right now and then.

After every operation the books are audited; every answer is compared with the one the request has alone; at the end
nothing is left in the pool.
"""

from __future__ import annotations

from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from engine.cache.prefix import blake2b_128
from engine.request import FinishReason
from engine.spec.speculation import Speculation
from tests.engine.oracle import answer, request
from tests.engine.sched.harness import Harness
from tests.engine.spec.guesser import Guesser

STEMS = ([], [1, 2, 3, 4, 5, 6], [1, 2, 3, 4, 9, 9, 9, 9], [7] * 11)
HASHES = (blake2b_128, lambda _data: b"same", lambda data: blake2b_128(data)[:1])


class SchedulerMachine(RuleBasedStateMachine):
    @initialize(
        num_blocks=st.integers(4, 24),
        block_tokens=st.integers(1, 5),
        step_tokens=st.sampled_from([1, 2, 3, 7, 100]),
        max_running=st.integers(1, 6),
        prefix_cache=st.sampled_from([True, True, True, False]),
        hash_bytes=st.sampled_from(HASHES),
        right=st.sampled_from([None, 0.0, 0.5, 0.9, 1.0]),
    )
    def start(self, right: float | None, **options: Any) -> None:
        self.guesser = Guesser(right or 0.0)
        speculation = None if right is None else Speculation(self.guesser, is_gated=False)
        self.harness = Harness(speculation=speculation, **options)
        self.added = 0
        self.failing: set[str] = set()

    prompts = st.tuples(st.sampled_from(STEMS), st.lists(st.integers(1, 3), min_size=1, max_size=4))

    def draw_request(self, prompt, max_tokens: int, salt: str, lane: int, seed: int, is_exact: bool):
        self.added += 1
        return request(
            f"r{self.added}", prompt, max_tokens, salt=salt, lane=lane, seed=seed,
            ignore_eos=is_exact, min_tokens=seed % 2 if max_tokens > 1 else 0,
        )  # fmt: skip

    @rule(
        prompt=prompts,
        max_tokens=st.integers(1, 12),
        salt=st.sampled_from(["", "", "x"]),
        lane=st.sampled_from([0, 1, 1, 2]),
        seed=st.integers(0, 3),
        is_exact=st.booleans(),
        fails_at=st.sampled_from([None, None, None, None, 1, 3]),
    )
    def add(self, prompt, max_tokens, salt, lane, seed, is_exact, fails_at) -> None:
        made = self.draw_request([*prompt[0], *prompt[1]], max_tokens, salt, lane, seed, is_exact)
        if fails_at is not None:
            self.harness.runner.fail_at[made.id] = len(made.prompt_ids) + fails_at
            self.failing.add(made.id)
        self.guesser.know(made)
        self.harness.add(made)

    @precondition(lambda self: self.harness.requests)
    @rule(data=st.data(), seed=st.integers(4, 6))
    def fork(self, data: st.DataObject, seed: int) -> None:
        parent = self.harness.requests[data.draw(st.sampled_from(sorted(self.harness.requests)))]
        child = self.draw_request(parent.prompt_ids, parent.params.max_tokens, parent.salt, parent.lane, seed, True)
        self.harness.requests[child.id] = child
        self.guesser.know(child)
        self.harness.scheduler.fork(parent.id, child)
        self.harness.check()

    @precondition(lambda self: len(self.harness.in_flight) < 3)
    @rule()
    def launch(self) -> None:
        self.harness.launch()

    @precondition(lambda self: self.harness.in_flight)
    @rule()
    def commit(self) -> None:
        self.harness.commit()

    @rule(steps=st.integers(1, 5))
    def step(self, steps: int) -> None:
        for _ in range(steps):
            self.harness.launch()
            while self.harness.in_flight:
                self.harness.commit()

    @precondition(lambda self: self.harness.requests)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        self.harness.scheduler.abort(data.draw(st.sampled_from(sorted(self.harness.requests))))
        self.harness.check()

    @precondition(lambda self: self.harness.requests)
    @rule(data=st.data())
    def preempt(self, data: st.DataObject) -> None:
        self.harness.scheduler.preempt(data.draw(st.sampled_from(sorted(self.harness.requests))))
        self.harness.check()

    def teardown(self) -> None:
        harness = self.harness
        harness.run(depth=2)
        assert harness.finished.keys() == harness.requests.keys()
        for name, seq in harness.finished.items():
            tokens, reason = answer(harness.requests[name])
            if seq.finish_reason in (FinishReason.ABORT, FinishReason.ERROR):
                assert seq.output_ids == tokens[: len(seq.output_ids)]
                if seq.finish_reason is FinishReason.ERROR:
                    assert seq.error_code == "kv_capacity_exceeded" or name in self.failing
            else:
                assert (seq.output_ids, seq.finish_reason) == (tokens, reason)


SchedulerMachine.TestCase.settings = settings(max_examples=120, stateful_step_count=40, deadline=None)
TestScheduler = SchedulerMachine.TestCase
