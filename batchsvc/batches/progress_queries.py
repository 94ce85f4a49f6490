"""SQL of progress: what a batch's row remembers of it, written where work is counted, so that reading writes nothing.

Who calls `note_...` holds the batch's row lock, and writes the counters in the same transaction.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from sqlalchemy import func, or_, select
from sqlalchemy.orm import Session, load_only

from batchsvc.batches import claim_queries, progress
from batchsvc.batches.estimate import Hands
from batchsvc.batches.lifecycle import Status
from batchsvc.batches.progress import Sample, Work
from batchsvc.batches.tables import Batch, Part, Unit

_MOST_COMPANIONS = 100  # more batches at once say no more about when one of them ends
_RATE_MS = 600_000  # how far back the rate of a model is looked for,
_RATE_LEAST_MS = 10_000  # and over which time at least
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
    """A running batch, as far as it matters to others of its models. `shares` is what of its work is left for each of
    these, by digest."""

    id: str
    project_id: str
    shares: Mapping[str, float]
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
    is_theirs = or_(Batch.model_digest.in_(digests), Batch.model_digest.is_(None))  # of several models, if of none
    found = select(Batch).where(*running, is_theirs).options(load_only(*_COMPANION))
    rows = session.scalars(found.order_by(Batch.expires_ms).limit(_MOST_COMPANIONS)).all()
    mixed = left_by_model(session, [row.id for row in rows if row.model_digest is None])
    return [
        Companion(
            id=row.id,
            project_id=row.project_id,
            shares=shares_of(mixed.get(row.id, {})) if row.model_digest is None else {row.model_digest: 1.0},
            priority=row.priority,
            expires_ms=row.expires_ms,
            work=work_of(row),
            samples=samples_of(row.progress_samples),
        )
        for row in rows
    ]


def left_by_model(session: Session, batch_ids: Collection[str]) -> dict[str, dict[str, int]]:
    """Predicted work that running batches still have, by the models of their units. Served by units' batch_id."""
    if not batch_ids:
        return {}
    counted = (
        select(Unit.batch_id, Unit.model_digest, func.sum(claim_queries.remaining_tokens()))
        .where(Unit.batch_id.in_(batch_ids), Unit.state.in_(("ready", "leased")))
        .group_by(Unit.batch_id, Unit.model_digest)
    )
    found: dict[str, dict[str, int]] = {}
    for batch_id, digest, tokens in session.execute(counted):
        found.setdefault(batch_id, {})[digest] = int(tokens)
    return found


def shares_of(left: Mapping[str, int]) -> dict[str, float]:
    """The same work as shares of all of it."""
    total = sum(left.values())
    return {digest: tokens / total for digest, tokens in left.items()} if total else {}


def model_rates(session: Session, now_ms: int) -> dict[str, float]:
    """Predicted tokens a second that a model's workers finish, by digest. Served by ix_parts_created."""
    rows = session.execute(
        select(Unit.model_digest, func.sum(Part.est_tokens), func.min(Part.created_ms))
        .join(Unit, Unit.id == Part.unit_id)
        .where(Part.created_ms > now_ms - _RATE_MS, Part.unit_id.is_not(None), Part.is_void.is_(False))
        .group_by(Unit.model_digest)
    )
    spans = {digest or "": (int(tokens or 0), now_ms - first_ms) for digest, tokens, first_ms in rows}
    return {digest: tokens * 1000 / span_ms for digest, (tokens, span_ms) in spans.items() if span_ms >= _RATE_LEAST_MS}
