"""In which order work is claimed: fair between projects, by priority and deadline inside one. Pure.

Projects share a model by virtual time. A project's vtime is what it has had, in tokens over its weight; the project
whose vtime, with what it holds at this moment on top, is lowest is served next. The model's clock is the lowest vtime
of all active projects (those that have claimable work or hold some). It never goes back, and a project that is found
behind it has just come, or come back: it is raised to the clock, once, so that it starts level with the others and
gets no credit for the time it was away.

Inside a project: the higher priority, then the nearest deadline, then the older batch; units in plan order.

The panic lane stands before all that: batches that are late (`latest_start_ms` has passed) by deadline alone. It takes
at most 30 % of the claims that are made while some batch is late, so that nobody gains by naming short windows.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

VTIME_PER_TOKEN = 1_000  # vtime is an integer: thousandths of a token at weight 1
HELD_TOKENS = 8_000_000  # a project that holds more stands behind all others
PANIC_PRICE = 7  # a claim by the panic lane costs this much credit, any other earns this:
PANIC_GAIN = 3
PANIC_MOST = PANIC_PRICE + PANIC_GAIN

_KNOWN_MARGIN = 0.10  # of the window: slack below which a batch is late
_UNKNOWN_MARGIN = 0.25  # the same, while nobody knows how fast the model runs


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A batch that has claimable units. `vtime` is its project's, before the clock is applied."""

    batch_id: str
    project_id: str
    weight: int
    vtime: int
    priority: int
    expires_ms: int
    created_ms: int
    latest_start_ms: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Holding:
    """What a project's leased units still have to do."""

    project_id: str
    vtime: int
    tokens: int


def vtime_of(tokens: int, weight: int) -> int:
    """What a project of this weight is charged for so many tokens."""
    return tokens * VTIME_PER_TOKEN // max(1, weight)


def clock_after(clock: int, vtimes: Iterable[int]) -> int:
    """The model's clock, once these projects are known to be active; those behind it have just come (back)."""
    return min((vtime for vtime in vtimes if vtime >= clock), default=clock)


def by_rank(candidates: Sequence[Candidate], held: Mapping[str, int], clock: int) -> list[Candidate]:
    """Candidates, best first. `held`: tokens that each project's leased units still have to do."""
    projects: dict[str, list[Candidate]] = {}
    for candidate in candidates:
        projects.setdefault(candidate.project_id, []).append(candidate)
    for batches in projects.values():
        batches.sort(key=lambda batch: (-batch.priority, *_by_deadline(batch)))

    def standing(batches: list[Candidate]) -> tuple[bool, int, int, int, str]:
        best = batches[0]
        tokens = held.get(best.project_id, 0)
        reached = max(best.vtime, clock) + vtime_of(tokens, best.weight)
        return (tokens >= HELD_TOKENS, reached, *_by_deadline(best))

    return [batch for batches in sorted(projects.values(), key=standing) for batch in batches]


def late(candidates: Iterable[Candidate], now_ms: int) -> list[Candidate]:
    """Candidates that belong into the panic lane, the nearest deadline first."""
    found = (batch for batch in candidates if batch.latest_start_ms is not None and batch.latest_start_ms <= now_ms)
    return sorted(found, key=_by_deadline)


def latest_start_ms(*, created_ms: int, expires_ms: int, remaining_tokens: int, tokens_per_s: float | None) -> int:
    """When a batch becomes late: what remains, at the rate seen, would end less than 10 % of its window before the end.

    While no rate is known (None), a batch is late in the last quarter of its window.
    """
    window_ms = expires_ms - created_ms
    if tokens_per_s is None or tokens_per_s <= 0:
        return expires_ms - round(window_ms * _UNKNOWN_MARGIN)
    return expires_ms - round(window_ms * _KNOWN_MARGIN) - round(remaining_tokens / tokens_per_s * 1_000)


def _by_deadline(batch: Candidate) -> tuple[int, int, str]:
    return batch.expires_ms, batch.created_ms, batch.batch_id
