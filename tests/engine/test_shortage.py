"""A step that memory doesn't suffice for is done again in smaller ones: no request is lost, and no token changes."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine.config import EngineConfig
from engine.device import errors_told
from engine.engine import Engine
from engine.errors import ConfigError, MemoryShortageError
from engine.fake import FakeEngine
from engine.faults import Faults
from engine.request import FinishReason
from engine.sched.limits import StepLimits
from engine.sched.plan import StepPlan, StepResult
from tests.engine.oracle import OracleRunner, answer, request


class Tight(OracleRunner):
    """Memory suffices for steps of `most_tokens`; now and then it is short for no reason."""

    most_tokens = 6
    fails_at: frozenset[int] = frozenset()
    largest = 0

    def execute(self, plan: StepPlan) -> StepResult:
        if plan.num_tokens > self.most_tokens or (plan.num_tokens > 1 and plan.step in self.fails_at):
            self.last_step = plan.step
            raise MemoryShortageError("A step needs more memory than there is.")
        self.largest = max(self.largest, plan.num_tokens)
        return super().execute(plan)


def test_the_engine_lowers_its_batch_and_loses_nothing() -> None:
    runner, says = Tight(4, 64), []
    runner.fails_at = frozenset(range(2, 150, 9))
    engine = Engine(EngineConfig(model="", block_tokens=4, step_tokens=64), runner=runner, say=says.append)
    requests = [request(f"r{i}", [1 + i % 9] * (1 + 5 * i % 17), 1 + i % 9, seed=i) for i in range(40)]
    for made, done in zip(requests, engine.run(requests), strict=True):
        assert (list(done.token_ids), done.finish_reason) == answer(made)
    assert engine.stats().shortages >= 5 and len(says) == engine.stats().shortages
    assert 0 < runner.largest <= 6
    engine.scheduler.check_integrity()


def test_a_step_of_one_token_that_does_not_fit_is_the_end() -> None:
    runner = Tight(4, 64)
    runner.most_tokens = 0
    engine = Engine(EngineConfig(model="", block_tokens=4), runner=runner)
    with pytest.raises(MemoryShortageError):
        list(engine.run([request("r", [1, 2, 3], 3)]))


def test_limits_halve_and_grow_back() -> None:
    limits = StepLimits(step_tokens=100, max_running=32)
    assert not limits.observe_step() and limits.lower(90, 10)
    assert (limits.step_tokens, limits.max_running) == (45, 5)
    assert limits.lower(45, 1) and (limits.step_tokens, limits.max_running) == (22, 5), "a long prompt is one sequence"
    grown = sum(limits.observe_step() for _ in range(10_000))
    assert grown > 3 and (limits.step_tokens, limits.max_running) == (100, 32)
    assert not StepLimits(step_tokens=1, max_running=1).lower(1, 1)


@given(st.lists(st.tuples(st.integers(1, 300), st.integers(1, 40)), max_size=20), st.integers(0, 600))
def test_limits_stay_within_what_is_configured(steps: list[tuple[int, int]], good: int) -> None:
    limits = StepLimits(step_tokens=200, max_running=32)
    for num_tokens, num_sequences in steps:
        limits.lower(min(num_tokens, limits.step_tokens), min(num_sequences, num_tokens, limits.max_running))
        for _ in range(good):
            limits.observe_step()
        assert 1 <= limits.step_tokens <= 200 and 1 <= limits.max_running <= 32


@pytest.mark.parametrize(
    "error",
    [MemoryError(), torch.OutOfMemoryError("CUDA out of memory"), None],
    ids=["python", "accelerator", "a real one"],
)
def test_what_torch_says_of_memory_is_understood(error: Exception | None) -> None:
    def run_short() -> None:
        with errors_told():
            if error is not None:
                raise error
            torch.empty(1 << 60)

    with pytest.raises(MemoryShortageError):
        run_short()
    with pytest.raises(RuntimeError, match="shape"), errors_told():
        torch.zeros(2) @ torch.zeros(3, 1, 1, 5).reshape(7)


def test_the_fake_engine_can_be_short_of_memory_too() -> None:
    requests = [request(f"r{i}", [i], 30) for i in range(30)]
    expected = list(FakeEngine(None).run(requests))
    engine = FakeEngine(None, max_running=16, step_tokens=20, faults=Faults.parse("oom:3"))
    assert list(engine.run(requests)) == expected
    assert engine.stats().shortages >= 3


def test_faults_of_the_fake_engine_are_read_by_name() -> None:
    assert Faults.parse("") == Faults() and Faults.parse("oom:8;nan:bad;hang:5;gpu:6") == Faults(
        oom=8, nan="bad", hang=5, gpu=6
    )
    for text in ("oom", "oom:x", "nap:3", "die:"):
        with pytest.raises(ConfigError, match="fault"):
            Faults.parse(text)
    spoilt, fine = FakeEngine(None, faults=Faults.parse("nan:7")).run([request("a", [7], 5), request("b", [8], 5)])
    assert (spoilt.finish_reason, spoilt.error_code) == (FinishReason.ERROR, "invalid_logits")
    assert fine.finish_reason is not FinishReason.ERROR
