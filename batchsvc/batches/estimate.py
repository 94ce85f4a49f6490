"""When a batch will end: an interval from what was seen of its rate, of its neighbours, and of what may still go wrong.

1. The rate is told from samples of the work done, on a clock that stands still while the batch may not run. Nothing is
   said before work was seen for as long as workers keep finished lines to themselves.
2. Rates bracket what is to come: over all the time seen, over its last third, and without the times at which nothing
   was done. How much the rate varied from one eighth of the time to the next says how far they may be wrong.
3. Batches of the same model share the workers: the earliest end assumes that each leaves as it ends, the latest that
   those with a claim to go first do.
4. What is left is as uncertain as the lengths of answers, the fewer have ended the more. The latest end also holds
   one worker that dies, and a tail in which only the longest answers are left, or one worker's last unit.
5. A deadline cuts both: what isn't done by then is never run.

All arithmetic is on tokens of work (batches/progress.py); no clock is read and no row.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple, Protocol

from batchsvc.batches.progress import Sample, Work

_SEGMENTS = 8
_SPREAD = 2.0  # deviations of the mean rate
_LEAST_ERROR = 0.15
_MOST_ERROR = 1.5
_LINE_ERROR = 2.0  # how far one line may be off, as a share
_MOST_IDLE = 0.75  # of the time seen
_MOST_TAIL = 3.0  # mean times of a line that the last ones take
_LOWEST_RATE = 1 / 3  # of what was seen overall, however quiet the last third was
_MERGE_LINES_PER_S = (100_000.0, 8_000.0)  # at best, and counted on
_MERGE_BYTES_PER_S = (200e6, 20e6)


class WorkClock(Protocol):
    """The times at which a batch may run."""

    def worked_ms(self, since_ms: float, until_ms: float) -> float:
        """How much of a span it might run."""

    def after_ms(self, since_ms: float, work_ms: float) -> float:
        """When so much time to run has passed."""


class AnyTime:
    """The clock of a batch that may always run."""

    def worked_ms(self, since_ms: float, until_ms: float) -> float:
        return until_ms - since_ms

    def after_ms(self, since_ms: float, work_ms: float) -> float:
        return since_ms + work_ms


class HabitSettings(Protocol):
    """What the settings say of the habits."""

    @property
    def flush_s(self) -> float: ...
    @property
    def lease_s(self) -> float: ...
    @property
    def reaper_s(self) -> float: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Habits:
    """How a deployment works: how long workers keep lines to themselves, and how long a death goes unseen."""

    flush_ms: float = 5_000
    death_ms: float = 40_000
    tick_ms: float = 5_000

    @classmethod
    def from_settings(cls, settings: HabitSettings) -> Habits:
        """Those of a deployment."""
        return cls(
            flush_ms=settings.flush_s * 1000,
            death_ms=(settings.lease_s + 2 * settings.reaper_s) * 1000,
            tick_ms=settings.reaper_s * 1000,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Neighbour:
    """Another batch of the same model. `is_ahead`: its units are claimed before ours."""

    left_tokens: float
    rate: float
    is_ahead: bool


class Hands(NamedTuple):
    """Who works on a batch: how many workers hold units of it, and the predicted tokens of the largest of these."""

    workers: int = 0
    unit_tokens: float = 0.0


class Interval(NamedTuple):
    """The time in which something will end, in milliseconds since the epoch."""

    low_ms: float
    high_ms: float

    @property
    def middle_ms(self) -> float:
        return (self.low_ms + self.high_ms) / 2

    def until(self, deadline_ms: float) -> Interval:
        return Interval(min(self.low_ms, deadline_ms), min(self.high_ms, deadline_ms))

    def later(self, low_ms: float, high_ms: float) -> Interval:
        return Interval(self.low_ms + low_ms, self.high_ms + high_ms)


class _Rates(NamedTuple):
    """Tokens a millisecond: over all that was seen, lately, and while anything was done; their relative error, and
    the longest silence."""

    overall: float
    recent: float
    busy: float
    error: float
    longest_gap_ms: float


def rate(samples: Sequence[Sample], now_ms: float, habits: Habits, clock: WorkClock) -> float:
    """Tokens a millisecond that a batch makes at present; 0: not known, or none."""
    seen = _rates(samples, now_ms, habits, clock)
    return seen.recent if seen else 0.0


def lines_end(
    work: Work,
    samples: Sequence[Sample],
    habits: Habits,
    clock: WorkClock,
    now_ms: float,
    *,
    hands: Hands = Hands(),
    neighbours: Sequence[Neighbour] = (),
) -> Interval | None:
    """When the last line of a batch ends, were there no deadline. None: no rate is known."""
    if work.finished_tokens >= work.est_tokens:
        return Interval(now_ms, now_ms)
    seen = _rates(samples, now_ms, habits, clock)
    if seen is None:
        return None
    fast = max(seen.overall, seen.recent, seen.busy)
    slow = max(min(seen.overall, seen.recent), _LOWEST_RATE * seen.overall)
    error = 1 + math.hypot(seen.error, work.guessed * _LINE_ERROR / math.sqrt(work.ended_lines + 1))
    least, most = work.left_tokens(0.0) / error, work.left_tokens(1.0) * error
    low, high = least / fast, most / slow
    if neighbours:
        total = fast + sum(other.rate for other in neighbours)
        shared = sum(min(other.left_tokens, least * other.rate / fast) for other in neighbours)
        ahead = sum(other.left_tokens for other in neighbours if other.is_ahead)
        low = min(low, (least + shared) / total)
        high = max(high, (most + ahead * error) / (total * slow / fast))
    high += _tail_ms(work, hands, most, slow) + max(habits.death_ms, seen.longest_gap_ms) + habits.flush_ms
    low -= habits.flush_ms  # workers keep lines to themselves that are finished
    return Interval(clock.after_ms(now_ms, max(low, 0.0)), clock.after_ms(now_ms, high))


def merge_ms(lines: int, size_bytes: float, habits: Habits) -> Interval:
    """How long it takes, from the last line on, until the results can be read: at best and counted on."""
    low, high = (
        1000 * (lines / lines_per_s + size_bytes / bytes_per_s)
        for lines_per_s, bytes_per_s in zip(_MERGE_LINES_PER_S, _MERGE_BYTES_PER_S, strict=True)
    )
    return Interval(low, high + 2 * habits.tick_ms + 1000)


def merge_left(*, merged_lines: int, total: int, since_ms: float, now_ms: float, whole: Interval) -> Interval:
    """When the results can be read, once merging has begun: by its own rate as soon as that is seen."""
    if merged_lines <= 0 or now_ms <= since_ms:
        return Interval(now_ms, now_ms).later(*whole)
    left_ms = (now_ms - since_ms) * max(0, total - merged_lines) / merged_lines
    return Interval(now_ms, now_ms).later(left_ms / 2, 2 * left_ms + whole.high_ms / 4)


def _tail_ms(work: Work, hands: Hands, most: float, slow: float) -> float:
    """How long the last ones run on when most have ended: lines that run side by side and none faster for that, and
    the last unit of one worker while the others have none."""
    line_ms = work.running_lines * work.long_tokens / slow
    alone_ms = (hands.workers - 1) * min(most, hands.unit_tokens) / 2 / slow if hands.workers else 0.0
    return line_ms * min(math.log1p(min(work.unfinished_lines, work.running_lines)), _MOST_TAIL) + alone_ms


def _rates(samples: Sequence[Sample], now_ms: float, habits: Habits, clock: WorkClock) -> _Rates | None:
    if len(samples) < 2:
        return None
    first, last = samples[0], samples[-1]
    times = [clock.worked_ms(first.at_ms, sample.at_ms) for sample in samples]
    tokens = [float(sample.tokens - first.tokens) for sample in samples]
    silent_ms = clock.worked_ms(last.at_ms, now_ms) - 1.5 * habits.flush_ms
    if silent_ms > 0:  # longer than lines are kept: nothing was done
        times.append(times[-1] + silent_ms)
        tokens.append(tokens[-1])
    span_ms = times[-1]
    if span_ms < habits.flush_ms or tokens[-1] <= 0:
        return None
    marks = [_at(times, tokens, span_ms * index / _SEGMENTS) for index in range(_SEGMENTS + 1)]
    steps = [after - before for before, after in pairwise(marks)]
    mean = tokens[-1] / _SEGMENTS
    deviation = math.sqrt(sum((step - mean) ** 2 for step in steps) / (_SEGMENTS - 1)) / mean
    error = math.hypot(_SPREAD * deviation * math.sqrt(2 / _SEGMENTS), _LEAST_ERROR, habits.flush_ms / span_ms)
    gaps = [after - before for before, after in pairwise(times)]
    idle_ms = sum(max(0.0, gap - 2 * habits.flush_ms - span_ms / _SEGMENTS) for gap in gaps)
    return _Rates(
        overall=tokens[-1] / span_ms,
        busy=tokens[-1] / (span_ms - min(idle_ms, _MOST_IDLE * span_ms)),
        recent=(tokens[-1] - _at(times, tokens, span_ms * 2 / 3)) / (span_ms / 3),
        error=min(error, _MOST_ERROR),
        longest_gap_ms=max(gaps),
    )


def _at(times: Sequence[float], values: Sequence[float], at: float) -> float:
    """The value at a time, on straight lines between those that are known."""
    for index in range(1, len(times)):
        if at <= times[index]:
            before, after = times[index - 1], times[index]
            share = (at - before) / (after - before) if after > before else 1.0
            return values[index - 1] + share * (values[index] - values[index - 1])
    return values[-1]
