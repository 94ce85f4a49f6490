"""Streamed requests: what a step says of the text is what the completion will say, never more, and soon all of it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.answer import Answer
from engine.config import EngineConfig
from engine.engine import Engine
from engine.fake import FakeEngine
from engine.request import Completion, FinishReason, Request, SamplingParams, StepOutput, TokenLogprobs
from engine.text import TextModel, load_text
from tests.engine.oracle import OracleRunner
from tests.tiny import make_tiny_model


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> TextModel:
    return load_text(make_tiny_model(tmp_path_factory.mktemp("streamed")))


def request(**changes: Any) -> Request:
    params = SamplingParams(**({"max_tokens": 30, "temperature": 0.0} | changes.pop("params", {})))
    return Request(id="r", prompt_ids=[5, 6, 7], params=params, streams=True, **changes)


def check(outputs: list[StepOutput]) -> Completion:
    """Holds what was said against the end; gives that."""
    (done,) = [completion for output in outputs for completion in output.completions]
    for choice, answer in enumerate(done.answers):
        news = [one for output in outputs for one in output.texts.get("r", []) if one.choice == choice]
        told = [found for one in news for found in one.logprobs]
        assert answer.text.startswith("".join(one.text for one in news))
        assert list(answer.logprobs or ())[: len(told)] == told
    return done


@given(
    ids=st.lists(st.integers(0, 383), min_size=1, max_size=25),
    stops=st.lists(st.text("abe rt", min_size=1, max_size=3), max_size=2),
    min_tokens=st.integers(0, 5),
    end=st.none() | st.integers(0, 383),
)
def test_what_is_taken_is_the_beginning_of_the_answer(
    text: TextModel, ids: list[int], stops: list[str], min_tokens: int, end: int | None
) -> None:
    params = {"stop": tuple(stops), "stop_token_ids": (end,) if end is not None else (), "logprobs": 1}
    asked = request(params=params | {"max_tokens": 64, "min_tokens": min_tokens})
    answer = Answer(asked, text, frozenset({2}))
    taken, logprobs = "", []
    for token_id in ids:
        answer.note(TokenLogprobs(token_id, -0.5, ((token_id, -0.5),)))
        if answer.push(token_id) is not None:
            break
        news = answer.take()
        if news is not None:
            taken += news.text
            logprobs += news.logprobs
    whole = answer.text()
    assert whole.startswith(taken)
    found = answer.logprobs(whole)
    assert found is not None and list(found)[: len(logprobs)] == logprobs


def test_without_stop_strings_nothing_is_held_back_but_halves_of_characters(text: TextModel) -> None:
    answer = Answer(request(), text, frozenset({2}))
    ids = text.tokenizer.encode("a parcel 雪 late")
    pieces = []
    for token_id in ids:
        answer.push(token_id)
        news = answer.take()
        pieces.append(news.text if news else "")
    assert "".join(pieces) == "a parcel 雪 late" and "雪" in pieces


@pytest.mark.parametrize("changes", [{}, {"n": 3}, {"params": {"logprobs": 2}}, {"params": {"stop": (" r", "e")}}])
def test_the_engine_without_weights_streams_as_others_do(text: TextModel, changes: dict[str, Any]) -> None:
    engine = FakeEngine(text, step_tokens=3)
    engine.add(request(**changes))
    outputs = []
    while engine.has_work():
        outputs.append(engine.step())
    done = check(outputs)
    assert done.finish_reason in (FinishReason.STOP, FinishReason.LENGTH)
    if "params" not in changes:
        assert sum(bool(output.texts) for output in outputs) > 2


@pytest.mark.parametrize("changes", [{}, {"n": 3}, {"params": {"logprobs": 1}}, {"params": {"stop": ("e",)}}])
def test_the_engine_streams_what_it_ends_with(text: TextModel, changes: dict[str, Any]) -> None:
    runner = OracleRunner(4, 64, vocab_size=text.meta.vocab_size, eos_ids=text.meta.eos_ids)
    config = EngineConfig(model="", block_tokens=4, step_tokens=32, max_running=8)
    engine = Engine(config, runner=runner, text=text)
    engine.add(request(**changes))
    engine.add(replace(request(), id="other", streams=False))
    outputs = []
    while engine.has_work():
        outputs.append(engine.step())
    assert all("other" not in output.texts for output in outputs)
    mine = [replace(output, completions=[c for c in output.completions if c.request_id == "r"]) for output in outputs]
    done = check(mine)
    assert any(output.texts for output in outputs) or len(done.text) < 2


def test_requests_that_do_not_stream_say_nothing(text: TextModel) -> None:
    engine = FakeEngine(text, step_tokens=3)
    engine.add(Request(id="r", prompt_ids=[5], params=SamplingParams(max_tokens=9)))
    while engine.has_work():
        assert engine.step().texts == {}
