"""SQL of progress: what a batch's row remembers of it, written where work is counted, so that reading writes nothing.

Callers hold the batch's row lock, and write the counters in the same transaction.
"""

from __future__ import annotations

from batchsvc.batches import progress
from batchsvc.batches.progress import Sample, Work
from batchsvc.batches.tables import Batch


def samples_of(stored: list[list[int]] | None) -> list[Sample]:
    """The samples that a row remembers."""
    return [Sample(*pair) for pair in stored or ()]


def work_of(batch: Batch) -> Work:
    """The work of a batch as its row counts it."""
    return Work(
        est_tokens=batch.est_tokens,
        lines=batch.total,
        finished_tokens=batch.est_done_tokens,
        took_tokens=batch.input_tokens - batch.cached_tokens + batch.output_tokens,
        running_tokens=batch.running_tokens,
    )


def note_work(batch: Batch, now_ms: int) -> None:
    """Remember how far the lines of a batch are; call it when its counters of work have changed."""
    work = work_of(batch)
    kept = progress.with_sample(samples_of(batch.progress_samples), Sample(now_ms, work.done_tokens))
    batch.progress_samples = [list(sample) for sample in kept]
    batch.progress_ppm = max(batch.progress_ppm, progress.running_ppm(work))


def note_merge(batch: Batch, merged_lines: int) -> None:
    """Remember how many lines a finalizer has put together."""
    batch.merged_lines = max(batch.merged_lines, merged_lines)
    ppm = progress.merging_ppm(merged_lines=batch.merged_lines, total=batch.total)
    batch.progress_ppm = max(batch.progress_ppm, ppm)
