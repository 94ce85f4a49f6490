"""An estimate from a sample of lines: what all of them probably hold, as intervals. Pure.

Lines are drawn at random in one pass (a reservoir). The number of input tokens follows from the mean of the sample.
How many of them are cached doesn't: sharing grows with the number of lines, so a sample shows too little of it. But
each further line adds, on average, no more new tokens than the one before. What a line would add after all others of
the sample is measured (its prompt, less what it shares with any of them), and so is what it would add after half of
them. Every further line adds at most that (high), and what it adds may go on falling by the same share for every half
of a sample, as it does when a file says the same few things over and over (low). To both come two standard errors.
A sample is not a quote: the true numbers may lie outside.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from batchsvc.batches.quote_figures import Interval
from batchsvc.batches.window import PlannedRequest
from batchsvc.files.lines import Record
from engine.sched.order import GRANULE_TOKENS, common_prefix_tokens

_ERRORS = 2.0  # standard errors on either side
_Floats = np.ndarray[tuple[int, ...], np.dtype[np.float64]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """Of a whole file: requests that can be run, input tokens, and those of them that must be computed."""

    lines: int
    input_tokens: Interval
    uncached_tokens: Interval


class Reservoir:
    """Draws at most `size` records of a stream, each as likely as any other; the same ones for the same seed."""

    def __init__(self, size: int, seed: str) -> None:
        self._size = size
        self._random = random.Random(seed)  # noqa: S311  a sample, no secret
        self.num_lines = 0
        self._ordinals: dict[int, int] = {}

    def choose(self, records: Iterable[Record]) -> Iterator[Record]:
        """The drawn records, in order, after all were read."""
        kept: list[tuple[int, Record]] = []
        for record in records:
            if len(kept) < self._size:
                kept.append((self.num_lines, record))
            elif (place := self._random.randint(0, self.num_lines)) < self._size:
                kept[place] = (self.num_lines, record)
            self.num_lines += 1
        kept.sort(key=lambda pair: pair[0])
        self._ordinals = {record.line_no: ordinal for ordinal, record in kept}
        return iter([record for _, record in kept])

    def ordinal(self, line_no: int) -> int:
        """How many lines of the file stand before a drawn one."""
        return self._ordinals[line_no]


def estimate(
    windows: Sequence[Sequence[PlannedRequest]], uncached_tokens: int, *, drawn: int, num_lines: int
) -> Estimate:
    """From the drawn requests of each window, and what of them must be computed when these windows are planned.

    `drawn` lines were read of `num_lines`; those that aren't among the requests can't be run.
    """
    requests = [request for window in windows for request in window]
    count = len(requests)
    if not count:
        nothing = Interval(low=0, expected=0, high=0)
        return Estimate(lines=0, input_tokens=nothing, uncached_tokens=nothing)
    lines = round(num_lines * count / drawn)
    more = lines - count
    prompts = np.array([request.prompt_tokens for request in requests], np.float64)
    input_tokens = _spread(float(prompts.sum()) * lines / count, lines * _standard_error(prompts) if more else 0.0)
    news = np.array([new for window in windows for new in _new_tokens(window)], np.float64)
    before = np.array([new for window in windows for new in _after_half(window)], np.float64)
    error = _ERRORS * more * _standard_error(news)
    high = min(uncached_tokens + more * float(news.mean()) + error, input_tokens.high)
    falling = uncached_tokens + float(news.mean()) * _falling(count, lines, _pace(news, before))
    low = min(max(float(uncached_tokens), falling - error), high)
    uncached = Interval(low=math.floor(low), expected=round((low + high) / 2), high=math.ceil(high))
    return Estimate(lines=lines, input_tokens=input_tokens, uncached_tokens=uncached)


def _pace(news: _Floats, before: _Floats) -> float:
    """The ratio of what is new after all to what is new after half, less two standard errors; within 0 and 1."""
    if not before.any():
        return 1.0
    ratio = float(news.sum() / before.sum())
    error = _standard_error(news - ratio * before) / float(before.mean())
    return min(1.0, max(0.0, ratio - _ERRORS * error))


def _falling(count: int, lines: int, pace: float) -> float:
    """How many lines' worth of new tokens the lines from `count` to `lines` add, if it falls by `pace` for every
    `count / 2` lines."""
    halves = 2 * (lines - count) / count
    if pace >= 1 or halves == 0:
        return float(lines - count)
    if pace <= 0:
        return 0.0
    return float(count / 2 * (1 - pace**halves) / -math.log(pace))


def _new_tokens(window: Sequence[PlannedRequest]) -> list[int]:
    """What each request would have to compute if it came after all others of its window."""
    order = sorted(range(len(window)), key=lambda index: window[index].prompt)
    shared = [common_prefix_tokens(window[a].prompt, window[b].prompt) for a, b in pairwise(order)]
    folds: dict[tuple[bytes, bytes], int] = {}
    for request in window:
        if request.fold_key is not None:
            key = (request.prompt, request.fold_key)
            folds[key] = folds.get(key, 0) + 1
    found = [0] * len(window)
    for place, index in enumerate(order):
        request = window[index]
        most = max(shared[max(0, place - 1) : place + 1], default=0)
        cached = min(most, request.prompt_tokens - 1)
        is_repeat = request.fold_key is not None and folds[request.prompt, request.fold_key] > 1
        found[index] = 0 if is_repeat else request.prompt_tokens - cached + cached % GRANULE_TOKENS
    return found


def _after_half(window: Sequence[PlannedRequest]) -> list[int]:
    """The same after half of them: every second one."""
    found = [0] * len(window)
    found[::2], found[1::2] = _new_tokens(window[::2]), _new_tokens(window[1::2])
    return found


def _standard_error(values: _Floats) -> float:
    return float(values.std(ddof=1)) / math.sqrt(len(values)) if len(values) > 1 else 0.0


def _spread(middle: float, error: float) -> Interval:
    low, high = max(0.0, middle - _ERRORS * error), middle + _ERRORS * error
    return Interval(low=math.floor(low), expected=round(middle), high=math.ceil(high))
