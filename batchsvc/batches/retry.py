"""How often a line is tried again after a failure that isn't its own, and when. Pure.

A line gets three attempts. A batch has a budget of retries beside: 10 % of its lines and 50 more, so that a broken
engine can't multiply what the batch costs to run. Delays grow exponentially, with full jitter.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

MOST_ATTEMPTS = 3
_BUDGET_SHARE, _BUDGET_LEAST = 10, 50  # a tenth of the lines, and this many
_FIRST_DELAY_S, _MOST_DELAY_S = 1.0, 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What becomes of lines that failed: some run again, the others end as error lines. Lines are bits of a unit."""

    again: frozenset[int]
    failed: frozenset[int]


def budget(num_lines: int) -> int:
    """Retries that a batch of so many lines has."""
    return num_lines // _BUDGET_SHARE + _BUDGET_LEAST


def judge(failures: Mapping[int, int], retries_left: int) -> Verdict:
    """Decides by the attempts that each line has failed so far, in the order of the lines while the budget lasts."""
    may = sorted(bit for bit, failed in failures.items() if failed < MOST_ATTEMPTS)
    again = frozenset(may[: max(0, retries_left)])
    return Verdict(again=again, failed=frozenset(failures) - again)


def delay_s(failed_attempts: int, jitter: float) -> float:
    """How long to wait after so many failures; `jitter` is uniform in [0, 1]."""
    return jitter * min(_MOST_DELAY_S, _FIRST_DELAY_S * 2.0 ** max(0, failed_attempts - 1))
