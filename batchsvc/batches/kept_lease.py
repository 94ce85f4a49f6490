"""Keeps the lease of a control task while it works: a thread of its own renews it, however long one call takes.

A slow store or a long sort must not cost the lease, or the same work would begin again for ever. The database fences:
who has lost the lease learns it at the next `check`, and if not there, its last write changes nothing.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import TracebackType

import structlog
from sqlalchemy.exc import DBAPIError

log = structlog.get_logger(__name__)


class LeaseLostError(Exception):
    """Somebody else has the lease now, or what it was for has ended."""


class KeptLease:
    """A lease that is renewed every `every_s` seconds inside a `with` block. `renew` says whether it is still ours."""

    def __init__(self, renew: Callable[[], bool], every_s: float) -> None:
        self._renew = renew
        self._every_s = every_s
        self._is_lost = False
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="lease", daemon=True)

    def __enter__(self) -> KeptLease:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()
        self._thread.join()

    def check(self) -> None:
        """Raise LeaseLostError once the lease is known to be lost. Costs nothing."""
        if self._is_lost:
            raise LeaseLostError

    def _run(self) -> None:
        while not self._ended.wait(self._every_s):
            try:
                if not self._renew():
                    self._is_lost = True
                    return
            except DBAPIError as error:  # it may answer again before the lease is over
                log.warning("lease.not_renewed", error=type(error).__name__)
