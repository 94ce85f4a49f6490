"""Blocks from elsewhere in the cache: the books agree after any order of events, and nothing is poisoned or evicted
that shouldn't be."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from engine.cache.passing import Origin, Passing, Prefix
from engine.cache.prefix import PrefixIndex
from engine.cache.sequence import Sequence
from engine.cache.tables import BlockTables
from engine.request import Request, SamplingParams

SIZE = 4


class Memory:
    """A pool whose blocks hold the tokens that they were computed of."""

    layout_id = "test"
    block_bytes = SIZE

    def __init__(self) -> None:
        self.content: dict[int, bytes] = {}

    def export_blocks(self, blocks: list[int]) -> bytes:
        return b"".join(self.content[block] for block in blocks)

    def import_blocks(self, blocks: list[int], data: bytes) -> None:
        assert len(data) == SIZE * len(blocks)
        for at, block in enumerate(blocks):
            self.content[block] = data[SIZE * at : SIZE * (at + 1)]


def make(num_blocks: int) -> tuple[BlockTables, Memory, Passing]:
    tables, memory = BlockTables(num_blocks, SIZE, PrefixIndex(block_tokens=SIZE), next_use=lambda _: 0.0), Memory()
    return tables, memory, Passing(tables, memory, Origin("test", "m", "w"))


def of(tokens: list[int]) -> Prefix:
    return Prefix(token_ids=tokens, salt="p")


def data_of(tokens: list[int], depths: range) -> bytes:
    return bytes(tokens[depths.start * SIZE : depths.stop * SIZE])


def audit(tables: BlockTables, memory: Memory, passing: Passing, tokens: list[int]) -> None:
    """What the index says is cached is what memory holds."""
    for depth, entry in enumerate(tables.cached(tokens, salt="p", adapter="")):
        assert memory.content[entry.block] == bytes(tokens[depth * SIZE : (depth + 1) * SIZE])


prompts = st.lists(st.integers(0, 1), min_size=SIZE, max_size=5 * SIZE)


@settings(max_examples=60, deadline=None)
@given(num_blocks=st.integers(2, 12), data=st.data())
def test_the_books_agree_whatever_arrives(num_blocks: int, data: st.DataObject) -> None:
    """Any pieces of any prompts, between sequences that come, compute and go."""
    tables, memory, passing = make(num_blocks)
    sequences: list[Sequence] = []
    for number in range(data.draw(st.integers(1, 25))):
        tokens = data.draw(prompts)
        if data.draw(st.booleans()):
            first = data.draw(st.integers(0, len(tokens) // SIZE - 1))
            depths = range(first, data.draw(st.integers(first + 1, len(tokens) // SIZE)))
            before = passing.num_cached(of(tokens))
            new = passing.adopt(of(tokens), depths, data_of(tokens, depths))
            if new:
                assert before >= first
                assert passing.num_cached(of(tokens)) >= depths.stop
        elif sequences and data.draw(st.booleans()):
            tables.release(sequences.pop(data.draw(st.integers(0, len(sequences) - 1))))
        else:
            made = Request(id=str(number), prompt_ids=tokens, params=SamplingParams(max_tokens=1), salt="p")
            seq = Sequence(made, 0, 1)
            tables.extend_keys(seq)
            chain = tables.match(seq)
            tables.admit(seq, chain)
            copies = tables.take_copies()
            missing = len(tokens) - seq.computed_tokens
            if tables.room(seq) < missing:
                tables.release(seq)
                continue
            tables.grow(seq, missing)
            touched = {block for copy in copies for block in copy}
            for block in tables.pool.drain_freed():  # a step begins with poison, then copies, then writes
                if block not in touched:
                    memory.content[block] = b"dead"
            for copy in copies:
                memory.content[copy.target] = memory.content[copy.source]
            for depth in range(seq.computed_tokens // SIZE, len(tokens) // SIZE):
                memory.content[seq.block_ids[depth]] = data_of(tokens, range(depth, depth + 1))
            seq.computed_tokens = len(tokens)
            tables.commit(seq, len(tokens))
            sequences.append(seq)
        tables.check_integrity(sequences)
        audit(tables, memory, passing, tokens)


def test_what_was_freed_and_filled_again_is_not_poisoned() -> None:
    tables, _, passing = make(2)
    first, second = [1] * 2 * SIZE, [2] * 2 * SIZE
    assert passing.adopt(of(first), range(2), data_of(first, range(2))) == 2
    assert passing.adopt(of(second), range(2), data_of(second, range(2))) == 2
    assert passing.num_cached(of(first)) == 0
    assert tables.pool.drain_freed() == ()


def test_room_is_never_made_of_the_blocks_before() -> None:
    tables, _, passing = make(2)
    tokens = [1] * 3 * SIZE
    assert passing.adopt(of(tokens), range(2), data_of(tokens, range(2))) == 2
    assert passing.adopt(of(tokens), range(2, 3), data_of(tokens, range(2, 3))) == 0
    assert passing.num_cached(of(tokens)) == 2
    tables.check_integrity([])


def test_a_piece_without_what_is_before_it_is_of_no_use() -> None:
    _, _, passing = make(8)
    tokens = [1] * 3 * SIZE
    assert passing.adopt(of(tokens), range(1, 3), data_of(tokens, range(1, 3))) == 0
    assert passing.num_cached(of(tokens)) == 0


def test_projects_do_not_share_what_arrives() -> None:
    _, _, passing = make(8)
    tokens = [1] * SIZE
    passing.adopt(of(tokens), range(1), data_of(tokens, range(1)))
    assert passing.num_cached(Prefix(token_ids=tokens, salt="other")) == 0
    assert passing.keys(Prefix(token_ids=tokens, salt="other")) != passing.keys(of(tokens))


def test_what_goes_out_comes_in() -> None:
    _, _, there = make(8)
    _, memory, here = make(8)
    tokens = [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12]
    there.adopt(of(tokens), range(3), data_of(tokens, range(3)))
    depths, data = there.export(of(tokens), range(1, 9))
    assert (depths, data) == (range(1, 3), bytes(tokens[4:]))
    assert there.export(of([9] * SIZE), range(1)) == (range(0), b"")
    here.adopt(of(tokens), range(1), data_of(tokens, range(1)))
    assert here.adopt(of(tokens), depths, data) == 2
    assert here.export(of(tokens), range(3)) == (range(3), bytes(tokens))
    assert len(memory.content) == 3
