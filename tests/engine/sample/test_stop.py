"""Stop strings are found wherever tokens happen to be cut, and nothing of them leaks."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.sample.stop import StopMatcher


def run(stops: list[str], pieces: list[str]) -> tuple[str, str | None]:
    matcher = StopMatcher(stops)
    text = "".join(matcher.push(piece) for piece in pieces)
    return text + matcher.finish(), matcher.found


def by_characters(stops: list[str], text: str) -> tuple[str, str | None]:
    """The definition: read one character more at a time until a stop string is complete."""
    for end in range(1, len(text) + 1):
        complete = [stop for stop in stops if text[:end].endswith(stop)]
        if complete:
            longest = max(complete, key=len)
            return text[: end - len(longest)], longest
    return text, None


@pytest.mark.parametrize("stop", ["\n\nUser:", "###", "aab", "x"])
def test_every_split_of_text_and_stop(stop: str) -> None:
    text = "so aa it ends #" + stop + " never seen"
    for first in range(len(text) + 1):
        for second in range(first, len(text) + 1):
            pieces = [text[:first], text[first:second], text[second:]]
            assert run([stop], pieces) == by_characters([stop], text)


@settings(max_examples=500, deadline=None)
@given(
    stops=st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=4),
    text=st.text("abc", max_size=20),
    data=st.data(),
)
def test_the_result_depends_on_the_text_alone(stops: list[str], text: str, data: st.DataObject) -> None:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    pieces = [text[a:b] for a, b in pairwise([0, *cuts, len(text)])]
    assert run(stops, pieces) == by_characters(stops, text)


def test_only_what_may_begin_a_stop_is_held_back() -> None:
    matcher = StopMatcher(["END"])
    assert [matcher.push(piece) for piece in ("the E", "N", "d of EN")] == ["the ", "", "ENd of "]
    assert matcher.finish() == "EN"


def test_without_stops_text_passes_at_once() -> None:
    assert StopMatcher([]).push("anything") == "anything"


def test_after_the_stop_nothing_comes() -> None:
    matcher = StopMatcher(["."])
    assert (matcher.push("one. two"), matcher.push(" three"), matcher.finish()) == ("one", "", "")
