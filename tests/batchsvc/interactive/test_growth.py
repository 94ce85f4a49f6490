"""Whatever of an answer was said before its end, with the rest it is the whole answer again."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from batchsvc.interactive.growth import Gathered, Growth
from engine.request import Choice, Completion, FinishReason, NewText, SpelledLogprob, Usage

LOGPROBS = st.lists(
    st.builds(SpelledLogprob, st.binary(max_size=3), st.floats(-9, 0, allow_nan=False), st.just(())), max_size=6
)


@st.composite
def answers(draw: st.DrawFn) -> tuple[Completion, list[NewText]]:
    """A completion of one or more answers, and the pieces in which some of each was said."""
    has_logprobs = draw(st.booleans())
    choices, said = [], []
    for number in range(draw(st.integers(1, 3))):
        text = draw(st.text(max_size=20))
        logprobs = tuple(draw(LOGPROBS)) if has_logprobs else None
        choices.append(Choice(text, draw(st.sampled_from([FinishReason.STOP, FinishReason.LENGTH])), logprobs, "x"))
        chars = sorted(draw(st.lists(st.integers(0, len(text)), max_size=4)))
        places = sorted(draw(st.lists(st.integers(0, len(logprobs or ())), min_size=len(chars), max_size=len(chars))))
        for start, end, first, last in zip([0, *chars], chars, [0, *places], places, strict=False):
            said.append(NewText(text[start:end], number, (logprobs or ())[first:last]))
    first_one = choices[0]
    whole = Completion(
        request_id="c", token_ids=(), text=first_one.text, finish_reason=first_one.finish_reason, usage=Usage(1, 0, 2),
        logprobs=first_one.logprobs, stopped_by="x", choices=tuple(choices) if len(choices) > 1 else (),
    )  # fmt: skip
    return whole, said


@given(answers())
def test_what_was_said_and_the_rest_are_the_whole(drawn: tuple[Completion, list[NewText]]) -> None:
    whole, said = drawn
    growth, gathered = Growth(), Gathered()
    for news in said:
        growth.add(news)
        gathered.add(news)
    rest = growth.rest_of(whole)
    assert gathered.whole_of(rest) == whole
    assert sum(len(one.text) for one in rest.answers) == sum(len(one.text) for one in whole.answers) - sum(
        len(news.text) for news in said
    ), "nothing is said twice"
