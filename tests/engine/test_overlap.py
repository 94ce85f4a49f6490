"""Steps that are launched before the last one was read give what reading each first gives."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.config import EngineConfig
from engine.engine import Engine
from engine.errors import DeviceError, MemoryShortageError
from engine.request import FinishReason, Request, SamplingParams
from engine.runner import ModelRunner
from engine.sched.plan import PLACEHOLDER, StepPlan, StepResult
from tests.engine.oracle import OracleRunner, answer, request


class Done(NamedTuple):
    runner: Launching
    step: int
    found: StepResult

    def result(self) -> StepResult:
        assert self.runner.unread.pop(0) == self.step, "steps are read in order"
        return self.found


class Launching(OracleRunner):
    """Computes at once and tells when it is asked."""

    overlaps = True
    most_unread = 0
    shortages: frozenset[int] = frozenset()

    def __init__(self, *arguments: object, **more: object) -> None:
        super().__init__(*arguments, **more)
        self.unread: list[int] = []

    def launch(self, plan: StepPlan) -> Done:
        if plan.num_tokens > 1 and plan.step in self.shortages:
            self.last_step = plan.step
            raise MemoryShortageError("A step needs more memory than there is.")
        found = self.execute(plan)
        self.unread.append(plan.step)
        self.most_unread = max(self.most_unread, len(self.unread))
        return Done(self, plan.step, found)


def overlapped(runner: Launching, **changes: object) -> Engine:
    return Engine(EngineConfig(model="", block_tokens=4, **{"step_tokens": 24, **changes}), runner=runner)


def some_requests(count: int) -> list[Request]:
    return [request(f"r{i}", [1 + i % 9] * (1 + 5 * i % 17), 1 + i % 9, seed=i) for i in range(count)]


@settings(max_examples=30, deadline=None)
@given(
    count=st.integers(1, 24),
    num_blocks=st.integers(8, 40),
    shortages=st.frozensets(st.integers(0, 60), max_size=8),
    aborts=st.dictionaries(st.integers(0, 30), st.integers(0, 23), max_size=4),
)
def test_answers_are_the_same(count: int, num_blocks: int, shortages: frozenset[int], aborts: dict[int, int]) -> None:
    """Whatever ends, runs short or is preempted between launching a step and reading it."""
    runner = Launching(4, num_blocks)
    runner.shortages = shortages
    engine = overlapped(runner)
    made = {one.id: one for one in some_requests(count)}
    for one in made.values():
        engine.add(one)
    done = {}
    step = 0
    while engine.has_work():
        if step in aborts:
            engine.abort(f"r{aborts[step]}")
        done |= {one.request_id: one for one in engine.step().completions}
        step += 1
        assert step < 5000
    assert not runner.unread
    for name, one in made.items():
        tokens, reason = answer(one)
        if done[name].finish_reason is FinishReason.ABORT:
            assert int(name[1:]) in aborts.values()
            assert list(done[name].token_ids) == tokens[: len(done[name].token_ids)]
        else:
            assert (list(done[name].token_ids), done[name].finish_reason) == (tokens, reason)
    engine.scheduler.check_integrity()


def test_one_step_runs_while_the_next_is_planned() -> None:
    runner = Launching(4, 64)
    list(overlapped(runner).run(some_requests(12)))
    assert runner.most_unread == 2
    runner = Launching(4, 64)
    list(overlapped(runner, overlap=False).run(some_requests(12)))
    assert runner.most_unread == 0


def test_an_id_may_come_again_after_a_drop() -> None:
    engine = overlapped(Launching(4, 64))
    run = engine.run(request(f"r{i}", [3, i], 9, ignore_eos=True) for i in range(4))
    assert next(run).request_id == "r0"
    run.close()
    (again,) = engine.run([request("r3", [5, 5], 4)])
    assert (list(again.token_ids), again.finish_reason) == answer(request("r3", [5, 5], 4))


def test_a_gpu_that_fails_ends_the_engine() -> None:
    class Failing(Launching):
        def launch(self, plan: StepPlan) -> Done:
            if plan.step == 2:
                raise DeviceError("The GPU failed in the middle of a step: CUDA error.")
            return super().launch(plan)

    engine = overlapped(Failing(4, 64))
    with pytest.raises(DeviceError):
        list(engine.run(some_requests(3)))


def test_a_real_model_gives_the_same_tokens(tiny_model: Path) -> None:
    """Greedy, drawn, with penalties (which wait for the last step's token) and with ends that must wait."""
    kinds = [
        {"temperature": 0.0},
        {"temperature": 0.9, "seed": 4},
        {"temperature": 0.8, "seed": 5, "presence_penalty": 0.7, "frequency_penalty": 0.3},
        {"temperature": 0.0, "repetition_penalty": 1.3, "logprobs": 2},
        {"temperature": 1.0, "seed": 6, "top_k": 20, "top_p": 0.9, "min_tokens": 5},
    ]
    requests = [
        Request(id=f"r{i}", prompt_ids=list(range(5 + i, 40 + 3 * i)), params=SamplingParams(max_tokens=9, **kind))
        for i, kind in enumerate(kinds * 2)
    ]
    unread = []

    class Watched(ModelRunner):
        def _launch(self, plan: StepPlan):
            unread.append(sum(PLACEHOLDER in chunk.token_ids for chunk in plan.chunks))
            return super()._launch(plan)

    found = []
    for overlap in (False, True):
        config = EngineConfig(
            model=str(tiny_model), weight_format="float32", kv_format="float32", num_blocks=64, max_running=6,
            overlap=overlap, spec="off", threads=1, device="cpu",
        )  # fmt: skip
        unread.clear()
        found.append(list(Engine(config, runner=Watched(config)).run(requests)))
        assert (max(unread) > 0) == overlap
    for one, other in zip(*found, strict=True):
        assert one.token_ids == other.token_ids
        told, again = ([known.logprob for known in done.logprobs or ()] for done in (one, other))
        assert told == pytest.approx(again, abs=1e-4), "sums depend a little on what else is in the batch"
