"""Which model a worker serves next that serves several in turn, and when it changes over. Pure.

A worker holds one model. To change over it drains, ends what holds the model, and loads the other one, which takes
`swap_s` as it was measured last. So it asks, every few seconds:

    nothing to run        of its model for as long as a swap takes (waiting longer or shorter would each lose more, if
                          work came at the worst moment): change over to what is most urgent
    another's deadline    nears, which no other worker serves, and its own is further away: change over
    another waits         for `PATIENCE_S` or many swaps, with no worker at all: change over, so that nobody starves
    its model isn't       among those that it serves any more: change over now

While there is work to run, a model stays for `STAY` swaps at least, so at most one fifth of a busy worker's time goes
into changing over; what was near a deadline is looked at so much earlier. A model that others serve is only helped
with when there is nothing else to do, more units than workers, and one of these has waited as long as a swap takes.

What it doesn't do: plan ahead over several models, or tell workers from each other. Two workers that would change over
to the same model are kept apart by whoever asks (switch_queries.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

STAY = 4.0  # swaps
PATIENCE_S = 600.0
PATIENCE_SWAPS = 20.0
ASSUMED_SWAP_S = 10.0  # until one was measured
_LEAST_SWAP_S = 1.0


class Why(StrEnum):
    """Why a worker changes over."""

    FIRST = "it serves none yet"
    UNLOADED = "an operator has unloaded the one that it served"
    DRY = "there is nothing to run of the one that it serves"
    DEADLINE = "a deadline nears"
    WAITED = "its work has waited for long"


@dataclass(frozen=True, slots=True, kw_only=True)
class Queue:
    """What waits for a model. `wait_s`: how long its oldest work has, and no worker served it; `slack_s`: until the
    first of its batches must be running to end in time (negative: it is late; None: there is no work)."""

    digest: str
    units: int = 0  # claimable now
    wait_s: float = 0.0
    slack_s: float | None = None
    workers: int = 0  # others that serve it, or are loading it
    swap_s: float = ASSUMED_SWAP_S


@dataclass(frozen=True, slots=True, kw_only=True)
class Seat:
    """What a worker serves now (None: nothing yet), for how long, and how long it has had nothing to run of it."""

    digest: str | None
    served_s: float = 0.0
    dry_s: float = 0.0  # 0: it has units, or could claim some


@dataclass(frozen=True, slots=True)
class Choice:
    """What to change over to."""

    digest: str
    why: Why


def next_model(seat: Seat, queues: Sequence[Queue]) -> Choice | None:
    """What to change over to now; None: stay. `queues`: one for each model that the worker serves in turn, the one to
    begin with first."""
    if seat.digest is None or all(queue.digest != seat.digest for queue in queues):
        if not queues:
            return None
        best = min(queues, key=lambda queue: (not queue.units, queue.workers > 0, *_urgency(queue)))
        chosen = best if best.units else queues[0]
        return Choice(chosen.digest, Why.FIRST if seat.digest is None else Why.UNLOADED)
    own = next(queue for queue in queues if queue.digest == seat.digest)
    others = sorted((queue for queue in queues if queue is not own and queue.units), key=_urgency)
    if seat.dry_s:
        free = [queue for queue in others if seat.dry_s >= swap_of(queue) and (not queue.workers or _wants_help(queue))]
        return Choice(free[0].digest, Why.DRY) if free else None
    alone = [queue for queue in others if not queue.workers and seat.served_s >= STAY * swap_of(queue)]
    near = [queue for queue in alone if _is_near(queue) and _slack(queue) < _slack(own)]
    if near:
        return Choice(near[0].digest, Why.DEADLINE)
    waited = [queue for queue in alone if queue.wait_s >= patience_s(queue)]
    return Choice(max(waited, key=lambda queue: queue.wait_s).digest, Why.WAITED) if waited else None


def swap_of(queue: Queue) -> float:
    """What changing over to a model takes, in seconds, never nothing."""
    return max(queue.swap_s, _LEAST_SWAP_S)


def patience_s(queue: Queue) -> float:
    """How long the work of a model waits at most while its only workers are busy with others."""
    return max(PATIENCE_S, PATIENCE_SWAPS * swap_of(queue))


def _is_near(queue: Queue) -> bool:
    """Whether its deadline can't wait for another stay."""
    return _slack(queue) <= (1 + STAY) * swap_of(queue)


def _slack(queue: Queue) -> float:
    return float("inf") if queue.slack_s is None else queue.slack_s


def _urgency(queue: Queue) -> tuple[float, float]:
    """The nearest deadline first, where one is near; else what has waited longest."""
    return (_slack(queue) if _is_near(queue) else float("inf"), -queue.wait_s)


def _wants_help(queue: Queue) -> bool:
    return queue.units > queue.workers and queue.wait_s >= swap_of(queue)
