"""Messages between API and workers: whatever is said arrives as it was said."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchsvc.interactive import wire
from batchsvc.interactive.wire import Alive, Ended, Failed, Grown, NewCall, Taken
from engine.request import Choice, Completion, FinishReason, NewText, SpelledLogprob, Usage

numbers = st.floats(min_value=-100, max_value=0)
tokens = st.tuples(st.binary(max_size=6), numbers)
logprobs = st.builds(SpelledLogprob, st.binary(max_size=6), numbers, st.lists(tokens, max_size=2).map(tuple))
some_logprobs = st.lists(logprobs, max_size=3).map(tuple)
texts = st.builds(NewText, st.text(max_size=20), st.integers(0, 5), some_logprobs)
reasons = st.sampled_from([FinishReason.STOP, FinishReason.LENGTH])
choices = st.builds(
    Choice,
    st.text(max_size=20),
    reasons,
    st.none() | some_logprobs,
    st.none() | st.text(min_size=1) | st.integers(0, 9),
)


@given(st.lists(texts, max_size=4).map(tuple), st.integers(0, 9))
def test_texts_arrive(sent: tuple[NewText, ...], no: int) -> None:
    assert wire.decode_news(wire.encode_news(Grown("c", no, sent))) == Grown("c", no, sent)


@given(st.lists(choices, min_size=1, max_size=3), st.none() | st.text(max_size=9))
def test_answers_arrive(answers: list[Choice], fingerprint: str | None) -> None:
    first = answers[0]
    completion = Completion(
        request_id="c",
        token_ids=(1, 2),
        text=first.text,
        finish_reason=first.finish_reason,
        usage=Usage(7, 3, 2, 1),
        logprobs=first.logprobs,
        stopped_by=first.stopped_by,
        choices=tuple(answers) if len(answers) > 1 else (),
    )
    found = wire.decode_news(wire.encode_news(Ended("c", 4, completion, fingerprint)))
    assert isinstance(found, Ended) and (found.num_grown, found.fingerprint) == (4, fingerprint)
    assert list(found.completion.answers) == answers and found.completion.usage == Usage(7, 3, 2, 1)


def test_numbers_that_json_has_no_word_for() -> None:
    said = SpelledLogprob(b"\xff", -math.inf, ((b"a", math.nan),))
    (found,) = wire.decode_news(wire.encode_news(Grown("c", 0, (NewText("x", 0, (said,)),)))).texts[0].logprobs
    assert found.piece == b"\xff" and found.logprob < -1e8 and math.isnan(found.top[0][1])


@pytest.mark.parametrize(
    "news", [Taken("c", "w"), Failed("c", 400, "code", "Says.", "messages"), Alive("w", ("a", "b")), Alive("", ())]
)
def test_the_rest_arrives(news: wire.News) -> None:
    assert wire.decode_news(wire.encode_news(news)) == news


def test_a_call_arrives() -> None:
    call = NewCall(id="c", api="a", prompt_ids=[1, 2], params={"stop": ["x"]}, seed=2**62, salt="s", streams=True)
    assert wire.decode_call(wire.encode_call(call)) == call
