"""Each guard of the protocol is missed: without it, the state machine finds a history in which lines or money go wrong.

A mutant's machine is narrowed to the faults that its guard is there for, and draws the same histories each time: so the
search takes seconds, and it can't fail by bad luck.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
from sqlalchemy import select
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.orm import Session

from batchsvc.batches import finalize_queries, unit_queries
from batchsvc.batches.lifecycle import Status
from batchsvc.batches.tables import Batch, Unit
from batchsvc.batches.unit_queries import NewPart
from batchsvc.store import keys
from tests.workers.protocol_model import Protocol, run_protocol

COMMIT = unit_queries.commit_part


def commit_without_fence(session: Session, unit_id: str, epoch: int, part: NewPart) -> bool:
    unit = session.get_one(Unit, unit_id)
    if unit.state != "sealed":
        unit.state, unit.epoch = "leased", epoch
        session.flush()
    return COMMIT(session, unit_id, epoch, part)


def seal_nothing(session: Session, batch_id: str) -> int:
    return sum(unit.state != "done" for unit in session.scalars(select(Unit).where(Unit.batch_id == batch_id)))


def mine_without_epoch(session: Session, batch_id: str, _fin_epoch: int) -> Batch | None:
    batch = session.get_one(Batch, batch_id)
    batch.status = Status.FINALIZING
    session.flush()
    return batch


def one_key_an_epoch(batch_id: str, epoch: int, _part_id: str) -> str:
    return f"batch/{batch_id}/part/{epoch}.jsonl.zst"


@dataclass(frozen=True)
class Mutant:
    """A guard that is removed, and the world that needs it."""

    module: object
    name: str
    without: Callable[..., object]
    faults: frozenset[str]
    num_units: int = 1
    num_lines: int = 2


MUTANTS = {
    "commit_fence": Mutant(unit_queries, "commit_part", commit_without_fence, frozenset({"lose_leases"})),
    "seal": Mutant(unit_queries, "seal", seal_nothing, frozenset({"stop"})),
    "publish_fence": Mutant(finalize_queries, "_mine", mine_without_epoch, frozenset({"overtake"})),
    "unique_part_keys": Mutant(keys, "part", one_key_an_epoch, frozenset()),
}


@pytest.mark.mutants
@pytest.mark.parametrize("removed", MUTANTS)
def test_each_guard_is_missed(monkeypatch: pytest.MonkeyPatch, removed: str) -> None:
    mutant = MUTANTS[removed]

    class Narrow(Protocol):
        faults = mutant.faults
        num_units, num_lines = mutant.num_units, mutant.num_lines

    run_protocol(Narrow, examples=10, steps=25, is_repeatable=True)  # with the guard all is well
    monkeypatch.setattr(mutant.module, mutant.name, mutant.without)
    with pytest.raises((AssertionError, ValueError, SQLAlchemyError)):
        run_protocol(Narrow, examples=500, steps=25, is_repeatable=True)
