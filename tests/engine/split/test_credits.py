"""Credit: never more than there is room for, spent once, and nobody waits for ever."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from engine.request import Lane
from engine.split.credits import Grants, Purse, cost


@given(st.integers(1, 1000), st.integers(1, 100))
def test_a_prompt_costs_its_blocks_but_never_more_than_there_may_be(blocks: int, most: int) -> None:
    assert 1 <= cost(blocks, most) <= most
    assert cost(blocks, most) == blocks or blocks > most


@settings(max_examples=80, deadline=None)
@given(
    most=st.integers(1, 20),
    pool=st.integers(1, 40),
    prompts=st.lists(st.tuples(st.integers(1, 30), st.sampled_from(Lane)), max_size=30),
    data=st.data(),
)
def test_both_books_agree_and_every_prompt_gets_its_turn(
    most: int, pool: int, prompts: list[tuple[int, Lane]], data: st.DataObject
) -> None:
    """Prompts are asked, cancelled, begun and run in any order of events; the pool is what other work leaves."""
    grants, purse = Grants(most), Purse(most)
    lanes = {str(number): lane for number, (_, lane) in enumerate(prompts)}
    wanted: set[str] = set()
    begun: list[str] = []
    cancelled: set[str] = set()
    running: set[str] = set()

    def grant(num_available: int) -> None:
        for granted in grants.grant(num_available):
            purse.earn(granted.blocks, granted.lane)

    def begin(lane: Lane) -> bool:
        name = purse.first(lane)
        if name is None:
            return False
        purse.begin(lane)
        begun.append(name)
        running.add(name)
        return True

    for number, (blocks, lane) in enumerate(prompts):
        grants.ask(str(number), blocks, lane)
        purse.queue(str(number), blocks, lane)
        wanted.add(str(number))
    while wanted:
        event = data.draw(st.sampled_from(["grant", "begin", "run", "cancel"]))
        if event == "grant":
            grant(data.draw(st.integers(0, pool)))
        elif event == "begin":
            begin(data.draw(st.sampled_from(Lane)))
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
        assert all(0 <= blocks <= most for blocks in grants.open_of.values()), "more is granted than may wait"
        for lane in Lane:
            of_lane = {name for name in wanted if lanes[name] is lane}
            if of_lane and not of_lane & running:  # nothing of the lane under way: its next one must always be able to
                grant(0)
                assert begin(lane), "a prompt waits for ever"
    for lane in Lane:
        of_lane = [int(name) for name in begun if lanes[name] is lane]
        assert of_lane == sorted(of_lane), "prompts of a lane overtake each other"
    assert len(set(begun)) == len(begun)
    assert grants.open_blocks == 0


BATCH, CALLS = Lane.BATCH, Lane.INTERACTIVE


def test_nothing_is_begun_without_credit() -> None:
    purse = Purse(10)
    purse.queue("a", 4, BATCH)
    purse.queue("b", 40, BATCH)
    assert purse.first(BATCH) is None
    purse.earn(4, CALLS)
    assert purse.first(BATCH) is None, "the credit of another lane is no credit"
    purse.earn(4, BATCH)
    assert purse.first(BATCH) == "a"
    purse.begin(BATCH)
    assert (purse.first(BATCH), purse.blocks[BATCH]) == (None, 0)
    purse.earn(10, BATCH)  # what b costs: no more than there may be at once
    assert purse.first(BATCH) == "b"
    purse.begin(BATCH)
    assert (purse.blocks, len(purse)) == ({CALLS: 4, BATCH: 0}, 0)


def test_room_that_is_taken_by_running_requests_is_not_granted() -> None:
    grants = Grants(10)
    for name in "abc":
        grants.ask(name, 3, BATCH)
    assert grants.grant(5) == [("a", 3, BATCH)]
    assert grants.grant(5) == []
    assert grants.grant(6) == [("b", 3, BATCH)]
    grants.free("a")
    grants.free("a")
    assert grants.open_blocks == 3
    assert grants.grant(6) == [("c", 3, BATCH)]


def test_batch_prompts_never_hold_the_credit_of_an_interactive_one() -> None:
    grants = Grants(4)
    for name in "abc":
        grants.ask(name, 2, BATCH)
    assert [grant.name for grant in grants.grant(99)] == ["a", "b"]
    grants.ask("call", 4, CALLS)
    grants.ask("next", 1, CALLS)
    assert grants.grant(0) == [("call", 4, CALLS)], "whatever batch work holds"
    assert grants.grant(99) == []
    grants.free("call")
    assert grants.grant(99) == [("next", 1, CALLS)]
    assert grants.open_of == {CALLS: 1, BATCH: 4}
    grants.free("a")
    assert [grant.name for grant in grants.grant(99)] == ["c"]


def test_of_room_for_one_the_interactive_one_has_it() -> None:
    grants = Grants(4)
    grants.ask("a", 2, BATCH)
    grants.ask("call", 1, CALLS)
    grants.grant(99)
    grants.ask("b", 2, BATCH)
    grants.ask("again", 2, CALLS)
    assert grants.grant(5) == [("again", 2, CALLS)]


def test_what_comes_and_goes_leaves_nothing_behind() -> None:
    purse = Purse(10)
    purse.queue("first", 3, BATCH)
    for number in range(1000):
        purse.queue(str(number), 2, BATCH)
        purse.cancel(str(number))
    assert sum(len(waiting) for waiting in purse._waiting.values()) == 2
    purse.queue("last", 5, BATCH)
    assert len(purse) == 2
    purse.earn(3 + 2000, BATCH)
    assert purse.first(BATCH) == "first"
    purse.begin(BATCH)
    assert purse.first(BATCH) is None
    purse.earn(5, BATCH)
    assert purse.first(BATCH) == "last"


def test_a_lost_peer_gives_its_credit_back() -> None:
    grants = Grants(4)
    for name in "abcd":
        grants.ask(name, 2, BATCH)
    assert [grant.name for grant in grants.grant(9)] == ["a", "b"]
    grants.forget({"a", "c"})
    assert grants.open_blocks == 2
    assert grants.grant(9) == [("d", 2, BATCH)]
