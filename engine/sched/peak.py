"""Predicts the most KV blocks that sequences will use at once, and says whether one more fits among those that run.

Blocks that several use count once; what a sequence still writes is guessed (sched/forecast.py), and the arithmetic is
that of sched/budget.py.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Chain

from engine.cache.prefix import Entry
from engine.cache.sequence import Sequence
from engine.cache.tables import BlockTables
from engine.sched.budget import Load, predicted_peak_blocks
from engine.sched.forecast import Forecast


class Peak:
    """The prediction for one pool. Changes nothing."""

    def __init__(self, tables: BlockTables, forecast: Forecast) -> None:
        self._tables = tables
        self._forecast = forecast

    def fits(self, loads: list[Load]) -> bool:
        """Whether the predicted peak of these sequences fits. A first one is always let in."""
        pool, block_tokens = self._tables.pool, self._tables.block_tokens
        peak_blocks = pool.num_shared + predicted_peak_blocks(loads, block_tokens)
        return len(loads) == 1 or peak_blocks <= pool.num_blocks * (1 - self._forecast.reserve)

    def loads(self, running: Iterable[Sequence]) -> list[Load]:
        """Of the running sequences."""
        return [self._load(seq, self._tables.num_shared(seq)) for seq in running]

    def new_load(self, seq: Sequence, chain: Chain[Entry]) -> Load:
        """Of a sequence that would start from `chain`: blocks of it that somebody uses cost nothing."""
        if len(chain) * self._tables.block_tokens == len(seq.tokens):
            chain = chain[:-1]  # its last block will be a copy
        return self._load(seq, sum(1 for entry in chain if self._tables.pool.num_references(entry.block)))

    def _load(self, seq: Sequence, shared_blocks: int) -> Load:
        num_outputs = seq.num_outputs
        draw = (seq.rank * 0x9E3779B1 & 0xFFFFFFFF) / 2**32  # of any ranks in a row, evenly spread
        expected = self._forecast.output_tokens(seq.request, num_outputs, seq.max_outputs, draw)
        private_tokens = max(len(seq.tokens) - shared_blocks * self._tables.block_tokens, 0)
        return Load(private_tokens, max(expected - num_outputs - 1, 0))
