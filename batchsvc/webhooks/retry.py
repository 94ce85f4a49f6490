"""When a delivery is tried again, and when a receiver is left alone for a while. Pure.

A delivery waits longer each time and is given up after the last wait, about two days later. The breaker is the
receiver's: after some failures in a row nothing is sent to it; then one delivery at a time tells whether it is back,
so an outage uses up the attempts of few of those that wait.
"""

from __future__ import annotations

_WAITS_S = (5, 30, 120, 600, 3_600, 10_800, 21_600, 43_200, 86_400)
MAX_ATTEMPTS = len(_WAITS_S) + 1
_JITTER = 0.2
_BREAK_AFTER, _OPEN_S, _MOST_OPEN_S = 5, 30, 3_600


def next_due_ms(attempts: int, now_ms: int, chance: float) -> int | None:
    """When to try again after `attempts` failures; None: never. `chance` in 0 to 1 spreads what failed together."""
    if attempts >= MAX_ATTEMPTS:
        return None
    wait_s = _WAITS_S[attempts - 1]
    return now_ms + round(1000 * wait_s * (1 + _JITTER * chance))


def open_until_ms(failures: int, now_ms: int) -> int:
    """Until when nothing is sent to a receiver that has failed this often in a row; 0: it is sent to."""
    if failures < _BREAK_AFTER:
        return 0
    doubled = _OPEN_S << min(failures - _BREAK_AFTER, 20)
    return now_ms + 1000 * min(_MOST_OPEN_S, doubled)
