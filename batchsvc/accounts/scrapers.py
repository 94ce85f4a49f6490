"""Who may read /metrics from another machine: admin keys, and while the database is away, those that it let in lately.

What is scraped tells of all tenants, so no key of a tenant opens it. An alert that the database is down has to come
through just when no key can be looked up: each process remembers hashes of the keys that were good, for a while. One
that comes again within that while is remembered on, however long the database is away, or the alert would end first.
"""

from __future__ import annotations

import ipaddress
import threading
from collections.abc import Callable

from sqlalchemy.exc import SQLAlchemyError

from batchsvc.accounts import keys, scopes
from batchsvc.accounts.service import Caller
from batchsvc.clock import monotonic_s
from batchsvc.errors import AuthenticationError, PermissionDeniedError

_REMEMBERED_S = 30 * 60.0
_MOST_KEYS = 16


class Scrapers:
    """Of one process. Thread-safe. `is_away` says whether the database was when it was last asked: then nobody waits
    for it once more on account of a key that is remembered."""

    def __init__(self, is_away: Callable[[], bool]) -> None:
        self._is_away = is_away
        self._lock = threading.Lock()
        self._good_s: dict[str, float] = {}  # when each key was let in last, by its hash, the latest last

    def admit(self, secret: str, look_up: Callable[[], Caller]) -> None:
        """Let a key in, or raise what `look_up` does, or PermissionDeniedError for a key that isn't an admin's."""
        digest = keys.digest(secret)
        if self._is_away() and self._is_remembered(digest):
            self._remember(digest)
            return
        try:
            _require(look_up())
        except SQLAlchemyError:
            if not self._is_remembered(digest):
                raise
            self._remember(digest)
        except (AuthenticationError, PermissionDeniedError):
            with self._lock:
                self._good_s.pop(digest, None)
            raise
        else:
            self._remember(digest)

    def _remember(self, digest: str) -> None:
        with self._lock:
            self._good_s.pop(digest, None)
            self._good_s[digest] = monotonic_s()
            while len(self._good_s) > _MOST_KEYS:
                del self._good_s[next(iter(self._good_s))]

    def _is_remembered(self, digest: str) -> bool:
        with self._lock:
            good_s = self._good_s.get(digest)
        return good_s is not None and monotonic_s() - good_s < _REMEMBERED_S


def is_loopback(client: str | None) -> bool:
    """Whether a caller's address is of this machine; also one that a socket for both families writes as IPv6."""
    try:
        address = ipaddress.ip_address(client or "")
    except ValueError:
        return False
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return (mapped or address).is_loopback


def _require(caller: Caller) -> None:
    if not (caller.is_admin and scopes.allows(caller.scopes, "GET", "/metrics")):
        raise PermissionDeniedError(
            "From another machine, metrics need an admin key; one that may only read is enough.", code="admin_only"
        )
