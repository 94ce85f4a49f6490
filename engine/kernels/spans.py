"""Which rows of a step may walk which keys together.

Sequences whose block tables begin with the same blocks share those keys: their rows attend to them as one group.
Neighbours in a step share most, because requests run in plan order, so comparing neighbours finds the tree: a node is
a run of sequences and a range of chunks (CHUNK_BLOCKS blocks each) that all of them have in common.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

CHUNK_BLOCKS = 4
GROUP_ROWS = 64
"""Rows of one piece of a group: enough to use each loaded key well, few enough to spread over cores."""
CHUNK_ROWS = 64
"""Rows of one piece of a sequence's own chunk."""
_END = 1 << 30


@dataclass(frozen=True, slots=True)
class SequenceSpan:
    """One sequence's rows in a step: rows [row, row + num_rows), the first at position `start`."""

    row: int
    num_rows: int
    start: int
    block_ids: tuple[int, ...]

    @property
    def length(self) -> int:
        """Positions that exist after the step."""
        return self.start + self.num_rows


@dataclass(frozen=True, slots=True)
class SharedSpans:
    """int32 arrays for a kernel.

    `tables`      block tables, one after the other, each padded to whole chunks
    `spans`       [n, 5]: first row, last row, first chunk, last chunk, offset in `tables`
    `level_ends`  spans [level_ends[i - 1], level_ends[i]) come after all of the levels before
    """

    tables: np.ndarray[Any, np.dtype[np.int32]]
    spans: np.ndarray[Any, np.dtype[np.int32]]
    level_ends: np.ndarray[Any, np.dtype[np.int32]]


def shared_spans(sequences: list[SequenceSpan], block_tokens: int) -> SharedSpans:
    """The groups of a step, deepest last. A row meets its chunks in order, each once."""
    sizes = [-(-len(seq.block_ids) // CHUNK_BLOCKS) * CHUNK_BLOCKS for seq in sequences]
    offsets = np.concatenate(([0], np.cumsum(sizes))).astype(np.int64)
    tables = np.zeros(offsets[-1], np.int32)
    for seq, offset in zip(sequences, offsets[:-1], strict=True):
        tables[offset : offset + len(seq.block_ids)] = seq.block_ids
    common = _common_chunks(sequences, tables, offsets, block_tokens)
    levels: list[list[tuple[int, int, int, int, int]]] = []
    nodes = [(0, len(sequences), 0, 0)]  # sequences [first, last), chunks done, level
    while nodes:
        first, last, done, level = nodes.pop()
        if len(levels) == level:
            levels.append([])
        at = int(offsets[first])
        if last - first == 1:
            begin, end = sequences[first].row, sequences[first].row + sequences[first].num_rows
            levels[level] += [(r, min(r + CHUNK_ROWS, end), done, _END, at) for r in range(begin, end, CHUNK_ROWS)]
            continue
        inside = common[first : last - 1]
        shared = int(inside.min())
        if shared > done:
            begin, end = sequences[first].row, sequences[last - 1].row + sequences[last - 1].num_rows
            levels[level] += [(r, min(r + GROUP_ROWS, end), done, shared, at) for r in range(begin, end, GROUP_ROWS)]
            done, level = shared, level + 1
        cuts = [first, *(first + 1 + np.flatnonzero(inside <= done)).tolist(), last]
        nodes += [(a, b, done, level) for a, b in pairwise(cuts)]
    flat = [span for level_spans in levels for span in level_spans]
    return SharedSpans(
        tables,
        np.array(flat, np.int32).reshape(-1, 5),
        np.cumsum([len(level_spans) for level_spans in levels], dtype=np.int32),
    )


def _common_chunks(
    sequences: list[SequenceSpan], tables: np.ndarray[Any, Any], offsets: np.ndarray[Any, Any], block_tokens: int
) -> np.ndarray[Any, np.dtype[np.int64]]:
    """For each two neighbours the leading chunks with the same blocks, all of whose keys both see from every row."""
    whole = np.array([seq.start // (block_tokens * CHUNK_BLOCKS) for seq in sequences], np.int64)
    if len(sequences) < 2:
        return np.zeros(0, np.int64)
    most = np.minimum(whole[:-1], whole[1:])
    width = int(most.max())
    if not width:
        return np.zeros(len(sequences) - 1, np.int64)
    index = offsets[:-1, None] + np.arange(width * CHUNK_BLOCKS)
    heads = tables[np.minimum(index, len(tables) - 1)].reshape(len(sequences), width, CHUNK_BLOCKS)
    differs = (heads[:-1] != heads[1:]).any(axis=2)
    same = np.where(differs.any(axis=1), differs.argmax(axis=1), width)
    return np.minimum(same, most)
