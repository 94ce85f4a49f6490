"""Why a batch doesn't move, in a sentence, and the command that comes next. Pure: from what rows say of it.

A reason that somebody has to act upon counts at once. That nothing was finished for a while is a reason only after
`quiet_s`: a long prompt on a slow machine, or a turn that others have, is no fault. What will go on by itself at a time
that is known (the night, a retry in a moment) is told of a batch that is asked for, and not listed as stuck.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from batchsvc.batches.lifecycle import Status

_UNATTENDED_S = 60.0  # after which what a control worker does at once isn't done by any
_USUAL_ATTEMPTS = 2


class Finding(NamedTuple):
    """Why a batch doesn't move (`reason`), and what to type next. `is_stuck`: it won't go on by itself."""

    reason: str
    next: str
    is_stuck: bool = True


class Holder(NamedTuple):
    """A worker that has units of a batch leased."""

    name: str
    units: int
    is_alive: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """What is known of an unfinished batch. Times are seconds ago, counts are of units.

    `hold_model`: the model whose claims are paused, "" for all of them; None: no claims are. `drained`: workers of its
    model that an operator lets claim nothing. `later`: it starts by itself, as this says. `attended_s`: since when
    nobody plans or finalizes it; None: somebody does, or need not.
    """

    id: str
    project: str
    status: Status
    model: str
    pause_reason: str | None = None
    is_own_pause: bool = False
    has_quota: bool = True
    has_budget: bool = True
    later: str | None = None
    hold_reason: str | None = None
    hold_model: str | None = None
    lacking: str | None = None
    in_turn: str | None = None
    drained: Sequence[str] = field(default_factory=tuple)
    ready: int = 0
    delayed: int = 0
    leased: int = 0
    suspects: int = 0
    holders: Sequence[Holder] = field(default_factory=tuple)
    moved_s: float = 0.0
    overdue_s: float = 0.0
    unattended_s: float | None = None
    is_store_away: bool = False
    fin_attempts: int = 0


def find(facts: Facts, quiet_s: float) -> Finding | None:
    """Why a batch doesn't move; None: it does, as far as can be seen."""
    if facts.status == Status.VALIDATING:
        return _unplanned(facts)
    if facts.status in (Status.FINALIZING, Status.CANCELLING):
        return _unmerged(facts)
    if facts.overdue_s > _UNATTENDED_S:
        return Finding("its deadline has passed, and no control worker has ended it", "batchsvc doctor")
    return _stopped(facts) or _unserved(facts) or _in_trouble(facts) or _quiet(facts, quiet_s)


def _unplanned(facts: Facts) -> Finding | None:
    if facts.is_store_away:
        return Finding("the store of its input can't be read", "batchsvc admin stores list")
    if facts.unattended_s is not None and facts.unattended_s > _UNATTENDED_S:
        return Finding("no control worker plans it", "batchsvc doctor")
    return None


def _unmerged(facts: Facts) -> Finding | None:
    if facts.fin_attempts > _USUAL_ATTEMPTS:
        return Finding(f"its results can't be put together (attempt {facts.fin_attempts})", "batchsvc logs control")
    if facts.unattended_s is not None and facts.unattended_s > _UNATTENDED_S:
        return Finding("no control worker puts its results together", "batchsvc doctor")
    return None


def _stopped(facts: Facts) -> Finding | None:
    """By somebody, or by a limit."""
    if facts.pause_reason is not None:
        return Finding(f"it is paused: {facts.pause_reason}", f"batchsvc batches resume {facts.id}")
    if facts.is_own_pause:
        return Finding("its project has paused it", f"batchsvc resume {facts.id} (with a key of its project)")
    if not facts.has_quota:
        return Finding(
            "its project's unfinished batches hold all of its quota",
            f"batchsvc admin project {facts.project} --quota N",
        )
    if not facts.has_budget:
        return Finding(
            "its project has no budget or balance left for it",
            f"batchsvc admin project {facts.project} --budget DOLLARS, or batchsvc topup {facts.project} DOLLARS",
        )
    if facts.hold_model is not None:
        model = f" --model {facts.hold_model}" if facts.hold_model else ""
        return Finding(f"claims are paused: {facts.hold_reason}", f"batchsvc claims resume{model}")
    return None


def _unserved(facts: Facts) -> Finding | None:
    if facts.later is not None:
        return Finding(f"it runs {facts.later}", "nothing", is_stuck=False)
    if facts.lacking is None or facts.leased:
        return None
    if facts.in_turn is not None:
        return Finding(f"it waits for {facts.in_turn}", "batchsvc workers list", is_stuck=False)
    if facts.drained:
        names = " and ".join(facts.drained)
        return Finding(
            f"the workers of {facts.lacking} are drained: {names}", f"batchsvc workers undrain {facts.drained[0]}"
        )
    return Finding(f"no worker serves {facts.lacking}", f"batchsvc models load {facts.lacking.split(', ')[0]}")


def _in_trouble(facts: Facts) -> Finding | None:
    dead = [holder.name for holder in facts.holders if not holder.is_alive]
    if dead and len(dead) == len(facts.holders) and not facts.ready:
        return Finding(f"{dead[0]} has it and is silent; its lease ends soon", "batchsvc workers list", is_stuck=False)
    if facts.suspects:
        return Finding(
            f"{facts.suspects} units ended engines, so they run alone, one after the other",
            f"batchsvc quarantine list {facts.id}",
        )
    if facts.delayed and not facts.ready and not facts.leased:
        return Finding("some of its work failed and is tried again soon", "batchsvc logs engine", is_stuck=False)
    if facts.unattended_s is not None and facts.unattended_s > _UNATTENDED_S:
        return Finding("all of its lines are done, and no control worker puts them together", "batchsvc doctor")
    return None


def _quiet(facts: Facts, quiet_s: float) -> Finding | None:
    if facts.moved_s < quiet_s:
        return None
    since = f"for {facts.moved_s / 60:,.0f} minutes"
    if facts.holders:
        most = max(facts.holders, key=lambda holder: holder.units)
        return Finding(
            f"{most.name} has {most.units} of its units and has finished nothing of them {since}",
            f"batchsvc top, batchsvc logs engine, then batchsvc workers drain {most.name}",
        )
    if facts.ready:
        return Finding(
            f"other batches have been served before it {since}",
            f"batchsvc workers list, batchsvc admin project {facts.project} --weight N",
        )
    return None
