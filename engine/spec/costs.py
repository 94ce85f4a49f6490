"""What a step costs, by its rows: measured as steps go by, guessed from the nearest measured size until then."""

from __future__ import annotations

from bisect import bisect_left

ROW_SHARE = 1 / 24
"""Cost of one more row over that of a step without any, where nothing else is known: a step reads all weights."""
_KEEPS = 7 / 8  # the share of its weight that the mean keeps with a further step
_STALE_STEPS = 1024  # so long a size that no step had is taken for measured


class StepCosts:
    """Seconds of steps that only decode. Sizes are kept in powers of two, their middle being what was seen."""

    def __init__(self) -> None:
        self._sizes: dict[int, tuple[float, float, int]] = {}  # by power: mean rows, mean seconds, last step
        self._steps = 0

    def observe(self, rows: int, seconds: float) -> None:
        """A step with so many rows took so long."""
        self._steps += 1
        power = (rows - 1).bit_length()
        mean_rows, mean_seconds, last = self._sizes.get(power, (float(rows), seconds, self._steps))
        if self._steps - last > _STALE_STEPS:
            mean_rows, mean_seconds = rows, seconds
        seconds = min(seconds, 4 * mean_seconds)  # something else ran
        self._sizes[power] = (
            mean_rows * _KEEPS + rows * (1 - _KEEPS),
            mean_seconds * _KEEPS + seconds * (1 - _KEEPS),
            self._steps,
        )

    @property
    def is_known(self) -> bool:
        """Whether anything was measured."""
        return bool(self._sizes)

    def curve(self) -> list[tuple[float, float]]:
        """Known (rows, seconds), by rows; never falling."""
        found: list[tuple[float, float]] = []
        for _, (rows, seconds, last) in sorted(self._sizes.items()):
            if self._steps - last <= _STALE_STEPS:
                found.append((rows, max(seconds, found[-1][1] if found else 0.0)))
        return found or [(1.0, 1.0 + ROW_SHARE)]


def seconds(curve: list[tuple[float, float]], rows: int) -> float:
    """On a line between the nearest known sizes; beyond them, as if each row cost ROW_SHARE of a step without rows."""
    at = bisect_left(curve, (rows, 0.0))
    if 0 < at < len(curve):
        (low, low_s), (high, high_s) = curve[at - 1], curve[at]
        return low_s + (high_s - low_s) * (rows - low) / (high - low)
    known, known_s = curve[min(at, len(curve) - 1)]
    return known_s * (1 + ROW_SHARE * rows) / (1 + ROW_SHARE * known)
