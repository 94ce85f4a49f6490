"""The real engine on a real decoder gives the same tokens cold, warm, partly warm, preempted, starved and chopped.

Weights and KV are float32 and freed blocks are poisoned with NaN, so a read of a wrong block can't go unseen. Salts
keep the caches of the cases apart, so that one engine serves them all. The tiny model's logits spread over several
units while float32 noise is near 1e-5: a close call, where tokens might rightly differ, does not occur here.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from itertools import count
from pathlib import Path

import pytest

from engine.config import EngineConfig
from engine.engine import Engine
from engine.request import Completion, FinishReason, Request, SamplingParams

BLOCK = 16
GREEDY = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)
DRAWN = SamplingParams(max_tokens=12, temperature=0.9, top_p=0.95, seed=5, ignore_eos=True)
BOUNDARIES = [edge + off for edge in (BLOCK, 2 * BLOCK, 4 * BLOCK) for off in (-1, 0, 1)]


def make_engine(model: Path, **changes: object) -> Engine:
    settings = {"num_blocks": 200, "block_tokens": BLOCK, "poison": True, "threads": 1, "spec": "off", **changes}
    return Engine(EngineConfig(model=str(model), weight_format="float32", kv_format="float32", **settings))


@pytest.fixture(scope="module")
def engine(tiny_model: Path) -> Iterator[Engine]:
    engine = make_engine(tiny_model)
    yield engine
    engine.close()


def prompt_of(size: int, seed: int = 0) -> list[int]:
    return random.Random(seed * 1000 + size).choices(range(3, 384), k=size)


numbers = count()


def request(prompt: list[int], params: SamplingParams = GREEDY, salt: str = "") -> Request:
    return Request(id=f"r{next(numbers)}", prompt_ids=prompt, params=params, salt=salt)


def run(engine: Engine, *requests: Request) -> list[Completion]:
    completions = list(engine.run(requests))
    assert all(c.finish_reason in (FinishReason.LENGTH, FinishReason.STOP) for c in completions), completions
    return completions


def tokens(completions: list[Completion]) -> list[tuple[int, ...]]:
    return [completion.token_ids for completion in completions]


@pytest.fixture(scope="module")
def plain(tiny_model: Path) -> Iterator[Engine]:
    """The definition: no cache, one request after the other, whole prompts at once."""
    engine = make_engine(tiny_model, prefix_cache=False, max_running=1)
    yield engine
    engine.close()


@pytest.mark.parametrize("params", [GREEDY, DRAWN], ids=["greedy", "drawn"])
@pytest.mark.parametrize("size", BOUNDARIES)
def test_cold_is_warm_is_partly_warm(engine: Engine, plain: Engine, size: int, params: SamplingParams) -> None:
    prompt, name = prompt_of(size), f"{size}{params.temperature}"
    expected = tokens(run(plain, request(prompt, params)))
    cold = run(engine, request(prompt, params, salt=name))
    assert cold[0].usage.hit_tokens == 0
    assert tokens(cold) == expected
    warm = run(engine, request(prompt, params, salt=name))
    assert (size - 1) // BLOCK * BLOCK <= warm[0].usage.hit_tokens < size
    assert tokens(warm) == expected
    for known in [known for known in BOUNDARIES if known <= size + 1]:
        salt = f"{name} after {known}"
        run(engine, request((prompt + prompt_of(9, seed=7))[:known], replace(GREEDY, max_tokens=1), salt=salt))
        partly = run(engine, request(prompt, params, salt=salt))
        assert partly[0].usage.hit_tokens >= min(known - 1, size - 1) // BLOCK * BLOCK
        assert tokens(partly) == expected


@pytest.mark.parametrize("params", [GREEDY, DRAWN], ids=["greedy", "drawn"])
def test_an_answer_is_a_good_prefix_too(engine: Engine, plain: Engine, params: SamplingParams) -> None:
    """A second turn of a conversation hits blocks that decoding wrote."""
    first = run(engine, request(prompt_of(27), replace(params, max_tokens=40), salt="turns"))[0]
    second = [*prompt_of(27), *first.token_ids, *prompt_of(5, seed=3)]
    (again,) = run(engine, request(second, params, salt="turns"))
    assert again.usage.hit_tokens >= 4 * BLOCK
    assert again.token_ids == run(plain, request(second, params))[0].token_ids


def family(size: int = 6) -> list[list[int]]:
    """Prompts that share prefixes of several lengths, with edges on and beside block boundaries."""
    stem = prompt_of(70, seed=1)
    cuts = [16, 17, 33, 48, 64, 70]
    return [stem[: cuts[i % len(cuts)]] + prompt_of(3 + 5 * i, seed=10 + i) for i in range(size)]


def test_preempted_at_every_step_the_tokens_are_the_same(engine: Engine, plain: Engine) -> None:
    prompts, params = family(3), [GREEDY, DRAWN, replace(GREEDY, max_tokens=7)]
    expected = tokens([run(plain, request(p, q))[0] for p, q in zip(prompts, params, strict=True)])
    preempted = 0
    for victim in range(3):
        for when in range(1, 15):
            salt = f"preempt {victim} {when}"
            requests = [request(p, q, salt) for p, q in zip(prompts, params, strict=True)]
            for item in requests:
                engine.add(item)
            done: dict[str, Completion] = {}
            for step in range(200):
                if step == when:
                    preempted += engine.scheduler.preempt(requests[victim].id)
                if not engine.has_work():
                    break
                done |= {c.request_id: c for c in engine.step().completions}
                engine.scheduler.check_integrity()
            assert [done[item.id].token_ids for item in requests] == expected
    assert preempted >= 25, "the victims must have been running, or nothing was tested"


@pytest.mark.parametrize(
    "limits",
    [
        {"num_blocks": 11},
        {"num_blocks": 11, "prefix_cache": False},
        {"num_blocks": 14, "step_tokens": 5},
        {"step_tokens": 1},
        {"step_tokens": 2},
        {"step_tokens": 7, "max_running": 2},
        {"block_tokens": 1, "num_blocks": 2000},
        {"block_tokens": 5, "num_blocks": 40},
        {"max_running": 1},
    ],
    ids=str,
)
def test_limits_change_the_schedule_and_never_the_tokens(
    tiny_model: Path, plain: Engine, limits: dict[str, int]
) -> None:
    """Small pools preempt and evict, small budgets chop prompts; each prompt comes twice, the second time warm."""
    prompts = family() + family()
    params = [GREEDY if i % 2 else replace(DRAWN, seed=i) for i in range(len(prompts))]
    expected = tokens([run(plain, request(p, q))[0] for p, q in zip(prompts, params, strict=True)])
    engine = make_engine(tiny_model, **limits)
    assert tokens(run(engine, *(request(p, q) for p, q in zip(prompts, params, strict=True)))) == expected
    engine.scheduler.check_integrity()
    engine.close()


def test_after_churn_of_many_pools_the_first_answers_come_again(tiny_model: Path, plain: Engine) -> None:
    """Canaries before and after the pool was filled and evicted dozens of times."""
    engine = make_engine(tiny_model, num_blocks=20, max_running=4)
    canaries = family(3)
    expected = tokens([run(plain, request(p))[0] for p in canaries])
    assert tokens(run(engine, *map(request, canaries))) == expected
    run(engine, *(request(prompt_of(40 + i % 60, seed=i), replace(GREEDY, max_tokens=2)) for i in range(120)))
    assert tokens(run(engine, *map(request, canaries))) == expected
    engine.close()


def test_projects_share_no_blocks_and_one_project_does(tiny_model: Path) -> None:
    prompt, engine = prompt_of(100, seed=77), make_engine(tiny_model)
    requests = [request(prompt, salt=salt) for salt in ("one", "two", "one", "two")]
    hits = {completion.request_id: completion.usage.hit_tokens for completion in run(engine, *requests)}
    found = {salt: sorted(hits[made.id] for made in requests if made.salt == salt) for salt in ("one", "two")}
    assert all(first == 0 and second >= 96 for first, second in found.values()), found
    engine.close()
