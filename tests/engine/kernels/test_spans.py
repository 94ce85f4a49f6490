"""Shared spans cover what each row must see, each chunk once and in order, and share only what is the same."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from engine.kernels.spans import CHUNK_BLOCKS, SequenceSpan, shared_spans

BLOCK_TOKENS = 4


@st.composite
def steps(draw: st.DrawFn) -> list[SequenceSpan]:
    """Sequences in plan order whose tables begin with blocks of a random forest."""
    tables: list[tuple[int, ...]] = []
    fresh = iter(range(1, 100_000))
    for _ in range(draw(st.integers(1, 12))):
        base = draw(st.sampled_from(tables))[: draw(st.integers(0, 30))] if tables else ()
        tables.append(base + tuple(next(fresh) for _ in range(draw(st.integers(1, 25)))))
    spans, row = [], 0
    for table in sorted(tables):
        room = len(table) * BLOCK_TOKENS
        size = draw(st.integers(1, min(40, room)))
        start = draw(st.integers(0, room - size))
        spans.append(SequenceSpan(row, size, start, table))
        row += size
    return spans


@given(steps())
def test_each_row_meets_its_own_chunks_once_and_in_order(sequences: list[SequenceSpan]) -> None:
    shared = shared_spans(sequences, BLOCK_TOKENS)
    last = sequences[-1]
    met: list[list[int]] = [[] for _ in range(last.row + last.num_rows)]
    begin = 0
    for end in shared.level_ends.tolist():
        seen_in_level: set[int] = set()
        for first_row, last_row, first_chunk, last_chunk, offset in shared.spans[begin:end].tolist():
            for row in range(first_row, last_row):
                assert row not in seen_in_level, "two spans of one level would race for the same row"
                seen_in_level.add(row)
                seq = next(s for s in sequences if s.row <= row < s.row + s.num_rows)
                visible = seq.start + (row - seq.row) + 1
                needed = -(-visible // (BLOCK_TOKENS * CHUNK_BLOCKS))
                for chunk in range(first_chunk, min(last_chunk, needed)):
                    at = slice(chunk * CHUNK_BLOCKS, (chunk + 1) * CHUNK_BLOCKS)
                    mine = seq.block_ids[at]
                    table = shared.tables[offset + at.start : offset + at.stop].tolist()
                    assert tuple(table[: len(mine)]) == mine, "a row walks blocks that aren't its own"
                    met[row].append(chunk)
        begin = end
    for seq in sequences:
        for row in range(seq.row, seq.row + seq.num_rows):
            visible = seq.start + (row - seq.row) + 1
            assert met[row] == list(range(-(-visible // (BLOCK_TOKENS * CHUNK_BLOCKS))))


def test_a_common_prefix_is_walked_by_all_at_once() -> None:
    prefix = tuple(range(1, 33))
    sequences = [SequenceSpan(i, 1, 128 + 4, (*prefix, 100 + 2 * i, 101 + 2 * i)) for i in range(8)]
    shared = shared_spans(sequences, BLOCK_TOKENS)
    assert shared.level_ends.tolist() == [1, 9]
    assert shared.spans[0].tolist() == [0, 8, 0, 8, 0]
