"""How far a batch is: a share of its predicted token work, and the few samples from which its rate is told.

Work is counted in tokens: what finished lines took and what running sequences have generated is done; what is left is
predicted, by the plan at first and by how the lines that ended compare with it later. Short answers end first, so they
tell the least that is left; the most is told by counting what still runs against those that ended, and by expecting
of an answer under way as much again as it has.

The last `MERGING_PPM` of a batch are for putting its results together. Who shows a share shows the most that was ever
true (`batches.progress_ppm`): predictions grow and parts may be found damaged, and nobody sees that as a step back.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

WHOLE_PPM = 1_000_000
MERGING_PPM = 20_000
_RUNNING_PPM = WHOLE_PPM - MERGING_PPM
_MOST_PPM = WHOLE_PPM - 1  # the last millionth is for the moment when the results can be read
_LINES_OF_BELIEF = 4.0  # lines that have to end before they weigh as much as the plan's prediction
_LEAST_LEFT = 0.05  # of what unfinished lines were predicted to take: they may be just before their end
_MOST_SAMPLES = 24


class Sample(NamedTuple):
    """Tokens of the work that was done at a time."""

    at_ms: int
    tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """The work of a batch. The plan predicted `est_tokens` for its `lines`, `sure_tokens` of it for lines whose length
    is certain, and `finished_tokens` for those that ended, which took `took_tokens`. `running_lines` are under way and
    have generated `running_tokens`."""

    est_tokens: int
    lines: int
    finished_tokens: int = 0
    took_tokens: int = 0
    running_tokens: int = 0
    running_lines: int = 0
    sure_tokens: int = 0

    @property
    def done_tokens(self) -> int:
        return self.took_tokens + self.running_tokens

    @property
    def ended_lines(self) -> float:
        """How many lines of the usual size the finished ones are."""
        return self.finished_tokens * self.lines / self.est_tokens if self.est_tokens else 0.0

    @property
    def unfinished_lines(self) -> float:
        """How many lines of the usual size are left."""
        return max(0.0, self.lines - self.ended_lines)

    @property
    def long_tokens(self) -> float:
        """What a line under way takes yet, if it is one of the long ones: as much as it has, or as any other."""
        age = self.running_tokens / self.running_lines if self.running_lines else 0.0
        return max(age, self._line_tokens * self._stretch(self.running_tokens))

    @property
    def guessed(self) -> float:
        """The share of the predictions that are guesses."""
        return 1 - min(self.sure_tokens / self.est_tokens, 1.0) if self.est_tokens else 1.0

    def left_tokens(self, caution: float = 1.0) -> float:
        """What is left: the least that is likely at a caution of 0, the most at 1."""
        unfinished = max(0, self.est_tokens - self.finished_tokens)
        least = max(unfinished * self._stretch(0.0) - self.running_tokens, _LEAST_LEFT * unfinished)
        waiting = max(0.0, unfinished - self.running_lines * self._line_tokens) * self._stretch(self.running_tokens)
        running = min(self.running_lines, self.unfinished_lines) * self.long_tokens
        return least + caution * self.guessed * max(0.0, waiting + running - least)

    @property
    def _line_tokens(self) -> float:
        return self.est_tokens / max(self.lines, 1)

    def _stretch(self, running_tokens: float) -> float:
        """How much longer than predicted lines get."""
        belief = (_LINES_OF_BELIEF + self.running_lines) * self._line_tokens
        expected = self.finished_tokens + belief
        return (self.took_tokens + running_tokens + belief) / expected if expected else 1.0


def running_ppm(work: Work) -> int:
    """The share of a batch whose lines still run."""
    left = work.left_tokens()
    if left <= 0:
        return _RUNNING_PPM
    return int(_RUNNING_PPM * (work.done_tokens / (work.done_tokens + left)))


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
