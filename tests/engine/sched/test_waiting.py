"""The waiting queue against a plain sorted list, and leaders against their promises."""

from __future__ import annotations

import math

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from engine.cache.sequence import Sequence
from engine.request import Lane
from engine.sched.waiting import PrefixLeaders, WaitingQueue
from tests.engine.oracle import request

KEYS = [b"a", b"b", b"c"]


def waiting(rank: int, keys: list[bytes], lane: int = Lane.BATCH) -> Sequence:
    seq = Sequence(request(f"r{rank}", [1], lane=lane), rank, 1)
    seq.block_keys = keys
    return seq


class QueueMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.queue = WaitingQueue()
        self.members: dict[int, Sequence] = {}
        self.parked: dict[int, bytes] = {}
        self.left: list[Sequence] = []  # popped and removed: preemption may bring them back
        self.seen: set[int] = set()

    @rule(rank=st.integers(0, 99), keys=st.lists(st.sampled_from(KEYS), max_size=3), lane=st.sampled_from([0, 1, 2]))
    def add(self, rank: int, keys: list[bytes], lane: int) -> None:
        if rank not in self.seen:
            self.seen.add(rank)
            self.members[rank] = waiting(rank, keys, lane)
            self.queue.add(self.members[rank])

    @precondition(lambda self: self.left)
    @rule()
    def come_back(self) -> None:
        seq = self.left.pop()
        self.members[seq.rank] = seq
        self.queue.add(seq)

    @rule(then=st.sampled_from(["remove", "put back", *KEYS]), is_interactive=st.booleans())
    def pop(self, then: str | bytes, is_interactive: bool) -> None:
        seq = self.queue.pop(is_interactive=is_interactive)
        own = {rank for rank, member in self.members.items() if member.is_interactive == is_interactive}
        in_line = own - self.parked.keys()
        assert (seq.rank if seq else None) == min(in_line, default=None)
        if seq is None:
            return
        if then == "remove":
            self.queue.remove(self.members.pop(seq.rank))
            self.left.append(seq)
        elif then == "put back":
            self.queue.put_back(seq)
        else:
            self.queue.park(seq, then)
            self.parked[seq.rank] = then

    @rule(key=st.sampled_from(KEYS))
    def wake(self, key: bytes) -> None:
        assert self.queue.wake(key) or key not in self.parked.values()
        self.parked = {rank: under for rank, under in self.parked.items() if under != key}

    @precondition(lambda self: self.members)
    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        rank = data.draw(st.sampled_from(sorted(self.members)))
        self.queue.remove(self.members.pop(rank))
        self.parked.pop(rank, None)

    @invariant()
    def it_knows_its_members_and_what_they_need(self) -> None:
        self.queue.check_integrity()
        assert len(self.queue) == len(self.members)
        assert self.queue.parked_keys() == set(self.parked.values())
        for key in KEYS:
            users = [rank for rank, seq in self.members.items() if key in seq.block_keys]
            assert self.queue.next_use(key) == min(users, default=math.inf)

    def teardown(self) -> None:
        for seq in self.members.values():
            self.queue.remove(seq)
        assert not self.queue._uses, "memory of what was needed goes away"


QueueMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestQueue = QueueMachine.TestCase


def test_a_follower_waits_for_the_deepest_block_in_a_row_that_is_being_computed() -> None:
    leaders = PrefixLeaders()
    leader = waiting(1, [])
    leaders.claim(leader, [b"a", b"b", b"d"])
    follower = waiting(2, [])
    assert leaders.deepest_in_progress(follower, [b"a", b"b", b"c", b"d"]) == b"b"
    assert leaders.deepest_in_progress(follower, [b"c", b"a"]) is None
    assert leaders.give_up(leader, [b"b", b"b", b"x"]) == [b"b"]
    assert leaders.deepest_in_progress(follower, [b"a", b"b"]) == b"a"


def test_only_the_leader_gives_a_key_up() -> None:
    leaders = PrefixLeaders()
    leader, other = waiting(1, []), waiting(2, [])
    leaders.claim(leader, [b"a"])
    leaders.claim(other, [b"a", b"b"])
    assert leaders.give_up(other, [b"a", b"b"]) == [b"b"]
    assert leaders.leaders() == {b"a": leader}


def test_an_interactive_sequence_takes_the_lead_from_batch_work_and_not_the_other_way_round() -> None:
    leaders = PrefixLeaders()
    batch, urgent, other = waiting(1, []), waiting(2, [], Lane.INTERACTIVE), waiting(3, [], Lane.INTERACTIVE)
    leaders.claim(batch, [b"a", b"b"])
    assert leaders.deepest_in_progress(urgent, [b"a", b"b"]) is None
    leaders.claim(urgent, [b"a"])
    assert leaders.deepest_in_progress(other, [b"a", b"b"]) == b"a"
    assert leaders.deepest_in_progress(waiting(4, []), [b"a", b"b"]) == b"b"
    leaders.claim(batch, [b"a"])
    assert leaders.leaders() == {b"a": urgent, b"b": batch}
    assert leaders.give_up(batch, [b"a", b"b"]) == [b"b"]
