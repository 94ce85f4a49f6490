"""What one step's attention is cut into for a GPU: pieces of rows by runs of keys, and whose partial results they are.

Groups of sequences that begin with the same blocks come from kernels/spans.py. Pieces are independent of each other,
so long runs of keys are cut too: enough pieces keep all processors of the device at work, as few as that needs keep
the merge short.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from engine.kernels.spans import CHUNK_BLOCKS, SequenceSpan, shared_spans

_END = 1 << 30


@dataclass(frozen=True, slots=True)
class Pieces:
    """int32 arrays of one step with T rows.

    `tables`     block tables, one after the other
    `pieces`     [n, 6]: first row, rows, first key, end of keys, offset in `tables`, slot of its first row or -1
    `slots`      the slots of each row, row after row, in the order of their keys
    `slot_ends`  [T]: row t has slots[slot_ends[t - 1]:slot_ends[t]]; none where one piece holds all of its keys
    `lengths`    [T]: keys that a row sees
    """

    tables: np.ndarray[Any, np.dtype[np.int32]]
    pieces: np.ndarray[Any, np.dtype[np.int32]]
    slots: np.ndarray[Any, np.dtype[np.int32]]
    slot_ends: np.ndarray[Any, np.dtype[np.int32]]
    lengths: np.ndarray[Any, np.dtype[np.int32]]

    @property
    def num_slots(self) -> int:
        """Rows of partial results."""
        return len(self.slots)

    @property
    def most_rows(self) -> int:
        """Of a piece."""
        return int(self.pieces[:, 1].max())

    @property
    def arrays(self) -> list[np.ndarray[Any, np.dtype[np.int32]]]:
        """All of them; `tables`, whose length means nothing to a kernel, is the last."""
        return [self.pieces, self.slots, self.slot_ends, self.lengths, self.tables]

    def padded(self, rows: int, pieces: int, slots: int) -> Pieces:
        """The same work in arrays of these sizes: pieces of no rows, slots that nobody adds up, rows without keys."""
        nothing = np.zeros((pieces - len(self.pieces), 6), np.int32)
        nothing[:, 5] = -1
        return Pieces(
            tables=self.tables,
            pieces=np.concatenate((self.pieces, nothing)),
            slots=np.pad(self.slots, (0, slots - len(self.slots))),
            slot_ends=np.pad(self.slot_ends, (0, rows - len(self.slot_ends)), mode="edge"),
            lengths=np.pad(self.lengths, (0, rows - len(self.lengths))),
        )


def plan_pieces(
    sequences: list[SequenceSpan], block_tokens: int, *, most_rows: int, least_keys: int, wanted: int
) -> Pieces:
    """Pieces of at most `most_rows` rows. Runs of keys are cut to no less than `least_keys` (whole chunks) while there
    are fewer than `wanted` pieces. `sequences` lie in order of their rows, without gaps."""
    lengths = np.concatenate([np.arange(s.start + 1, s.length + 1) for s in sequences]).astype(np.int32)
    shared = shared_spans(sequences, block_tokens)
    chunk = CHUNK_BLOCKS * block_tokens
    runs = []
    for first, last, begin, end, table in shared.spans.tolist():
        for row in range(first, last, most_rows):
            stop = min(row + most_rows, last)
            furthest = int(lengths[row:stop].max())
            runs.append((row, stop - row, begin * chunk, min(furthest, end * chunk if end < _END else _END), table))
    keys = sum(end - begin for _, _, begin, end, _ in runs)
    size = max(least_keys, -(-keys // max(wanted, 1)))
    size = -(-size // chunk) * chunk
    cut = [
        (row, rows, at, min(at + size, end), table)
        for row, rows, begin, end, table in runs
        for at in range(begin, end, size)
    ]
    return _with_slots(cut, lengths, shared.tables)


def _with_slots(
    cut: list[tuple[int, int, int, int, int]], lengths: np.ndarray[Any, Any], tables: np.ndarray[Any, Any]
) -> Pieces:
    pieces = np.array(cut, np.int32).reshape(-1, 5)
    rows = np.repeat(pieces[:, 0], pieces[:, 1])
    inside = np.arange(len(rows)) - np.repeat(np.cumsum(pieces[:, 1]) - pieces[:, 1], pieces[:, 1])
    rows = rows + inside  # row of each (piece, row)
    is_merged = np.bincount(rows, minlength=len(lengths)) > 1
    # a piece writes its rows itself only if none of them has another piece
    partial = np.array([bool(is_merged[row : row + count].any()) for row, count, *_ in cut])
    counts = np.where(partial, pieces[:, 1], 0)
    firsts = np.where(partial, np.cumsum(counts) - counts, -1)
    of_slot = rows[np.repeat(partial, pieces[:, 1])]
    order = np.lexsort((np.repeat(pieces[:, 2], counts), of_slot))
    ends = np.cumsum(np.bincount(of_slot, minlength=len(lengths)))
    return Pieces(
        tables=tables.astype(np.int32),
        pieces=np.column_stack((pieces, firsts)).astype(np.int32),
        slots=order.astype(np.int32),
        slot_ends=ends.astype(np.int32),
        lengths=lengths.astype(np.int32),
    )
