"""Predicts the most KV blocks that sequences will use at once, and says whether one more fits among those that run.

Blocks that several use count once; what a sequence still writes is guessed (sched/forecast.py), and the arithmetic is
that of sched/budget.py. An interactive sequence has to fit beside the interactive ones only, as batch work gives way to
it; batch work has to fit beside all that run.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Chain
from typing import NamedTuple

from engine.cache.prefix import Entry
from engine.cache.sequence import Sequence
from engine.cache.tables import BlockTables
from engine.sched.budget import Load, predicted_peak_blocks
from engine.sched.forecast import Forecast


class Neighbours(NamedTuple):
    """Loads of sequences, and the blocks that they share, with each other or with anybody."""

    loads: list[Load]
    shared_blocks: int


class Peak:
    """The prediction for one pool. Changes nothing."""

    def __init__(self, tables: BlockTables, forecast: Forecast) -> None:
        self._tables = tables
        self._forecast = forecast

    def beside(self, running: Iterable[Sequence], *, is_interactive: bool) -> Neighbours:
        """What the running sequences ask of the pool, of those beside which one of this lane has to fit."""
        pool = self._tables.pool
        if not is_interactive:
            return Neighbours([self._load(seq, self._tables.num_shared(seq)) for seq in running], pool.num_shared)
        loads: list[Load] = []
        shared: set[int] = set()
        for seq in running:
            if seq.is_interactive:
                num_shared = self._tables.num_shared(seq)
                loads.append(self._load(seq, num_shared))
                shared.update(seq.block_ids[:num_shared])
        return Neighbours(loads, len(shared))

    def fits(self, neighbours: Neighbours, load: Load) -> bool:
        """Whether the predicted peak fits, of those that run and one more. A first one is always let in."""
        pool = self._tables.pool
        if not neighbours.loads:
            return True
        peak_blocks = predicted_peak_blocks([*neighbours.loads, load], self._tables.block_tokens)
        return neighbours.shared_blocks + peak_blocks <= pool.num_blocks * (1 - self._forecast.reserve)

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
