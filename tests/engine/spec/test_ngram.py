"""The look-up finds what a search through the whole text finds, grows by a token at a time, and stays linear."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from engine.cache.sequence import Sequence as RunningSequence
from engine.spec.ngram import MOST_MATCH, MOST_PLACES, NgramProposer, PairIndex, continued
from tests.engine.oracle import request

texts = st.lists(st.integers(0, 3), max_size=80)


def searched(tokens: Sequence[int]) -> tuple[int, int]:
    """Of the latest places where the last two tokens stand the one where most match, the latest of equals."""
    end = len(tokens) - 1
    places = [at for at in range(end - 1, 0, -1) if list(tokens[at - 1 : at + 1]) == list(tokens[end - 1 :])]
    found = (-1, 0)
    for at in places[:MOST_PLACES]:
        length = next(n for n in range(at + 2) if n > at or tokens[at - n] != tokens[end - n])
        if min(length, MOST_MATCH) > found[1]:
            found = (at, min(length, MOST_MATCH))
    return found


@given(texts, st.lists(st.integers(0, 80), max_size=5))
def test_the_place_is_that_of_a_search(tokens: list[int], stops: list[int]) -> None:
    index = PairIndex()
    for stop in sorted(stops):  # the text grows in pieces
        index.extend(tokens[:stop])
        assert index.match(tokens[:stop]) == searched(tokens[:stop])
    index.extend(tokens)
    assert index.match(tokens) == searched(tokens)


def test_the_longest_match_counts_then_the_latest() -> None:
    index, tokens = PairIndex(), [9, 1, 2, 50, 3, 1, 2, 60, 9, 1, 2]
    index.extend(tokens)
    assert index.match(tokens) == (2, 3)
    index, tokens = PairIndex(), [1, 2, 50, 1, 2, 60, 1, 2]
    index.extend(tokens)
    assert index.match(tokens) == (4, 2)


def test_of_a_frequent_pair_only_the_latest_places_are_looked_at() -> None:
    index, tokens = PairIndex(), [7, 1, 2] + [0, 1, 2] * MOST_PLACES + [7, 1, 2]
    index.extend(tokens)
    assert index.match(tokens)[1] == 2


@given(texts.filter(bool), st.data())
def test_what_is_copied_is_what_an_endless_period_gives(tokens: list[int], data: st.DataObject) -> None:
    start = data.draw(st.integers(0, len(tokens) - 1))
    count = data.draw(st.integers(0, 30))
    period = tokens[start:]
    assert continued(tokens, start, count) == tuple((period * (count + 1))[:count])


def test_each_text_is_looked_up_in_itself_and_surer_along_the_way() -> None:
    proposer = NgramProposer()
    first = RunningSequence(request("a", [5, 6, 7, 8, 9, 5, 6]), 0, 99)
    second = RunningSequence(request("b", [5, 6]), 1, 99)
    sure, unsure = proposer.look([first, second], [20, 9])
    assert list(sure) == sorted(sure) and (sure[0], len(sure)) == (0, 20)
    assert sure[-1] == len(proposer.first_odds) - 1
    assert unsure == ()
    assert proposer.propose([first, second], [9, 0]) == [(7, 8, 9, 5, 6, 7, 8, 9, 5), ()]
    first.tokens += [7]
    assert len(proposer.look([first], [2])[0]) == 2
    assert proposer.propose([first], [2]) == [(8, 9)]
    for _ in range(2):
        proposer.forget("a")
    assert proposer.look([first], [0]) == [()]
