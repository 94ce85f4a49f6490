"""SQL of progress: what a batch's row remembers of it, written where work is counted, so that reading writes nothing.

Who calls `note_...` holds the batch's row lock, and writes the counters in the same transaction.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from sqlalchemy import func, select
from sqlalchemy.orm import Session, load_only

from batchsvc.batches import progress
from batchsvc.batches.estimate import Hands
from batchsvc.batches.lifecycle import Status
from batchsvc.batches.progress import Sample, Work
from batchsvc.batches.tables import Batch, Part, Unit

_MOST_COMPANIONS = 100  # more batches at once say no more about when one of them ends
_COMPANION = (
    Batch.id,
    Batch.project_id,
    Batch.model_digest,
    Batch.priority,
    Batch.expires_ms,
    Batch.total,
    Batch.completed,
    Batch.failed,
    Batch.est_tokens,
    Batch.est_done_tokens,
    Batch.sure_tokens,
    Batch.input_tokens,
    Batch.cached_tokens,
    Batch.output_tokens,
    Batch.running_tokens,
    Batch.running_lines,
    Batch.progress_samples,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Companion:
    """A running batch, as far as it matters to others of its model."""

    id: str
    project_id: str
    model_digest: str
    priority: int
    expires_ms: int
    work: Work
    samples: Sequence[Sample]


def samples_of(stored: list[list[int]] | None) -> list[Sample]:
    """The samples that a row remembers."""
    return [Sample(*pair) for pair in stored or ()]


def work_of(batch: Batch) -> Work:
    """The work of a batch as its row counts it; in lines, if it was planned before tokens were predicted."""
    ended = batch.completed + batch.failed
    if not batch.est_tokens:
        return Work(est_tokens=batch.total, lines=batch.total, finished_tokens=ended, took_tokens=ended)
    return Work(
        est_tokens=batch.est_tokens,
        lines=batch.total,
        finished_tokens=batch.est_done_tokens,
        took_tokens=batch.input_tokens - batch.cached_tokens + batch.output_tokens,
        running_tokens=batch.running_tokens,
        running_lines=batch.running_lines,
        sure_tokens=batch.sure_tokens,
    )


def note_work(batch: Batch, now_ms: int) -> None:
    """Remember how far the lines of a batch are; call it when its counters of work have changed."""
    work = work_of(batch)
    kept = progress.with_sample(samples_of(batch.progress_samples), Sample(now_ms, work.done_tokens))
    batch.progress_samples = [list(sample) for sample in kept]
    batch.progress_ppm = max(batch.progress_ppm, progress.running_ppm(work))


def set_running(batch: Batch, unit: Unit, *, lines: int, tokens: int) -> None:
    """Count what runs of a unit in the place of what ran before."""
    batch.running_tokens += tokens - unit.running_tokens
    batch.running_lines += lines - unit.running_lines
    unit.running_tokens, unit.running_lines = tokens, lines


def note_part(batch: Batch, unit: Unit, part: Part) -> None:
    """Remember a part that counts from now on: its lines don't run any more, whatever their owner saves next."""
    batch.est_done_tokens += part.est_tokens
    is_done = unit.num_done >= unit.num_lines
    lines = 0 if is_done else max(0, unit.running_lines - part.lines_ok - part.lines_err)
    set_running(batch, unit, lines=lines, tokens=max(0, unit.running_tokens - part.output_tokens) if lines else 0)
    note_work(batch, part.created_ms)


def note_merge(batch: Batch, merged_lines: int) -> None:
    """Remember how many lines a finalizer has put together."""
    batch.merged_lines = max(batch.merged_lines, merged_lines)
    ppm = progress.merging_ppm(merged_lines=batch.merged_lines, total=batch.total)
    batch.progress_ppm = max(batch.progress_ppm, ppm)


def hands(session: Session, batch_ids: Collection[str]) -> dict[str, Hands]:
    """Who works on these batches. Served by ix_units_lease."""
    if not batch_ids:
        return {}
    left = Unit.est_tokens * (Unit.num_lines - Unit.num_done) / Unit.num_lines
    counted = (
        select(Unit.batch_id, func.count(Unit.owner.distinct()), func.max(left))
        .where(Unit.state == "leased", Unit.batch_id.in_(batch_ids))
        .group_by(Unit.batch_id)
    )
    return {row[0]: Hands(int(row[1]), float(row[2])) for row in session.execute(counted)}


def companions(session: Session, digests: Collection[str]) -> list[Companion]:
    """The running batches of these models, those with the nearest deadlines. Served by ix_batches_status."""
    if not digests:
        return []
    running = (Batch.status == Status.IN_PROGRESS, Batch.is_paused.is_(False), Batch.has_quota, Batch.has_budget)
    found = select(Batch).where(*running, Batch.model_digest.in_(digests)).options(load_only(*_COMPANION))
    return [
        Companion(
            id=row.id,
            project_id=row.project_id,
            model_digest=row.model_digest or "",
            priority=row.priority,
            expires_ms=row.expires_ms,
            work=work_of(row),
            samples=samples_of(row.progress_samples),
        )
        for row in session.scalars(found.order_by(Batch.expires_ms).limit(_MOST_COMPANIONS))
    ]
