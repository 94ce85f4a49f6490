"""Guesses how long answers get, from how long their siblings got; pure arithmetic on counts.

Short answers end first, so the lengths of those that ended mislead as long as others run. Counted is therefore how many
answers reached a length, ended or not, and how many of them ended there; the share that goes on beyond a length is the
product of the shares that went on before it (Kaplan and Meier's estimate).
"""

from __future__ import annotations

import math
from bisect import bisect_right

import numpy as np

from engine.request import Request
from engine.sched.budget import is_known

_STARTS = sorted({round(2 ** (step / 8)) for step in range(8 * 24)})
"""Lengths at which a bucket begins: every one at first, then eight an octave, up to 16 million tokens."""
_BUCKET_AT = {start: bucket for bucket, start in enumerate(_STARTS)}


class Lengths:
    """What is known of the lengths of one kind of answer; recent ones weigh more. As long as nothing is, a quarter of
    `max_tokens` is taken for the mean."""

    _KEEPS = 1 - 1 / 256  # the share of its weight that an answer keeps when the next one ends
    _DOUBT = 4.0  # answers that the first guess weighs

    def __init__(self, max_tokens: int) -> None:
        passed = np.array([*_STARTS, 2 * _STARTS[-1]], dtype=np.float64) - 1  # tokens before each bucket
        goes_on = self._DOUBT * np.where(passed < max_tokens, np.exp(-4 * passed / max_tokens), 0.0)
        self._reached = goes_on[:-1].copy()
        self._ended = goes_on[:-1] - goes_on[1:]
        self._beyond: list[float] | None = None  # share of answers that reach each bucket

    def observe_reached(self, bucket: int) -> None:
        self._reached[bucket] += 1.0
        self._beyond = None

    def observe_end(self, num_outputs: int) -> None:
        self._reached *= self._KEEPS
        self._ended *= self._KEEPS
        self._ended[self._bucket(num_outputs)] += 1.0
        self._beyond = None

    def draw_beyond(self, num_outputs: int, draw: float) -> int:
        """The length, above `num_outputs`, that a share of `draw` of the answers that are longer don't exceed."""
        if self._beyond is None:
            ends = np.minimum(self._ended / np.maximum(self._reached, 1e-9), 1.0)
            self._beyond = [1.0, *np.cumprod(1.0 - ends).tolist()]
        beyond = self._beyond
        bucket = self._bucket(num_outputs + 1)
        start, end = _STARTS[bucket], _STARTS[bucket + 1]
        left = beyond[bucket] + (beyond[bucket + 1] - beyond[bucket]) * (num_outputs + 1 - start) / (end - start)
        wanted = left * (1.0 - draw)
        if wanted < 1e-9:  # nobody got that far
            return num_outputs + num_outputs // 4 + 16
        found = max(bisect_right(beyond, -wanted, key=lambda share: -share) - 1, bucket)
        if found == len(beyond) - 1:  # more went on than were seen to end
            return _STARTS[-1]
        start, end = _STARTS[found], _STARTS[found + 1]
        share = (beyond[found] - wanted) / max(beyond[found] - beyond[found + 1], 1e-9)
        return max(math.ceil(start + share * (end - start)) - 1, num_outputs + 1)

    def _bucket(self, num_outputs: int) -> int:
        return min(bisect_right(_STARTS, num_outputs) - 1, len(_STARTS) - 2)


class Forecast:
    """Guesses how long answers get, and how much of the pool to keep back for wrong guesses.

    A guess is drawn from what siblings (requests of one project with one `max_tokens`) did that got as far. So the
    guesses for many are spread as their ends will be: one mean or quantile for all would have them end together and
    reach a peak that never comes, and a third of the pool would stay empty. `reserve` is the share of the pool kept
    free: a preemption that memory forced raises it at once, every finished request lets it sink.
    """

    _MOST_SIBLINGS = 256
    _MOST_RESERVE = 0.25

    def __init__(self) -> None:
        self.reserve = 0.0
        self._siblings: dict[tuple[str, int], Lengths] = {}

    def output_tokens(self, request: Request, num_outputs: int, max_outputs: int, draw: float) -> int:
        """Expected length of an answer that has `num_outputs` tokens and at most `max_outputs`. `draw` in [0, 1) is
        the request's own and evenly spread over requests."""
        params = request.params
        if is_known(params):
            return max_outputs
        guess = self._lengths(request).draw_beyond(num_outputs, draw)
        return min(max_outputs, max(guess, params.min_tokens))

    def observe_token(self, request: Request, num_outputs: int) -> None:
        """An answer has got this far."""
        if num_outputs in _BUCKET_AT and not is_known(request.params):
            self._lengths(request).observe_reached(_BUCKET_AT[num_outputs])

    def observe_end(self, request: Request, num_outputs: int) -> None:
        self.reserve *= 0.98
        if not is_known(request.params):
            self._lengths(request).observe_end(num_outputs)

    def observe_preemption(self) -> None:
        self.reserve = min(self.reserve + 0.01, self._MOST_RESERVE)

    def _lengths(self, request: Request) -> Lengths:
        key = (request.salt, request.params.max_tokens)
        lengths = self._siblings.get(key)
        if lengths is None:
            if len(self._siblings) >= self._MOST_SIBLINGS:
                del self._siblings[next(iter(self._siblings))]
            lengths = self._siblings[key] = Lengths(request.params.max_tokens)
        return lengths
