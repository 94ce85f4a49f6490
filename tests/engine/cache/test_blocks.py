"""The block pool against a model of block states, with random operations and an audit after each."""

from __future__ import annotations

import math

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from engine.cache.blocks import BlockPool, OutOfBlocksError

NUM_BLOCKS = 9


class PoolMachine(RuleBasedStateMachine):
    """Owners hold tables of blocks. `needs` is what the future wants; answers only ever move nearer."""

    def __init__(self) -> None:
        super().__init__()
        self.needs: dict[int, float] = {}
        self.pool = BlockPool(NUM_BLOCKS, next_use=lambda block: self.needs.get(block, math.inf), on_evict=self.evict)
        self.tables: list[list[int]] = []
        self.depths: dict[int, int] = {}
        self.evicted: list[int] = []
        self.died: set[int] = set()
        self.touched: set[int] = set()
        self.shared: set[int] = set()  # those that ever had a second reference or were revived, while they live

    def evict(self, block: int) -> tuple[int, ...]:
        self.evicted.append(block)
        return (block,)

    def owned(self) -> set[int]:
        return {block for table in self.tables for block in table}

    def idle(self) -> set[int]:
        return self.depths.keys() - self.owned()

    def worth(self, block: int) -> tuple[float, bool, int]:
        return (-self.needs.get(block, math.inf), block in self.shared, -self.depths[block])

    @rule(count=st.integers(0, 5))
    def allocate(self, count: int) -> None:
        idle, num_free = self.idle(), NUM_BLOCKS - len(self.owned() | self.depths.keys())
        assert self.pool.num_available == num_free + len(idle)
        self.evicted.clear()
        if count > num_free + len(idle):
            with pytest.raises(OutOfBlocksError):
                self.pool.allocate(count)
            return
        worst_first = sorted(map(self.worth, idle))
        reusable = len(self.touched - self.owned() - self.depths.keys())
        disposable = sum(1 for need, was_shared, _ in worst_first if need == -math.inf and not was_shared)
        taken = self.pool.allocate(count)
        assert len(set(taken)) == count
        assert not set(taken) & self.owned()
        assert len(self.evicted) == max(0, count - num_free, min(disposable, count - reusable))
        found = [self.worth(block) for block in self.evicted]
        assert found == worst_first[: len(found)], "unneeded first, then furthest, never shared, deepest; never by age"
        assert set(taken) <= self.touched | {len(self.touched) + i for i in range(count)}, "untouched ones in order"
        self.touched |= set(taken)
        for block in self.evicted:
            del self.depths[block]
            self.needs.pop(block, None)
        self.died |= set(self.evicted)
        self.shared -= set(self.evicted)
        self.tables.append(taken)

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def share(self, data: st.DataObject) -> None:
        table = data.draw(st.sampled_from(self.tables))
        shared = table[: data.draw(st.integers(0, len(table)))]
        self.pool.share(shared)
        self.shared |= set(shared)
        self.tables.append(shared)

    @precondition(lambda self: self.idle())
    @rule(data=st.data())
    def revive(self, data: st.DataObject) -> None:
        block = data.draw(st.sampled_from(sorted(self.idle())))
        self.pool.share([block])
        self.shared.add(block)
        self.tables.append([block])

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        table = self.tables.pop(data.draw(st.integers(0, len(self.tables) - 1)))
        before = self.owned() | set(table)
        self.pool.release(table)
        freed = before - self.owned() - self.depths.keys()
        self.died |= freed
        self.shared -= freed

    @precondition(lambda self: self.owned() - self.depths.keys())
    @rule(data=st.data(), need=st.sampled_from([1.0, 2.0, 5.0, math.inf]), depth=st.integers(0, 3))
    def retain(self, data: st.DataObject, need: float, depth: int) -> None:
        block = data.draw(st.sampled_from(sorted(self.owned() - self.depths.keys())))
        self.needs[block] = need
        self.depths[block] = depth
        self.pool.retain(block, depth)

    @precondition(lambda self: self.depths)
    @rule(data=st.data())
    def need_sooner(self, data: st.DataObject) -> None:
        block = data.draw(st.sampled_from(sorted(self.depths)))
        self.needs[block] = min(self.needs[block], 7.0) / 2

    @rule()
    def drain(self) -> None:
        freed = self.pool.drain_freed()
        assert len(set(freed)) == len(freed)
        assert set(freed) == self.died
        self.died.clear()

    @invariant()
    def the_books_agree(self) -> None:
        self.pool.check_integrity(self.tables)
        owned = [block for table in self.tables for block in table]
        for block in range(NUM_BLOCKS):
            assert self.pool.num_references(block) == owned.count(block)
            assert self.pool.is_writable(block) == (owned.count(block) == 1 and block not in self.depths)
        assert self.pool.num_used == len(set(owned))

    def teardown(self) -> None:
        for table in self.tables:
            self.pool.release(table)
        assert self.pool.num_available == NUM_BLOCKS


PoolMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestPool = PoolMachine.TestCase


def idle_pool(needs: list[float], depths: list[int] | None = None) -> BlockPool:
    pool = BlockPool(len(needs), next_use=lambda block: needs[block])
    blocks = pool.allocate(len(needs))
    for block in sorted(blocks):
        pool.retain(block, depths[block] if depths else 0)
    pool.release(blocks)
    return pool


def test_what_nobody_needs_goes_first_then_the_furthest() -> None:
    pool = idle_pool([3.0, math.inf, 9.0, 1.0])
    assert [pool.allocate(1)[0] for _ in range(4)] == [1, 2, 0, 3]


def test_of_equals_the_deepest_goes_first() -> None:
    pool = idle_pool([math.inf] * 4, depths=[0, 3, 1, 2])
    assert [pool.allocate(1)[0] for _ in range(4)] == [1, 3, 2, 0]


def test_what_nobody_needs_or_shared_goes_before_memory_grows() -> None:
    pool = BlockPool(100, next_use=lambda block: math.inf)
    for _ in range(50):
        blocks = pool.allocate(2)
        assert set(blocks) == {0, 1}
        for block in blocks:
            pool.retain(block, 0)
        pool.release(blocks)
    pool.share([0])
    pool.release([0])
    assert set(pool.allocate(2)) == {1, 2}, "block 0 was shared: it may be wanted again"


def test_whatever_hangs_on_an_evicted_block_is_freed_with_it() -> None:
    pool = BlockPool(3, on_evict=lambda block: (block, 2) if block == 1 else (block,))
    blocks = pool.allocate(3)
    for block in blocks:
        pool.retain(block, {0: 0, 1: 9, 2: 1}[block])
    pool.release(blocks)
    pool.allocate(1)
    assert set(pool.drain_freed()) == {1, 2}
    assert pool.num_available == 2


def test_reviving_and_releasing_for_ever_takes_no_memory() -> None:
    pool = idle_pool([1.0, 2.0])
    for _ in range(1_000):
        pool.share([0, 1])
        pool.release([0, 1])
    assert len(pool._heap) < 100
    pool.check_integrity([])


def test_a_free_block_cannot_be_shared() -> None:
    with pytest.raises(KeyError):
        BlockPool(1).share([0])


def test_a_block_released_twice_is_an_error() -> None:
    pool = BlockPool(1)
    pool.release(pool.allocate(1))
    with pytest.raises(AssertionError, match="more often"):
        pool.release([0])
