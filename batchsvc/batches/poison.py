"""What a crash of an engine process says about the work it held, and what is done about it. Pure.

A crash is a lease that ended in any other way than by its owner's release: the process died, hung, or was cut off.
Whose fault it was nobody knows, so a single crash blames nobody, and progress clears everybody: a part that counts
sets a unit's crashes to 0, and its batch's.

1. A unit that crashes twice in a row is suspect: its unfinished lines are split into two units. Suspects run alone
   (one at a time, on one engine at a time, with no interactive call beside them), so from now on a crash has one cause.
2. A suspect that crashes is split again; one that makes progress isn't suspect any more.
3. A suspect of one line that crashes twice is poison: an error line.

So a poison line among 512 costs at most 12 crashes, and a healthy line is condemned only if its process dies four
times in a row within moments of its start, twice of it while it runs alone. Kills at random don't do that: a suspect's
lines become a part as soon as they are finished, so it is in danger for fractions of a second.

The brake pauses a batch, for an operator to look at, when it crashes more than 3 times in 10 minutes without any
progress in between, or when more than 3 of its lines were poison within 10 minutes. Crashes less than 5 s apart are
one: several engines that lose the database together are one incident. Where calls were open, one of them may be to
blame, so the brake counts such crashes for suspects only. An engine that fails says whether calls were open; of a
process that is killed its last heartbeat says it, so one that is killed by the first call after a while counts.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum, auto

CRASHES = 2  # in a row: a unit becomes suspect, a suspect line becomes poison
BRAKE_MOST = 3
BRAKE_MS = 600_000
_ONE_INCIDENT_MS = 5_000


class Verdict(Enum):
    """What becomes of a unit after a crash."""

    KEEP = auto()  # it is claimable again
    WATCH = auto()  # it is one line: it runs alone from now on
    SPLIT = auto()  # into two suspects
    POISON = auto()  # its line gets an error line


def judge(*, crash_count: int, is_suspect: bool, num_lacking: int) -> Verdict:
    """Decides about a unit that has crashed `crash_count` times in a row, the last one included."""
    if is_suspect and num_lacking > 1:
        return Verdict.SPLIT
    if crash_count < CRASHES:
        return Verdict.KEEP
    if num_lacking > 1:
        return Verdict.SPLIT
    return Verdict.POISON if is_suspect else Verdict.WATCH


def halves(lacking: int) -> tuple[int, int]:
    """Two bitmaps of the unfinished lines: the first half keeps its unit, the second becomes a new one."""
    count = lacking.bit_count()
    assert count > 1, "one line can't be split"
    first, rest = 0, lacking
    for _ in range(count // 2):
        lowest = rest & -rest
        first, rest = first | lowest, rest ^ lowest
    return first, rest


def note(times: Sequence[int], now_ms: int, *, is_incident: bool = True) -> list[int]:
    """The times that the brake counts, with `now_ms`. `is_incident`: what happens within moments counts as one."""
    recent = [time for time in times if time > now_ms - BRAKE_MS]
    if is_incident and recent and now_ms - recent[-1] < _ONE_INCIDENT_MS:
        return recent
    return [*recent, now_ms]


def is_too_much(times: Sequence[int]) -> bool:
    """Whether the brake acts."""
    return len(times) > BRAKE_MOST
