"""What an engine tells of its speed, by lane: times to the first token and between tokens, tokens a second, steps.

Histograms count since the start, in fixed buckets, so that those of several engines can be added up; quantiles are of
the last answers.
"""

from __future__ import annotations

import math
import threading
from bisect import bisect_left
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

from engine.request import Lane
from engine.sched.counters import Counters

TTFT_BOUNDS_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
GAP_BOUNDS_S = (0.001, 0.0025, 0.005, 0.01, 0.015, 0.025, 0.04, 0.06, 0.1, 0.15, 0.25, 0.5, 1.0, 2.5, 10.0)
"""Of gaps between tokens, and of steps."""
SPEED_BOUNDS_TPS = (1.0, 2.0, 5.0, 10.0, 20.0, 40.0, 60.0, 100.0, 150.0, 250.0, 500.0, 1000.0)
_RECENT = 1024  # times that a quantile is taken of
_RATE_S = 10.0  # over which tokens a second are counted


def quantile(values: Sequence[float], share: float) -> float | None:
    """The least value that `share` of the values don't exceed; None of no values."""
    if not values:
        return None
    return sorted(values)[max(math.ceil(share * len(values)) - 1, 0)]


class Times:
    """A histogram, and the last values: of seconds, or of what `unit` says."""

    def __init__(self, bounds: tuple[float, ...], unit: str = "s") -> None:
        self._bounds, self._unit = bounds, unit
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0
        self._recent: deque[float] = deque(maxlen=_RECENT)

    def observe(self, value: float) -> None:
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value
        self._recent.append(value)

    def shown(self) -> dict[str, Any]:
        """Plain data: counts of each bucket, the last one for all beyond the bounds."""
        return {
            f"bounds_{self._unit}": list(self._bounds),
            "counts": list(self._counts),
            f"sum_{self._unit}": round(self._sum, 6),
            f"p50_{self._unit}": quantile(self._recent, 0.5),
            f"p99_{self._unit}": quantile(self._recent, 0.99),
        }


class Signals:
    """Told by the engine of requests, tokens and steps, all with the time of a steady clock. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._ttft = {lane: Times(TTFT_BOUNDS_S) for lane in Lane}
        self._gaps = {lane: Times(GAP_BOUNDS_S) for lane in Lane}
        self._speeds = {lane: Times(SPEED_BOUNDS_TPS, "tps") for lane in Lane}
        self._steps = Times(GAP_BOUNDS_S)
        self._arrived_s: dict[str, float] = {}
        self._told_s: dict[str, float] = {}  # when the last token of a sequence came
        self._began: dict[str, tuple[Lane, float, int]] = {}  # when its first one came, and how many came since
        self._marks: deque[tuple[float, Mapping[Lane, int]]] = deque()  # output tokens at times

    def arrive(self, request_id: str, now_s: float) -> None:
        """A request came in."""
        with self._lock:
            self._arrived_s.setdefault(request_id, now_s)

    def leave(self, request_id: str) -> None:
        """It ended, or was refused."""
        with self._lock:
            self._arrived_s.pop(request_id, None)

    def token(self, request_id: str, seq_id: str, lane: Lane, now_s: float) -> None:
        """A sequence has a further token. Several of one step came at once: that is one gap."""
        with self._lock:
            last_s = self._told_s.get(seq_id)
            if last_s is None:
                self._ttft[lane].observe(now_s - self._arrived_s.get(request_id, now_s))
                self._began[seq_id] = (lane, now_s, 0)
            else:
                _, first_s, num_since = self._began[seq_id]
                self._began[seq_id] = (lane, first_s, num_since + 1)
            if last_s is not None and last_s < now_s:
                self._gaps[lane].observe(now_s - last_s)
            self._told_s[seq_id] = now_s

    def end(self, seq_id: str) -> None:
        """A sequence ended. Its speed is that of its tokens after the first."""
        with self._lock:
            last_s = self._told_s.pop(seq_id, None)
            began = self._began.pop(seq_id, None)
            if last_s is not None and began is not None and last_s > began[1]:
                lane, first_s, num_since = began
                self._speeds[lane].observe(num_since / (last_s - first_s))

    def step(self, seconds: float) -> None:
        """A step took so long."""
        with self._lock:
            self._steps.observe(seconds)

    def shown(self, counters: Counters, now_s: float) -> dict[str, Any]:
        """`lanes` by name, and `step_times`: plain data."""
        with self._lock:
            rates = self._rates({lane: counted.output_tokens for lane, counted in counters.lanes.items()}, now_s)
            lanes = {
                lane.name.lower(): {
                    "running": counted.running,
                    "waiting": counted.waiting,
                    "prompt_tokens": counted.prompt_tokens,
                    "hit_tokens": counted.hit_tokens,
                    "computed_tokens": counted.computed_tokens,
                    "output_tokens": counted.output_tokens,
                    "output_tps": round(rates[lane], 3),
                    "ttft": self._ttft[lane].shown(),
                    "gaps": self._gaps[lane].shown(),
                    "speeds": self._speeds[lane].shown(),
                }
                for lane, counted in counters.lanes.items()
            }
            return {"lanes": lanes, "step_times": self._steps.shown()}

    def _rates(self, tokens: Mapping[Lane, int], now_s: float) -> dict[Lane, float]:
        """Since the oldest look that lies no further back than `_RATE_S`, or the last one before that."""
        while len(self._marks) > 1 and self._marks[1][0] <= now_s - _RATE_S:
            self._marks.popleft()
        then_s, before = self._marks[0] if self._marks else (now_s, tokens)
        if not self._marks or self._marks[-1][0] <= now_s - 1.0:
            self._marks.append((now_s, tokens))
        passed_s = max(now_s - then_s, 1e-3)
        return {lane: (tokens[lane] - before[lane]) / passed_s for lane in tokens}
