"""A step's result belongs to its sequence: neighbours, chunking, block order, poison and failures don't change it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine.request import SamplingParams
from engine.runner import ModelRunner
from engine.sched.plan import PLACEHOLDER, BlockCopy, StepPlan
from tests.engine.stepping import GREEDY, Stepper, make_runner


@pytest.fixture(scope="module")
def runner(tiny_model: Path) -> ModelRunner:
    return make_runner(tiny_model, poison=True)


def prompts_of(*sizes: int) -> list[list[int]]:
    random = torch.Generator().manual_seed(sum(sizes))
    return [torch.randint(3, 384, (size,), generator=random).tolist() for size in sizes]


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    sizes=st.lists(st.integers(1, 90), min_size=1, max_size=6),
    chunks=st.lists(st.integers(1, 40), min_size=1, max_size=4),
    seed=st.integers(0, 9),
)
def test_paged_and_batched_equals_alone_at_once(
    runner: ModelRunner, sizes: list[int], chunks: list[int], seed: int
) -> None:
    """All memory is poisoned first: the unwritten rest of a block, padding and freed blocks must never count."""
    prompts = prompts_of(*sizes)
    runner.pool.poison(range(runner.num_blocks))
    together = Stepper(runner, prompts, seed=seed).logits(chunks)
    for prompt, got in zip(prompts, together, strict=True):
        (alone,) = Stepper(runner, [prompt]).logits([len(prompt)])
        torch.testing.assert_close(got, alone, atol=2e-5, rtol=1e-5)


def test_generated_tokens_do_not_depend_on_the_batch(runner: ModelRunner) -> None:
    prompts = prompts_of(5, 40, 17, 3, 64)
    for params in (GREEDY, SamplingParams(max_tokens=64, temperature=1.0, seed=3)):
        together = Stepper(runner, prompts, room=20).generate(20, params=params, chunk=7)
        alone = [Stepper(runner, [p], room=20).generate(20, params=params)[0] for p in prompts]
        assert together == alone


def test_bf16_stays_close(tiny_model: Path) -> None:
    (prompt,) = prompts_of(100)
    (exact,) = Stepper(make_runner(tiny_model), [prompt]).logits([100])
    (rough,) = Stepper(make_runner(tiny_model, weight_format="bf16", kv_format="bf16"), [prompt]).logits([100])
    assert (rough - exact).abs().max() < 0.5
    assert (rough - exact).abs().mean() < 0.05


def test_a_placeholder_is_the_token_sampled_before(runner: ModelRunner) -> None:
    prompts = prompts_of(9, 20)
    plain = Stepper(runner, prompts, room=3).generate(3)
    ahead = Stepper(runner, prompts, room=3)
    result = runner.execute(StepPlan(step=0, chunks=(ahead.chunk(0, 9), ahead.chunk(1, 20))))
    assert result.sampled == {"0": (plain[0][0],), "1": (plain[1][0],)}
    for step in (1, 2):
        for tokens in ahead.tokens:
            tokens.append(PLACEHOLDER)
        result = runner.execute(StepPlan(step=step, chunks=(ahead.chunk(1, 1), ahead.chunk(0, 1))))
        assert result.sampled == {"0": (plain[0][step],), "1": (plain[1][step],)}


def test_not_a_number_fails_its_own_sequence_alone(runner: ModelRunner) -> None:
    prompts = prompts_of(20, 20, 20)
    sound = Stepper(runner, prompts, room=2).generate(2)
    stepper = Stepper(runner, prompts, room=2)
    runner.execute(StepPlan(step=0, chunks=tuple(stepper.chunk(i, 19) for i in range(3))))
    broken = stepper.blocks[1][:1]
    result = runner.execute(StepPlan(step=1, chunks=tuple(stepper.chunk(i, 1) for i in range(3)), freed_blocks=broken))
    assert set(result.failed) == {"1"}
    assert result.sampled == {"0": (sound[0][0],), "2": (sound[2][0],)}
    for tokens in stepper.tokens:
        tokens.append(PLACEHOLDER)
    after = runner.execute(StepPlan(step=2, chunks=tuple(stepper.chunk(i, 1) for i in range(3))))
    assert after.failed == result.failed, "a step scheduled before the failure was known fails the same way"
    assert after.sampled == {"0": (sound[0][1],), "2": (sound[2][1],)}


def test_a_copied_block_is_as_good_as_the_first(runner: ModelRunner) -> None:
    """Copy-on-write: sequence 1 goes on from a copy of sequence 0's half-full block, then both write their own."""
    prompt, other = prompts_of(24, 30)
    other[:20] = prompt[:20]
    expected = [Stepper(runner, [p], room=1).generate(1)[0] for p in (prompt, other)]
    stepper = Stepper(runner, [prompt, other], room=1)
    runner.execute(StepPlan(step=0, chunks=(stepper.chunk(0, 20),)))
    stepper.computed[1] = 20
    first, second = stepper.blocks
    copies = tuple(BlockCopy(source=a, target=b) for a, b in zip(first[:2], second[:2], strict=True))
    result = runner.execute(StepPlan(step=1, chunks=(stepper.chunk(0, 4), stepper.chunk(1, 10)), copies=copies))
    assert [list(result.sampled[name]) for name in ("0", "1")] == expected


def test_several_rows_of_a_chunk_are_sampled_at_their_own_positions(runner: ModelRunner) -> None:
    """As verifying a draft needs: each row's draw is that of decoding one by one."""
    params = SamplingParams(max_tokens=8, temperature=1.0, seed=11)
    (prompt,) = prompts_of(10)
    (answer,) = Stepper(runner, [prompt], room=5).generate(5, params=params)
    stepper = Stepper(runner, [prompt + answer[:4]], room=5)
    stepper.num_prompt = [10]
    chunk = replace(stepper.chunk(0, 14, params=params), logit_rows=(9, 10, 11, 12, 13), num_draft=4)
    assert runner.execute(StepPlan(step=0, chunks=(chunk,))).sampled == {"0": tuple(answer)}


def test_ends_of_answer_wait_for_min_tokens(runner: ModelRunner) -> None:
    (prompt,) = prompts_of(12)
    (free,) = Stepper(runner, [prompt], room=6).generate(6)
    stops = tuple(token for token in range(384) if token % 2 == free[0] % 2)
    params = SamplingParams(max_tokens=6, min_tokens=3, temperature=0, stop_token_ids=stops)
    (held,) = Stepper(runner, [prompt], room=6).generate(6, params=params)
    assert not set(held[:3]) & {*stops, *runner.eos_ids}
    (late,) = Stepper(runner, [prompt], room=1).generate(1, params=replace(params, min_tokens=0))
    assert late == free[:1]
