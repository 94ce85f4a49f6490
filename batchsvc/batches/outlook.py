"""What a batch says of its future: phase and share, when it will have ended, and whether its deadline is at risk.

Reads rows and writes none: the share is what commits have left in the row (progress_queries.py), so that every process
that is asked answers alike; the rest is worked out from the samples there.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy.orm import Session

from batchsvc.batches import estimate, progress, progress_queries, queries
from batchsvc.batches.estimate import AnyTime, Habits, Hands, Interval, Neighbour, WorkClock
from batchsvc.batches.finalize_queries import STOP_GRACE_MS
from batchsvc.batches.lifecycle import TERMINAL, Status
from batchsvc.batches.offpeak import Night, NightClock
from batchsvc.batches.progress_queries import Companion
from batchsvc.batches.tables import Batch
from batchsvc.db.session import database_now_ms

_PHASES = {
    Status.VALIDATING: "planning",
    Status.IN_PROGRESS: "running",
    Status.CANCELLING: "stopping",
    Status.FINALIZING: "merging",
    **dict.fromkeys(TERMINAL, "ended"),
}
_ROW_BYTES, _TOKEN_BYTES = 700, 5  # of the results: what stands around an answer, and a token of it


@dataclass(frozen=True, slots=True, kw_only=True)
class Outlook:
    """How far a batch is (`share` None: nothing known), when it will end (None: no rate known), and if in time."""

    phase: str
    share: float | None
    ends: Interval | None
    is_at_risk: bool

    def shown(self) -> dict[str, Any]:
        """The extensions of the batch object."""
        ends = self.ends
        return {
            "progress": {"phase": self.phase, "share": self.share},
            "estimated_completion_at": None
            if ends is None
            else {"low": math.floor(ends.low_ms / 1000), "high": math.ceil(ends.high_ms / 1000)},
            "at_risk": self.is_at_risk,
        }


def outlooks(session: Session, rows: Sequence[Batch], night: Night, habits: Habits) -> dict[str, Outlook]:
    """The outlook of each of these batches."""
    now = database_now_ms(session)
    running = [row for row in rows if row.status == Status.IN_PROGRESS]
    hands = progress_queries.hands(session, [row.id for row in running])
    mixed = _mixed(session, running, now, habits)
    digests = {row.model_digest or "" for row in running}.union(*(one.left for one in mixed.values()))
    companions = progress_queries.companions(session, digests)
    found = {}
    for row in rows:
        if row.status != Status.IN_PROGRESS:
            ends, is_at_risk = _ending(row, now, habits), False
        else:
            others = _neighbours(row, mixed.get(row.id), companions, habits, now)
            ends, is_at_risk = _running(row, now, night, habits, hands.get(row.id, Hands()), others)
            if row.id in mixed:
                ends, is_at_risk = mixed[row.id].slowest(ends, is_at_risk, row, now)
        share = _share(row)
        if share is None:  # nothing was seen of it, so whatever its end is worked out from isn't its own
            ends = None
        found[row.id] = Outlook(phase=_PHASES[Status(row.status)], share=share, ends=ends, is_at_risk=is_at_risk)
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class _Mixed:
    """What is left of a batch of several models, by digest; which of these have a worker, and how fast they all are."""

    left: Mapping[str, int]
    served: Collection[str]
    rates: Mapping[str, float]

    def slowest(self, ends: Interval | None, is_at_risk: bool, row: Batch, now: int) -> tuple[Interval | None, bool]:
        """An outlook by the rate of the whole, corrected by what its slowest model needs; a model that nobody serves
        ends nobody knows when."""
        needs = [1000 * tokens / self.rates[digest] for digest, tokens in self.left.items() if self.rates.get(digest)]
        known = self.left.keys() <= set(self.served) and len(needs) == len(self.left)
        is_late = now + max(needs, default=0.0) > row.expires_ms  # of what has no rate only a careful guess is known
        is_late |= not known and row.latest_start_ms is not None and row.latest_start_ms < now
        is_at_risk = is_at_risk or is_late
        if ends is None or not self.left.keys() <= set(self.served):
            return None, is_at_risk
        slowest = min(now + max(needs, default=0.0), max(row.expires_ms, now))
        return Interval(ends.low_ms, max(ends.high_ms, slowest)), is_at_risk


def _mixed(session: Session, running: Sequence[Batch], now: int, habits: Habits) -> dict[str, _Mixed]:
    """Those of these batches whose lines name their models."""
    batch_ids = [row.id for row in running if row.models is not None]
    if not batch_ids:
        return {}
    left = progress_queries.left_by_model(session, batch_ids)
    served = queries.served_digests(session, now - round(habits.death_ms))
    rates = progress_queries.model_rates(session, now)
    return {batch_id: _Mixed(left=left.get(batch_id, {}), served=served, rates=rates) for batch_id in batch_ids}


def _share(row: Batch) -> float | None:
    if row.in_progress_ms is None:
        return None
    if row.status in TERMINAL:
        return 1.0
    return progress.shown_share(row.progress_ppm) if row.progress_ppm else None


def _running(
    row: Batch, now: int, night: Night, habits: Habits, hands: Hands, others: Sequence[Neighbour]
) -> tuple[Interval | None, bool]:
    """When a batch ends whose lines run, and whether that is probably too late."""
    clock: WorkClock = NightClock(night, row.latest_start_ms) if row.is_offpeak else AnyTime()
    work, samples = progress_queries.work_of(row), progress_queries.samples_of(row.progress_samples)
    lines = estimate.lines_end(work, samples, habits, clock, now, hands=hands, neighbours=others)
    if lines is None:
        pace = sum(other.rate for other in others)
        needs_ms = work.left_tokens() / pace if pace else None
        too_late = row.latest_start_ms is not None and row.latest_start_ms < now and not hands.workers
        return None, clock.after_ms(now, needs_ms) > row.expires_ms if needs_ms is not None else too_late
    is_at_risk = lines.middle_ms > row.expires_ms
    if row.is_paused:  # until somebody resumes it, and nobody knows when
        return None, is_at_risk
    merging = _merging(row, habits)
    stopping = STOP_GRACE_MS if lines.high_ms > row.expires_ms else 0
    return lines.until(max(row.expires_ms, now)).later(merging.low_ms, merging.high_ms + stopping), is_at_risk


def _ending(row: Batch, now: int, habits: Habits) -> Interval | None:
    """When the results of a batch can be read that claims nothing more."""
    merging = _merging(row, habits)
    if row.status == Status.CANCELLING:
        stopped = max(now, (row.cancelling_ms or now) + STOP_GRACE_MS)
        return Interval(now, stopped).later(*merging)
    is_run_again = row.why == Status.COMPLETED and row.completed + row.failed < row.total  # lines of damaged parts
    if row.status == Status.FINALIZING and not is_run_again:
        return estimate.merge_left(
            merged_lines=row.merged_lines,
            total=row.total,
            since_ms=row.finalizing_ms or now,
            now_ms=now,
            whole=merging,
        )
    return None


def _merging(row: Batch, habits: Habits) -> Interval:
    work = progress_queries.work_of(row)
    size = _ROW_BYTES * row.total + _TOKEN_BYTES * (work.done_tokens + work.left_tokens())
    return estimate.merge_ms(row.total, size, habits)


def _neighbours(
    row: Batch, mixed: _Mixed | None, companions: Collection[Companion], habits: Habits, now: int
) -> list[Neighbour]:
    """The other batches of its models, as far as they need these. Inside a project the nearer deadline goes first;
    projects take turns."""
    rank = (-row.priority, row.expires_ms)
    digests = {row.model_digest or ""} if mixed is None else mixed.left.keys()
    found = []
    for other in companions:
        share = sum(share for digest, share in other.shares.items() if digest in digests)
        if other.id != row.id and share:
            found.append(
                Neighbour(
                    left_tokens=share * other.work.left_tokens(),
                    rate=share * estimate.rate(other.samples, now, habits, AnyTime()),
                    is_ahead=other.project_id == row.project_id and (-other.priority, other.expires_ms) < rank,
                )
            )
    return found
