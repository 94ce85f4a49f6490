"""Several answers to one prompt: computed once, each with its own draws, in order, alone as in company."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from engine.config import EngineConfig
from engine.engine import Engine
from engine.fake import FakeEngine
from engine.request import Completion, Request, SamplingParams
from tests.tiny import make_tiny_model

PROMPT = [7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21, 22, 23, 24, 25, 26, 27]
EXTRA = {
    "min_p": 0.02,
    "presence_penalty": 0.5,
    "frequency_penalty": 0.4,
    "repetition_penalty": 1.2,
    "logit_bias": ((5, 3.0), (9, -100.0)),
    "logprobs": 3,
}


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    model = make_tiny_model(tmp_path_factory.mktemp("models") / "fused", hidden=128, mlp=192, heads=4, kv_heads=2)
    config = EngineConfig(model=str(model), num_blocks=200, threads=1, poison=True, reproducible=True)
    engine = Engine(config)
    yield engine
    engine.close()


def params(**changes: object) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 12, "temperature": 1.0, "seed": 3, "ignore_eos": True, **changes})


def run(engine: Engine | FakeEngine, *requests: Request) -> list[Completion]:
    return list(engine.run(requests))


def test_choices_are_those_of_single_requests_and_the_prompt_counts_once(engine: Engine) -> None:
    several = Request(id="many", prompt_ids=PROMPT, params=params(), salt="a", n=3)
    singles = [Request(id=f"one{k}", prompt_ids=PROMPT, params=params(), salt=f"s{k}", choice=k) for k in range(3)]
    before = engine.stats().computed_tokens
    (joined,) = run(engine, several)
    computed = engine.stats().computed_tokens - before
    assert [choice.text for choice in joined.choices] == [one.text for one in run(engine, *singles)]
    assert len({choice.text for choice in joined.choices}) == 3
    assert (joined.usage.prompt_tokens, joined.usage.output_tokens) == (len(PROMPT), 36)
    assert computed == len(PROMPT) + 3 * 11 + 2, "the prompt once; its last token again for each further choice"
    assert engine.num_unfinished() == 0


def test_a_row_with_everything_is_the_same_alone_and_in_company(engine: Engine) -> None:
    watched = Request(id="w", prompt_ids=PROMPT, params=params(**EXTRA), salt="w0", n=2)
    (alone,) = run(engine, watched)
    company = [
        Request(id=f"c{i}", prompt_ids=PROMPT[: 4 + i], params=params(seed=i, **(EXTRA if i % 2 else {})), salt=f"c{i}")
        for i in range(5)
    ]
    mixed = run(
        engine, *company[:3], Request(id="w2", prompt_ids=PROMPT, params=watched.params, salt="w1", n=2), *company[3:]
    )
    assert mixed[3].choices == alone.choices, "text and logprobs, bit for bit"
    assert all(choice.logprobs is not None for choice in alone.choices)


def test_logprobs_spell_the_text(engine: Engine) -> None:
    (found,) = run(engine, Request(id="l", prompt_ids=PROMPT, params=params(logprobs=2), salt="l"))
    assert found.logprobs is not None and len(found.logprobs) == 12
    assert b"".join(one.piece for one in found.logprobs).decode("utf-8", "replace") == found.text
    for one in found.logprobs:
        assert one.logprob <= one.top[0][1] <= 0.0
        assert len(one.top) == 2


def test_an_abort_ends_all_choices_at_once(engine: Engine) -> None:
    engine.add(Request(id="x", prompt_ids=PROMPT, params=params(max_tokens=200), salt="x", n=3))
    for _ in range(4):
        engine.step()
    engine.abort("x")
    ended = [completion for _ in range(3) for completion in engine.step().completions]
    assert [(one.request_id, str(one.finish_reason)) for one in ended] == [("x", "abort")]
    assert not engine.has_work()


def test_a_bias_for_an_unknown_token_is_refused_by_name(engine: Engine) -> None:
    (refused,) = run(engine, Request(id="b", prompt_ids=PROMPT, params=params(logit_bias=((999_999, 1.0),))))
    assert refused.error_code == "invalid_value"
    assert "token 999999" in str(refused.error_message)


def test_the_fake_engine_gives_the_same_choices_as_for_single_requests() -> None:
    engine = FakeEngine(None)
    several = Request(id="many", prompt_ids=PROMPT, params=params(logprobs=1), n=3)
    singles = [Request(id=f"one{k}", prompt_ids=PROMPT, params=params(logprobs=1), choice=k) for k in range(3)]
    (joined,) = run(engine, several)
    assert joined.choices == tuple(one.answers[0] for one in run(engine, *singles))
    assert joined.usage.output_tokens == 36
