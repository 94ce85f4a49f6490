"""A request's tokens are the same, bit for bit, alone and in any company, cold and cached, chopped and preempted."""

from __future__ import annotations

import random
from itertools import count
from pathlib import Path

import pytest

from engine.config import EngineConfig
from engine.engine import Engine
from engine.request import Request, SamplingParams
from engine.runner import ModelRunner
from tests.tiny import make_tiny_model

NUM_BATCHES = 64
STEM = random.Random(1).choices(range(3, 384), k=70)  # more than a chunk of keys, so that groups share it
PARAMS = (
    SamplingParams(max_tokens=20, temperature=0, ignore_eos=True),
    SamplingParams(max_tokens=20, temperature=1.0, top_p=0.9, seed=3, ignore_eos=True),
)
numbers = count()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of the shape that the fused CPU kernels serve."""
    return make_tiny_model(tmp_path_factory.mktemp("models") / "fused", hidden=128, mlp=192, heads=4, kv_heads=2)


def make_engine(model: Path, weight_format: str, **changes: int) -> Engine:
    settings = {"num_blocks": 400, "threads": 2, "poison": True, **changes}
    config = EngineConfig(model=str(model), weight_format=weight_format, reproducible=True, **settings)
    runner = ModelRunner(config)
    assert runner.kernels.is_fused, "this test is about the fused kernels"
    return Engine(config, runner=runner)


def prompt_of(rng: random.Random) -> list[int]:
    own = rng.choices(range(3, 384), k=rng.randint(1, 90))
    return STEM[: rng.choice((0, 20, 64, 70))] + own


def tokens(engine: Engine, wanted: list[tuple[list[int], SamplingParams]], salt: str) -> list[tuple[int, ...]]:
    requests = [
        Request(id=f"r{next(numbers)}", prompt_ids=prompt, params=params, salt=salt) for prompt, params in wanted
    ]
    found = {completion.request_id: completion.token_ids for completion in engine.run(requests)}
    return [found[request.id] for request in requests]


@pytest.mark.parametrize("weight_format", ["int8", "bf16"])
def test_the_same_tokens_alone_and_in_random_company(model: Path, weight_format: str) -> None:
    rng = random.Random(7)
    watched = [(prompt_of(rng), params) for params in PARAMS for _ in range(4)]
    large, small = make_engine(model, weight_format), make_engine(model, weight_format, num_blocks=30, step_tokens=48)
    alone = [tokens(large, [one], f"alone{i}")[0] for i, one in enumerate(watched)]
    assert len(set(alone)) == len(alone), "a test on equal answers shows nothing"
    for number in range(NUM_BATCHES):
        company = [(prompt_of(rng), rng.choice(PARAMS)) for _ in range(rng.randint(0, 9))]
        mine = rng.sample(range(len(watched)), rng.randint(1, len(watched)))
        mixed = [watched[i] for i in mine] + company
        order = rng.sample(range(len(mixed)), len(mixed))
        salt = "warm" if number % 2 else f"cold{number}"
        engine = small if number % 3 == 0 else large
        found = dict(zip(order, tokens(engine, [mixed[at] for at in order], salt), strict=True))
        assert [found[at] for at in range(len(mine))] == [alone[i] for i in mine], f"batch {number}"
    large.close()
    small.close()
