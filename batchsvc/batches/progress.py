"""How far a batch is: a share of its predicted work, and the few samples of it from which its rate is told.

Work is counted in *predicted tokens*: a finished line counts what it was predicted to take, so that the shares of all
lines add up to the whole however long the answers got; a sequence that still runs counts what it has generated. The
last `MERGING_PPM` of a batch are for putting its results together. Who shows a share shows the most that was ever
true (`batches.progress_ppm`): predictions may grow and parts may be found damaged, and nobody sees that as a step back.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

WHOLE_PPM = 1_000_000
MERGING_PPM = 20_000
_RUNNING_PPM = WHOLE_PPM - MERGING_PPM
_MOST_PPM = WHOLE_PPM - 1  # the last millionth is for the moment when the results can be read
_MOST_RUNNING = 0.95  # of the work that is left: what runs may yet take longer than it was predicted to
_MOST_SAMPLES = 24


class Sample(NamedTuple):
    """Predicted tokens of the work that was done at a time."""

    at_ms: int
    tokens: int


def done_tokens(*, est_tokens: int, finished_tokens: int, running_tokens: int) -> int:
    """The work that is done of `est_tokens`: of finished lines, and of sequences that still run."""
    left = max(0, est_tokens - finished_tokens)
    return min(finished_tokens, est_tokens) + min(running_tokens, int(_MOST_RUNNING * left))


def running_ppm(*, done: int, of: int) -> int:
    """The share of a batch whose lines still run."""
    return _RUNNING_PPM * min(done, of) // of if of > 0 else 0


def merging_ppm(*, merged_lines: int, total: int) -> int:
    """The share of a batch whose results are being put together."""
    merged = min(merged_lines, total)
    return min(_RUNNING_PPM + (MERGING_PPM * merged // total if total else 0), _MOST_PPM)


def shown_share(ppm: int) -> float:
    """A share with four digits; rounded down, so that it is 1.0 at the end only."""
    return ppm // 100 / 10_000


def with_sample(samples: Sequence[Sample], new: Sample) -> list[Sample]:
    """The samples with a new one. The first and the last are always kept; of too many, the one in between goes that
    stands closest to its neighbours. Where work was undone, the past is lowered with it: rates are differences."""
    kept = list(samples)
    if kept and new.tokens < kept[-1].tokens:
        fall = kept[-1].tokens - new.tokens
        kept = [Sample(sample.at_ms, sample.tokens - fall) for sample in kept]
    if kept and new.at_ms <= kept[-1].at_ms:
        new = Sample(kept.pop().at_ms, new.tokens)
    kept.append(new)
    if len(kept) > _MOST_SAMPLES:
        del kept[min(range(1, len(kept) - 1), key=lambda index: kept[index + 1].at_ms - kept[index - 1].at_ms)]
    return kept
