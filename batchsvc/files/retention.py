"""When content goes: the rules of what is wiped when, once it was deleted, its life is over, or its batch has ended.
Pure: times are milliseconds of the database's clock.

    what           out of sight  wiped the first time         and once more
    file, batch    at once       when downloads have ended    when no writer of before can write any more
    upload         at once       likewise                     likewise
    plan           -             half a grace after the end   -

A *plan* is what only a running batch needs: its units, unfinished sequences and line numbers. It stays for a while,
because `batchsvc explain` reads it. All of it is gone within the grace; what isn't by then is overdue.

The second time is for processes that didn't notice in time: a worker that lost its lease, or a call that was on its
way, may store an object just after the first one. Nobody writes for longer than two leases after that (see
workers/garbage.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime
from enum import StrEnum

LEAST_LIFE_S, MOST_LIFE_S = 3_600, 2_592_000  # that a call may ask for, as OpenAI has it
MOST_DEFAULT_S = 315_360_000  # that an operator may set: ten years
LEASES = 3  # after which nobody writes any more who was told to before
_DOWNLOAD_MS = 600_000  # a download that has begun may end


class Kind(StrEnum):
    """What is wiped."""

    FILE = "file"
    UPLOAD = "upload"
    BATCH = "batch"
    PLAN = "plan"


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """What a deployment promises: content is gone within `grace_ms`; a lease lasts `lease_ms`."""

    grace_ms: int
    lease_ms: int

    @classmethod
    def of(cls, grace_s: float, lease_s: float) -> Policy:
        """The same in seconds, as settings have it."""
        return cls(grace_ms=round(grace_s * 1000), lease_ms=round(lease_s * 1000))

    def first_ms(self, kind: Kind, deleted_ms: int) -> int:
        """When something is wiped that was deleted (of a plan: whose batch has ended) then."""
        if kind is Kind.PLAN:
            return deleted_ms + self.grace_ms // 2
        return deleted_ms + min(_DOWNLOAD_MS, self.grace_ms // 4)

    def last_ms(self, kind: Kind, deleted_ms: int) -> int:
        """When it is wiped once more, and for good."""
        first_ms = self.first_ms(kind, deleted_ms)
        return first_ms if kind is Kind.PLAN else max(first_ms, deleted_ms + LEASES * self.lease_ms)

    def retry_ms(self, now_ms: int, num_failures: int) -> int:
        """When to try again what has failed so often, or was taken by somebody who was killed."""
        return now_ms + min(300_000, max(1_000, self.grace_ms // 20)) * min(num_failures + 1, 4)

    def is_overdue(self, deleted_ms: int, now_ms: int) -> bool:
        """Whether something should be gone by now that isn't."""
        return now_ms > deleted_ms + self.grace_ms


def life_s(asked_s: int | None, project_s: int | None, setting_s: int) -> int:
    """How long a file lives: as its call says, else as its project's default, else as the setting."""
    return next(life for life in (asked_s, project_s, setting_s) if life is not None)


def date_of(ms: int) -> str:
    """The day (UTC) of a moment, as sentences name it."""
    return datetime.fromtimestamp(ms / 1000, UTC).strftime("%Y-%m-%d")
