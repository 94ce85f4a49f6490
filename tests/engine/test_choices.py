"""Several answers to one prompt: computed once, each with its own draws, in order, alone as in company."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.config import EngineConfig
from engine.engine import Engine
from engine.fake import FakeEngine
from engine.request import Begun, Completion, Request, SamplingParams
from tests.engine.oracle import OracleRunner, next_token
from tests.tiny import make_tiny_model
from workers.generated import Growing

PROMPT = [7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21, 22, 23, 24, 25, 26, 27]
GREEDY = SamplingParams(max_tokens=12, temperature=0)
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
    config = EngineConfig(model=str(model), num_blocks=200, threads=1, poison=True, reproducible=True, spec="off")
    engine = Engine(config)
    yield engine
    engine.close()


def params(**changes: object) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 12, "temperature": 1.0, "seed": 3, "ignore_eos": True, **changes})


def run(engine: Engine | FakeEngine, *requests: Request) -> list[Completion]:
    return list(engine.run(requests))


def run_and_save(engine: Engine | FakeEngine, request: Request) -> tuple[Completion, list[tuple[Begun, ...]]]:
    """Its end, and what a worker would have saved of it after each step."""
    engine.add(request)
    growing, begun = Growing(0), []
    while True:
        output = engine.step()
        growing.add(output.tokens_of(request.id))
        if output.completions:
            return output.completions[0], begun
        begun.append(growing.so_far().answers)


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


@pytest.mark.parametrize("asked", [{}, EXTRA, {"grammar": '{"regex":"[a-z ]{3,20}"}', "logprobs": 20}], ids=str)
def test_answers_cut_off_at_any_step_end_as_if_they_had_not_been(engine: Engine, asked: dict[str, object]) -> None:
    """All of them at once, each where it was: tokens, text, logprobs, ends and usage, bit for bit."""
    made = Request(id="r", prompt_ids=PROMPT, params=params(**asked, stop=("qu",)), salt=f"cut {asked}", n=3)
    whole, begun = run_and_save(engine, made)
    assert whole.usage.output_tokens > 12
    for step, answers in enumerate(begun):
        before = engine.stats().output_tokens
        (again,) = run(engine, replace(made, salt=f"again {asked} {step}", resume_choices=answers))
        assert again == whole
        saved = sum(len(answer.token_ids) for answer in answers)
        assert engine.stats().output_tokens - before == whole.usage.output_tokens - saved, "nothing is generated twice"


@settings(max_examples=40, deadline=None)
@given(
    prompt=st.lists(st.integers(1, 5), min_size=1, max_size=12),
    n=st.integers(2, 5),
    cuts=st.lists(st.integers(0, 12), max_size=5),
    max_tokens=st.integers(1, 12),
    num_blocks=st.integers(8, 30),
    max_running=st.integers(1, 6),
    prefix_cache=st.booleans(),
)
def test_answers_cut_off_anywhere_are_the_answers_in_any_pool(
    prompt: list[int], n: int, cuts: list[int], max_tokens: int, num_blocks: int, max_running: int, prefix_cache: bool
) -> None:
    def oracle() -> Engine:
        runner = OracleRunner(4, num_blocks, sample=lambda history, chunk: next_token([*history, chunk.choice], GREEDY))
        config = EngineConfig(
            model="", block_tokens=4, step_tokens=9, max_running=max_running, prefix_cache=prefix_cache
        )
        return Engine(config, runner=runner)

    made = Request(id="r", prompt_ids=prompt, params=replace(GREEDY, max_tokens=max_tokens), n=n)
    whole, begun = run_and_save(oracle(), made)
    last = begun[-1] if begun else ()
    cut = tuple(Begun(answer.token_ids[:size]) for answer, size in zip(last, cuts, strict=False))
    second = oracle()
    (again,) = run(second, replace(made, resume_choices=cut))
    assert replace(again, usage=whole.usage) == whole and again.usage.output_tokens == whole.usage.output_tokens
    assert second.stats().used_blocks == 0


@pytest.mark.parametrize(
    "asked", [{"logprobs": 2}, {}, {"grammar": '{"json":{"type":"object"}}', "logprobs": 1}], ids=str
)
def test_the_fake_engine_goes_on_with_all_answers(asked: dict[str, object]) -> None:
    made = Request(id="r", prompt_ids=PROMPT, params=params(**asked, max_tokens=9), n=3)
    whole, begun = run_and_save(FakeEngine(None, step_tokens=2), made)
    assert len(begun) > 3
    for answers in begun:
        engine = FakeEngine(None)
        assert run(engine, replace(made, resume_choices=answers)) == [replace(whole, usage=whole.usage)]
        saved = sum(len(answer.token_ids) for answer in answers)
        assert engine.stats().output_tokens == whole.usage.output_tokens - saved


def test_ids_of_others_are_never_those_of_answers(engine: Engine) -> None:
    counts = {"a": 2, "a~0": 1, "a~1": 1, "a0": 1}
    requests = [Request(id=name, prompt_ids=PROMPT, params=params(), n=n) for name, n in counts.items()]
    assert [done.request_id for done in run(engine, *requests)] == list(counts)


def test_the_hit_tokens_told_are_those_of_the_prompt(engine: Engine) -> None:
    """Not those of an answer that begins with the blocks of the first."""
    engine.add(Request(id="h", prompt_ids=PROMPT, params=params(), salt="hits", n=3))
    told = {}
    while engine.has_work():
        output = engine.step()
        told |= output.hit_tokens
        usages = [done.usage for done in output.completions]
    assert told == {"h": 0} and usages[0].hit_tokens == 0


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
