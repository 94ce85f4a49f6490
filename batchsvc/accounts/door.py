"""What stands at the door of an API process: which calls a key may make, how many, and when it was last used."""

from __future__ import annotations

from batchsvc.accounts import scopes
from batchsvc.accounts.last_use import LastUse
from batchsvc.accounts.limits import Bucket, Limits
from batchsvc.accounts.rate_limiter import RateLimiter
from batchsvc.accounts.service import Caller
from batchsvc.db.session import Database
from batchsvc.errors import LimitError, PermissionDeniedError
from batchsvc.settings import Settings


class Door:
    """One for each API process. No method waits for the database, nor for longer than a moment for Redis."""

    def __init__(self, db: Database, settings: Settings) -> None:
        self._limiter = RateLimiter(settings.redis_url)
        self._last_use = LastUse(db)
        self._default = default_limits(settings)

    def admit(self, caller: Caller, method: str, path: str) -> dict[str, str]:
        """Let a call in, and return the headers that tell of its limits.

        Raises PermissionDeniedError for a call that the key's scopes don't cover, LimitError for one too many. An
        admin key has no limit of requests: whoever raises a limit must get through.
        """
        self._last_use.note(caller.api_key_id, caller.now_ms)
        if not scopes.allows(caller.scopes, method, path):
            area = scopes.area_of(path)
            needed = f" it needs api.{area}.{'read' if method == 'GET' else 'write'}." if area else ""
            raise PermissionDeniedError(
                f"This API key is restricted and may not make this call:{needed or ' no scope covers it.'}",
                code="insufficient_scope",
            )
        buckets = [] if caller.is_admin else self._buckets(caller)
        if not buckets:
            return {}
        verdict = self._limiter.take(buckets)
        if not verdict.is_allowed:
            wait_s = -(-verdict.wait_us // 1_000_000)
            raise LimitError(
                f"Too many requests: the limit is {verdict.limit} a minute. Try again in {wait_s} s.",
                code="rate_limit_exceeded",
                retry_after_s=max(1, wait_s),
                headers=verdict.headers,
            )
        return verdict.headers

    def close(self) -> None:
        self._last_use.close()
        self._limiter.close()

    def _buckets(self, caller: Caller) -> list[Bucket]:
        of_key = caller.limits.requests_per_minute
        of_project = caller.project_limits.or_else(self._default).requests_per_minute
        named = ((f"key:{caller.api_key_id}", of_key), (f"project:{caller.project_id}", of_project))
        return [Bucket(name, limit) for name, limit in named if limit is not None]


def default_limits(settings: Settings) -> Limits:
    """What holds for a project that has no limits of its own."""
    return Limits(
        requests_per_minute=settings.requests_per_minute,
        max_open_batches=settings.max_open_batches,
        max_stored_bytes=settings.max_stored_bytes,
    )
