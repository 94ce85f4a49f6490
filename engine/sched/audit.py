"""Checks that each sequence is where the scheduler's books say, for tests and for the end of an engine's work."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Line

from engine.cache.sequence import Sequence, SequenceState
from engine.sched.forks import Forks
from engine.sched.waiting import PrefixLeaders, WaitingQueue


def check_lines(
    sequences: Iterable[Sequence],
    running: Line[Sequence],
    waiting: WaitingQueue,
    forks: Forks,
    leaders: PrefixLeaders,
) -> None:
    """Raises AssertionError when a sequence stands in no line or in two, or waits for nobody."""
    waiting.check_integrity()
    ranks = [seq.rank for seq in running]
    assert ranks == sorted(ranks), "running sequences are out of order"
    assert all(seq.state is SequenceState.RUNNING for seq in running), "a sequence runs that shouldn't"
    for seq in sequences:
        if seq.state is SequenceState.WAITING:
            assert not seq.block_ids, f"{seq.id} waits and holds blocks"
            assert bool(seq.num_unread) != (seq in waiting or seq in forks), f"{seq.id} waits nowhere"
    found = leaders.leaders()
    assert all(seq.state is SequenceState.RUNNING for seq in found.values()), "a leader isn't running"
    assert waiting.parked_keys() <= found.keys(), "a follower waits for nobody"
