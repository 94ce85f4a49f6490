"""Reads the parts of a window back, several at once, and says which of them are missing or damaged."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

from batchsvc.batches import part_file
from batchsvc.batches.damage import DamagedObjectError, verified
from batchsvc.batches.finalize_queries import PartToMerge
from batchsvc.batches.part_file import PartRows

_THREADS = 4
_AHEAD = 16  # parts that are read before they are asked for


@dataclass(frozen=True, slots=True)
class DamagedPart:
    """A part whose object isn't what was counted, and how that shows."""

    part: PartToMerge
    reason: str


class PartReader:
    """Reads parts ahead. `fetch` gets an object; it is called on several threads. Use as a context manager."""

    def __init__(self, fetch: Callable[[str], bytes]) -> None:
        self._fetch = fetch
        self._threads = ThreadPoolExecutor(_THREADS, "parts")

    def __enter__(self) -> PartReader:
        return self

    def __exit__(self, *_: object) -> None:
        self._threads.shutdown(cancel_futures=True)

    def read(self, parts: Iterable[PartToMerge]) -> Iterator[PartRows | DamagedPart]:
        """What is in these parts, in their order."""
        ahead: deque[Future[PartRows | DamagedPart]] = deque()
        for part in parts:
            ahead.append(self._threads.submit(self._read, part))
            if len(ahead) > _AHEAD:
                yield ahead.popleft().result()
        while ahead:
            yield ahead.popleft().result()

    def _read(self, part: PartToMerge) -> PartRows | DamagedPart:
        try:
            rows = part_file.rows(verified(self._fetch, part.s3_key, part.sha256))
        except DamagedObjectError as error:
            return DamagedPart(part, error.reason)
        num_ok = int(rows.is_ok.sum())
        if (num_ok, len(rows.is_ok) - num_ok) != (part.lines_ok, part.lines_err):
            raise ValueError(f"The part {part.id} holds other lines than were counted.")
        return rows
