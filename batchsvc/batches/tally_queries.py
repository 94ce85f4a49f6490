"""SQL of tallies: what the whole deployment counts under a name, so that no restart and no kill loses it."""

from __future__ import annotations

from typing import Literal, NamedTuple

from sqlalchemy import select
from sqlalchemy.orm import Session

from batchsvc.batches.tables import Tally
from batchsvc.db.insert import insert
from batchsvc.db.session import database_now_ms

TallyName = Literal["reaper_ticks", "leases_lost", "lines_quarantined", "parts_damaged"]


class Tallied(NamedTuple):
    """How many, and when the last one was; 0 for never."""

    num: int
    at_ms: int


def add(session: Session, name: TallyName, num: int = 1) -> None:
    """Count `num` more. The row stays locked until the transaction ends, so it belongs at the end of one."""
    now = database_now_ms(session)
    first = insert(session, Tally).values(name=name, num=num, at_ms=now)
    session.execute(
        first.on_conflict_do_update(index_elements=("name",), set_={"num": Tally.num + num, "at_ms": now}),
        execution_options={"synchronize_session": False},
    )


def all_of(session: Session) -> dict[str, Tallied]:
    """Every tally by its name."""
    return {row.name: Tallied(row.num, row.at_ms) for row in session.scalars(select(Tally))}
