"""What a batch waits for, in words, and when it may start at the earliest."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from sqlalchemy.orm import Session

from batchsvc.batches import hold_queries, model_pins, queries, switch_queries, unit_queries
from batchsvc.batches.lifecycle import Status
from batchsvc.batches.offpeak import Night
from batchsvc.batches.tables import Batch
from batchsvc.db.session import database_now_ms

_SILENT_RENEWALS = 3  # a worker that missed as many heartbeats serves nobody
_USUAL_ATTEMPTS = 2  # to finalize: one that was killed, and its successor


class InTurn(NamedTuple):
    """A worker that serves several models comes to a batch's later. `for_operators` names it, and what it does now,
    which may be another project's own model; `for_tenants` doesn't."""

    for_operators: str
    for_tenants: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Surroundings:
    """What batches wait for lies around them: the time, the night, live workers, units that were given back."""

    now_ms: int
    night: Night
    served: frozenset[str]
    delayed: frozenset[str]
    lacking: Mapping[str, str]  # by batch: what has work of it and no worker
    in_turn: Mapping[str, InTurn]  # by batch: which worker serves another model now, and this one later
    held: Mapping[str, str]  # by batch: why nothing of it is claimed now


def alive_since_ms(session: Session, renew_s: float) -> int:
    """A worker that gave no sign of life since this time counts as dead."""
    return database_now_ms(session) - round(_SILENT_RENEWALS * renew_s * 1000)


def look_around(session: Session, rows: Sequence[Batch], night: Night, renew_s: float) -> Surroundings:
    """What these batches may wait for."""
    served: set[str] = set()
    delayed: set[str] = set()
    lacking: dict[str, str] = {}
    in_turn: dict[str, InTurn] = {}
    held: dict[str, str] = {}
    if running := [row for row in rows if row.status == Status.IN_PROGRESS]:
        since_ms = alive_since_ms(session, renew_s)
        served = queries.served_digests(session, since_ms)
        held = _held(session, running)
        pinned = {pin.digest for row in running for pin in model_pins.pins_of(row)}
        delayed = unit_queries.delayed_batches(session, pinned)
        for row in running:
            if row.models is not None:
                found = unit_queries.open_models(session, row.id)
                idle = sorted(name for name, digest in found.items() if digest not in served)
                lacking |= dict.fromkeys([row.id] if idle else [], ", ".join(idle))
            elif row.model_digest not in served:
                lacking[row.id] = row.model_id or ""
                in_turn |= _in_turn(session, row, since_ms)
    return Surroundings(
        now_ms=database_now_ms(session),
        night=night,
        served=frozenset(served),
        delayed=frozenset(delayed),
        lacking=lacking,
        in_turn=in_turn,
        held=held,
    )


def _held(session: Session, running: Sequence[Batch]) -> dict[str, str]:
    """Those of these batches of which an operator lets nobody claim anything, with the reason; of several models, if
    it is so for all of them."""
    holds = hold_queries.every(session)
    if not holds:
        return {}
    found = {}
    for row in running:
        pins = model_pins.pins_of(row)
        targets = [hold_queries.EVERYTHING, *(hold_queries.MODEL + pin.digest for pin in pins)]
        reasons = [holds[target].reason for target in targets if target in holds]
        if hold_queries.EVERYTHING in holds or (pins and len(reasons) == len(pins)):
            found[row.id] = reasons[0]
    return found


def _in_turn(session: Session, row: Batch, since_ms: int) -> dict[str, InTurn]:
    """By the batch, the worker that serves its model after another one, if there is one."""
    workers = switch_queries.able(session, since_ms).get(row.model_digest or "", [])
    if not workers:
        return {}
    first = min(workers, key=lambda worker: (worker.switching_to != row.model_digest, worker.name or worker.id))
    if first.switching_to == row.model_digest:
        says = f"the worker {first.name or first.id}, which loads {row.model_id}"
        return {row.id: InTurn(says, f"a worker, which loads {row.model_id}")}
    names = queries.names_by_digest(session)
    now = names.get(first.switching_to or first.model_digest, "another model")
    says = f"its turn: the worker {first.name or first.id} serves {now} now, and {row.model_id} after it"
    return {row.id: InTurn(says, "its turn: a worker serves another model now")}


def scheduled_ms(row: Batch, around: Surroundings) -> int | None:
    """When a batch that waits for the night may start, or None if it needn't wait."""
    if not row.is_offpeak or row.status not in (Status.VALIDATING, Status.IN_PROGRESS):
        return None
    starts = around.night.next_open_ms(around.now_ms)
    if row.latest_start_ms is not None:
        starts = min(starts, row.latest_start_ms)
    return starts if starts > around.now_ms else None


def waiting_for(row: Batch, around: Surroundings) -> str | None:
    """One phrase, or None for a batch that waits for nothing. Its project reads it: it names nothing of others."""
    if row.status == Status.FINALIZING and row.fin_epoch > _USUAL_ATTEMPTS:
        says = f"its results can't be put together, this is attempt {row.fin_epoch}"
        return f"{says}: the log of the control worker says why"
    if row.status == Status.VALIDATING and row.plan_owner is None and row.plan_lease_ms > around.now_ms:
        return "the store of its input, which can't be read: it is asked again soon"
    if row.status != Status.IN_PROGRESS:
        return None
    if row.is_paused:
        return f"paused: {row.pause_reason}" if row.pause_reason else "paused"
    if row.id in around.held:
        return "claims, which the operator has paused"  # why is the operator's: it may name others
    if not row.has_quota:
        return "quota"
    if not row.has_budget:
        return "budget"
    if (starts := scheduled_ms(row, around)) is not None:
        return f"off-peak until {around.night.label(starts)}"
    if row.id in around.in_turn:
        return around.in_turn[row.id].for_tenants
    if row.id in around.lacking:
        return f"no worker for model {around.lacking[row.id]}"
    if row.id in around.delayed:  # lines that an engine failed, or work that a worker could not read
        return "some of its work failed and is tried again soon: the log of the engine worker says why"
    return None
