"""Block tables: hits, copy-on-write, and what happens when two sequences compute the same block."""

from __future__ import annotations

import math

from engine.cache.prefix import PrefixIndex
from engine.cache.sequence import Sequence
from engine.cache.tables import BlockTables, Copy
from tests.engine.oracle import request

SIZE = 4


class Desk:
    """Tables of a small pool and sequences that are computed at once."""

    def __init__(self, num_blocks: int = 8, *, prefix_cache: bool = True) -> None:
        index = PrefixIndex(block_tokens=SIZE) if prefix_cache else None
        self.tables = BlockTables(num_blocks, SIZE, index, next_use=lambda _key: math.inf)
        self.sequences: list[Sequence] = []

    def admitted(self, prompt: list[int], **fields: str) -> Sequence:
        seq = Sequence(request(f"r{len(self.sequences)}", prompt, **fields), len(self.sequences), 8)
        self.sequences.append(seq)
        self.tables.extend_keys(seq)
        self.tables.admit(seq, self.tables.match(seq))
        self.check()
        return seq

    def compute(self, seq: Sequence, num_tokens: int, token_id: int = 7) -> None:
        self.tables.grow(seq, num_tokens)
        if seq.advance(num_tokens):
            seq.read(token_id)
        self.tables.commit(seq, seq.computed_tokens)
        self.check()

    def computed(self, prompt: list[int], **fields: str) -> Sequence:
        seq = self.admitted(prompt, **fields)
        self.compute(seq, seq.num_pending)
        return seq

    def release(self, seq: Sequence) -> None:
        self.tables.release(seq)
        seq.rewind()
        self.check()

    def check(self) -> None:
        self.tables.check_integrity(self.sequences)


def test_only_full_committed_blocks_are_hits() -> None:
    desk = Desk()
    first = desk.admitted([1, 2, 3, 4, 5, 6, 7, 8, 9])
    desk.tables.grow(first, 9)
    first.advance(9)
    assert desk.admitted([1, 2, 3, 4, 5]).hit_tokens == 0, "not committed yet"
    first.read(7)
    desk.tables.commit(first, 9)
    assert desk.admitted([1, 2, 3, 4, 5, 6, 7, 0]).hit_tokens == 4
    assert desk.admitted([1, 2, 3, 4, 5, 6, 7, 8, 9, 9]).block_ids == first.block_ids[:2]


def test_a_prompt_that_is_cached_to_its_end_copies_its_last_block() -> None:
    desk = Desk()
    first = desk.computed([1, 2, 3, 4, 5, 6, 7, 8])
    second = desk.admitted([1, 2, 3, 4, 5, 6, 7, 8])
    assert second.hit_tokens == 7, "the last token is computed, to have logits"
    assert second.block_ids[0] == first.block_ids[0]
    assert desk.tables.take_copies() == (Copy(first.block_ids[1], second.block_ids[1]),)
    desk.compute(second, 1)
    assert second.block_ids == first.block_ids[:2], "the block turned out the same and was given back"


def test_without_a_block_for_the_copy_the_last_block_is_computed_again() -> None:
    desk = Desk(num_blocks=2)
    desk.computed([1, 2, 3, 4, 5, 6, 7, 8])
    second = desk.admitted([1, 2, 3, 4, 5, 6, 7, 8])
    assert second.hit_tokens == 4
    assert desk.tables.take_copies() == ()


def test_a_full_pool_copies_an_idle_block_onto_itself() -> None:
    desk = Desk(num_blocks=2)
    desk.release(desk.computed([1, 2, 3, 4, 5, 6, 7, 8]))
    second = desk.admitted([1, 2, 3, 4, 5, 6, 7, 8])
    (copy,) = desk.tables.take_copies()
    assert copy.source == copy.target == second.block_ids[1]
    assert second.hit_tokens == 7


def test_of_two_that_compute_the_same_block_one_gives_it_back() -> None:
    desk = Desk()
    first, second = desk.admitted([1, 2, 3, 4, 5]), desk.admitted([1, 2, 3, 4, 6])
    desk.compute(first, 5)
    desk.tables.grow(second, 5)
    assert second.block_ids[0] != first.block_ids[0]
    desk.compute(second, 5)
    assert second.block_ids[0] == first.block_ids[0]
    assert desk.tables.num_shared(first) == desk.tables.num_shared(second) == 1


def test_a_fork_shares_the_last_partial_block_until_one_of_them_writes() -> None:
    desk = Desk()
    parent = desk.computed([1, 2, 3, 4, 5, 6])
    child = Sequence(request("child", [1, 2, 3, 4, 5, 6]), 9, 8)
    desk.sequences.append(child)
    desk.tables.extend_keys(child)
    desk.tables.fork(parent, child, 5)
    desk.check()
    assert child.block_ids == parent.block_ids
    shared = parent.block_ids[1]
    desk.compute(parent, 1)
    assert desk.tables.take_copies() == (Copy(shared, parent.block_ids[1]),), "the first writer copies"
    assert child.block_ids[1] == shared
    desk.compute(child, 1)
    assert desk.tables.take_copies() == (), "the last owner writes in place"
    assert child.block_ids[0] == parent.block_ids[0]
    assert child.block_ids[1] == shared != parent.block_ids[1]


def test_a_fork_at_the_end_of_a_block_copies_it_before_its_last_token_is_computed_again() -> None:
    desk = Desk(prefix_cache=False)
    parent = desk.computed([1, 2, 3, 4])
    child = Sequence(request("child", [1, 2, 3, 4]), 9, 8)
    desk.sequences.append(child)
    desk.tables.fork(parent, child, 3)
    desk.compute(child, 1)
    assert desk.tables.take_copies() == (Copy(parent.block_ids[0], child.block_ids[0]),)


def test_scopes_share_nothing() -> None:
    desk = Desk()
    desk.computed([1, 2, 3, 4, 5], salt="a")
    assert desk.admitted([1, 2, 3, 4, 5], salt="b").hit_tokens == 0
    assert desk.admitted([1, 2, 3, 4, 5], salt="a").hit_tokens == 4


def test_room_counts_the_copy_that_a_write_would_need() -> None:
    desk = Desk(num_blocks=2, prefix_cache=False)
    parent = desk.computed([1, 2, 3])
    child = Sequence(request("child", [1, 2, 3]), 9, 8)
    desk.sequences.append(child)
    desk.tables.fork(parent, child, 2)
    assert desk.tables.room(child) == 2
    desk.tables.pool.allocate(1)
    assert desk.tables.room(child) == 0
