"""Objects whose SHA-256 is recorded: read back and verified, or said to be damaged.

Damage is believed only after several looks: one answer that was cut, or a store that is just coming up, must not cost
what is there.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable

from batchsvc.errors import NotFoundError

_LOOKS = 3
_PAUSE_S = 0.2


class DamagedObjectError(Exception):
    """The object {key} is damaged."""

    def __init__(self, key: str, reason: str) -> None:
        super().__init__(f"The object {key} is damaged: {reason}.")
        self.key = key
        self.reason = reason


def verified(fetch: Callable[[str], bytes], key: str, sha256: str) -> bytes:
    """The bytes of an object (rows of earlier versions have no SHA-256). Raises DamagedObjectError."""
    reason = ""
    for look in range(_LOOKS):
        time.sleep(_PAUSE_S * look)
        try:
            data = fetch(key)
        except NotFoundError:
            reason = "it is missing"
            continue
        if not sha256 or hashlib.sha256(data).hexdigest() == sha256:
            return data
        reason = "its sha256 differs"
    raise DamagedObjectError(key, reason)
