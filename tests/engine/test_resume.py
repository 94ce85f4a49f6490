"""A request that resumes what an earlier run generated ends as if it had never been interrupted, and wastes nothing."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.config import EngineConfig
from engine.engine import Engine
from engine.fake import FakeEngine
from engine.request import Completion, FinishReason, Request, SamplingParams
from engine.text import load_text
from tests.engine.oracle import EOS, OracleRunner, answer, request

DRAWN = SamplingParams(max_tokens=40, temperature=0.9, top_p=0.95, seed=11)
CASES = {
    "greedy": SamplingParams(max_tokens=40, temperature=0, ignore_eos=True),
    "drawn": DRAWN,
    "another seed": replace(DRAWN, seed=2**62 + 1),
    "min_tokens": replace(DRAWN, temperature=2.0, top_p=1.0, min_tokens=25),
    "top_k": replace(DRAWN, top_k=3, ignore_eos=True),
}


def one(engine: Any, made: Request) -> Completion:
    (completion,) = engine.run([made])
    return completion


@pytest.fixture(scope="module")
def engine(tiny_model: Path) -> Engine:
    config = EngineConfig(
        model=str(tiny_model), weight_format="float32", kv_format="float32", num_blocks=200, poison=True, threads=1
    )
    return Engine(config)


@pytest.mark.parametrize("name", CASES)
def test_the_real_engine_goes_on_where_another_was_cut_off(engine: Engine, name: str) -> None:
    """At every cut the rest is the same, byte for byte: tokens, text, end and usage."""
    params = CASES[name]
    prompt = list(range(20, 49))
    whole = one(engine, Request(id="whole", prompt_ids=prompt, params=params, salt=name))
    assert whole.finish_reason in (FinishReason.STOP, FinishReason.LENGTH) and len(whole.token_ids) >= 8
    before = engine.stats().output_tokens
    for cut in (1, 2, len(whole.token_ids) // 2, len(whole.token_ids) - 1, len(whole.token_ids)):
        made = Request(
            id=f"cut{cut}",
            prompt_ids=prompt,
            params=params,
            salt=f"{name} {cut}",
            resume_ids=whole.token_ids[:cut],
            resume_hit_tokens=whole.usage.hit_tokens,
        )
        assert one(engine, made) == replace(whole, request_id=made.id)
        generated = engine.stats().output_tokens - before
        assert generated == len(whole.token_ids) - cut, "what is resumed isn't generated again"
        before = engine.stats().output_tokens


def test_stop_strings_count_across_the_cut(engine: Engine) -> None:
    prompt, params = [5, 6, 7, 8], replace(DRAWN, ignore_eos=True)
    text = one(engine, Request(id="free", prompt_ids=prompt, params=params)).text
    stopping = replace(params, stop=(text[9:13], "not in it"))
    whole = one(engine, Request(id="whole", prompt_ids=prompt, params=stopping))
    assert whole.finish_reason is FinishReason.STOP and text.startswith(whole.text) and len(whole.text) <= 9
    for cut in range(len(whole.token_ids) + 1):
        made = Request(id="cut", prompt_ids=prompt, params=stopping, resume_ids=whole.token_ids[:cut])
        assert replace(one(engine, made), usage=whole.usage) == replace(whole, request_id="cut")


def test_several_resume_among_new_ones_in_a_pool_that_preempts(tiny_model: Path, engine: Engine) -> None:
    config = EngineConfig(
        model=str(tiny_model), weight_format="float32", kv_format="float32", num_blocks=14, step_tokens=9, threads=1,
        spec="off",
    )  # fmt: skip
    requests = [
        Request(id=f"r{i}", prompt_ids=list(range(10, 30 + i)), params=replace(DRAWN, seed=i, ignore_eos=True))
        for i in range(8)
    ]
    whole = list(engine.run(requests))
    cut = [
        replace(made, resume_ids=done.token_ids[: 7 * i % 40])
        for i, (made, done) in enumerate(zip(requests, whole, strict=True))
    ]
    small = Engine(config)
    assert [c.token_ids for c in small.run(cut)] == [c.token_ids for c in whole]
    assert small.stats().preemptions > 0, "or nothing was tested"


@settings(max_examples=60, deadline=None)
@given(
    prompt=st.lists(st.integers(1, 40), min_size=1, max_size=12),
    max_tokens=st.integers(1, 24),
    min_tokens=st.integers(0, 24),
    cut=st.integers(0, 24),
    step_tokens=st.integers(1, 9),
    seed=st.integers(0, 5),
)
def test_any_cut_of_any_answer_gives_the_answer(
    prompt: list[int], max_tokens: int, min_tokens: int, cut: int, step_tokens: int, seed: int
) -> None:
    made = request("r", prompt, max_tokens, min_tokens=min(min_tokens, max_tokens), seed=seed)
    expected, reason = answer(made)
    engine = Engine(
        EngineConfig(model="", block_tokens=4, step_tokens=step_tokens, max_running=4), runner=OracleRunner(4, 64)
    )
    done = one(engine, replace(made, resume_ids=expected[:cut]))
    assert (list(done.token_ids), done.finish_reason) == (expected, reason)
    assert engine.stats().output_tokens == max(len(expected) - cut, 0)
    assert not engine.has_work() and engine.num_unfinished() == 0


def test_resumed_ids_beyond_an_end_are_cut_off() -> None:
    """A save may be one step later than the end that nobody could note any more."""
    engine = Engine(EngineConfig(model="", block_tokens=4), runner=OracleRunner(4, 64))
    made = replace(request("r", [3], 9), resume_ids=(7, EOS, 8))
    done = one(engine, made)
    assert (done.token_ids, done.finish_reason) == ((7, EOS), FinishReason.STOP)


def test_a_step_tells_the_hit_tokens_with_a_first_token() -> None:
    engine = Engine(EngineConfig(model="", block_tokens=4), runner=OracleRunner(4, 64))
    one(engine, request("a", [3] * 9, 3, ignore_eos=True))
    engine.add(request("b", [3] * 9, 3, ignore_eos=True))
    told = []
    while engine.has_work():
        output = engine.step()
        told.append(output.hit_tokens)
        hit_tokens = [completion.usage.hit_tokens for completion in output.completions]
    assert told == [{"b": 8}, {}, {}] and hit_tokens == [8]


@pytest.mark.parametrize(
    "params", [{}, {"stop": ("river", "ember")}, {"min_tokens": 30}, {"ignore_eos": True}], ids=str
)
def test_the_fake_engine_resumes_and_testifies_what_it_generated(tmp_path: Path, params: dict[str, Any]) -> None:
    made = request("r", [4, 5, 6], 60, seed=3, **params)
    whole = one(FakeEngine(None), made)
    for cut in range(len(whole.token_ids) + 1):
        witness = tmp_path / f"witness{cut}"
        engine = FakeEngine(None, witness=witness, step_tokens=7)
        assert one(engine, replace(made, resume_ids=whole.token_ids[:cut])) == whole
        engine.close()
        entries = [json.loads(line) for line in witness.read_text().splitlines()]
        generated = sum(sum(e["tokens"].values()) for e in entries if e["event"] == "tokens")
        assert generated == len(whole.token_ids) - cut == engine.stats().output_tokens


def test_a_fake_engine_that_is_given_another_answer_says_so(tiny_model: Path) -> None:
    engine = FakeEngine(load_text(tiny_model))
    engine.add(replace(request("r", [4, 5, 6], 60), resume_ids=(1, 2, 3)))
    with pytest.raises(AssertionError, match="another answer"):
        engine.step()
