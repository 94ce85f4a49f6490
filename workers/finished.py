"""Reads the parts of a window back, several at once, and says which of them are missing or damaged.

A part is believed to be damaged only after several looks at it: one answer that was cut, or a store that is just
coming up, must not cost results that are there.
"""

from __future__ import annotations

import hashlib
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

from batchsvc.batches import part_file
from batchsvc.batches.finalize_queries import PartToMerge
from batchsvc.batches.part_file import PartRows
from batchsvc.errors import NotFoundError

_LOOKS = 3
_PAUSE_S = 0.2
_THREADS = 4
_AHEAD = 8  # parts that are read before they are asked for


@dataclass(frozen=True, slots=True)
class DamagedPart:
    """A part whose object isn't what was counted, and how that shows."""

    part: PartToMerge
    reason: str


def checked(fetch: Callable[[str], bytes], key: str, sha256: str) -> bytes | str:
    """The bytes of an object whose SHA-256 is known (rows of earlier versions have none), or how they are damaged."""
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
    return reason


class PartReader:
    """Reads parts ahead. `fetch` gets an object; it is called on several threads. Use as a context manager."""

    def __init__(self, fetch: Callable[[str], bytes]) -> None:
        self._fetch = fetch
        self._threads = ThreadPoolExecutor(_THREADS, "parts")

    def __enter__(self) -> PartReader:
        return self

    def __exit__(self, *_: object) -> None:
        self._threads.shutdown(cancel_futures=True)

    def read(self, parts: Sequence[PartToMerge]) -> Iterator[PartRows | DamagedPart]:
        """What is in these parts, in their order."""
        ahead: deque[Future[PartRows | DamagedPart]] = deque()
        for part in parts:
            ahead.append(self._threads.submit(self._read, part))
            if len(ahead) > _AHEAD:
                yield ahead.popleft().result()
        while ahead:
            yield ahead.popleft().result()

    def _read(self, part: PartToMerge) -> PartRows | DamagedPart:
        data = checked(self._fetch, part.s3_key, part.sha256)
        if isinstance(data, str):
            return DamagedPart(part, data)
        rows = part_file.rows(data)
        num_ok = int(rows.is_ok.sum())
        if (num_ok, len(rows.is_ok) - num_ok) != (part.lines_ok, part.lines_err):
            raise ValueError(f"The part {part.id} holds other lines than were counted.")
        return rows
