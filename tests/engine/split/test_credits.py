"""Credit: never more than there is room for, spent once, and nobody waits for ever."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from engine.split.credits import Grants, Purse, cost


@given(st.integers(1, 1000), st.integers(1, 100))
def test_a_prompt_costs_its_blocks_but_never_more_than_there_may_be(blocks: int, most: int) -> None:
    assert 1 <= cost(blocks, most) <= most
    assert cost(blocks, most) == blocks or blocks > most


@settings(max_examples=80, deadline=None)
@given(
    most=st.integers(1, 20),
    pool=st.integers(1, 40),
    prompts=st.lists(st.integers(1, 30), max_size=30),
    data=st.data(),
)
def test_both_books_agree_and_every_prompt_gets_its_turn(
    most: int, pool: int, prompts: list[int], data: st.DataObject
) -> None:
    """Prompts are asked, cancelled, begun and run in any order of events; the pool is what other work leaves."""
    grants, purse = Grants(most), Purse(most)
    to_ask = [(str(number), blocks) for number, blocks in enumerate(prompts)]
    wanted: set[str] = set()
    begun: list[str] = []
    cancelled: set[str] = set()
    running: set[str] = set()
    for name, blocks in to_ask:
        grants.ask(name, blocks)
        purse.queue(name, blocks)
        wanted.add(name)
    while wanted:
        event = data.draw(st.sampled_from(["grant", "begin", "run", "cancel"]))
        if event == "grant":
            purse.blocks += sum(blocks for _, blocks in grants.grant(data.draw(st.integers(0, pool))))
        elif event == "begin":
            name = purse.next()
            if name is not None:
                begun.append(name)
                running.add(name)
        elif event == "run" and running:
            name = data.draw(st.sampled_from(sorted(running)))
            running.remove(name)
            grants.free(name)
            wanted.discard(name)
        elif event == "cancel" and len(cancelled) < 5:
            name = data.draw(st.sampled_from(sorted(wanted)))
            grants.free(name)
            if name not in running:
                purse.cancel(name)
            running.discard(name)
            wanted.discard(name)
            cancelled.add(name)
        assert 0 <= grants.open_blocks <= most, "more is granted than may wait"
        if not running and wanted:  # nothing under way: the next one must always be able to go
            purse.blocks += sum(blocks for _, blocks in grants.grant(0))
            name = purse.next()
            assert name is not None, "a prompt waits for ever"
            begun.append(name)
            running.add(name)
    assert begun == sorted(begun, key=int), "prompts overtake each other"
    assert len(set(begun)) == len(begun)
    assert grants.open_blocks == 0


def test_nothing_is_begun_without_credit() -> None:
    purse = Purse(10)
    purse.queue("a", 4)
    purse.queue("b", 40)
    assert purse.next() is None
    purse.blocks += 4
    assert (purse.next(), purse.next(), purse.blocks) == ("a", None, 0)
    purse.blocks += 10  # what b costs: no more than there may be at once
    assert (purse.next(), purse.blocks, len(purse)) == ("b", 0, 0)


def test_room_that_is_taken_by_running_requests_is_not_granted() -> None:
    grants = Grants(10)
    for name in "abc":
        grants.ask(name, 3)
    assert grants.grant(5) == [("a", 3)]
    assert grants.grant(5) == []
    assert grants.grant(6) == [("b", 3)]
    grants.free("a")
    grants.free("a")
    assert grants.open_blocks == 3
    assert grants.grant(6) == [("c", 3)]


def test_a_lost_peer_gives_its_credit_back() -> None:
    grants = Grants(4)
    for name in "abcd":
        grants.ask(name, 2)
    assert [name for name, _ in grants.grant(9)] == ["a", "b"]
    grants.forget({"a", "c"})
    assert grants.open_blocks == 2
    assert grants.grant(9) == [("d", 2)]
