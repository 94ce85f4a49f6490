"""Turns finished lines into parts: a buffer a unit, stored under a new key, then counted by a fenced transaction.

A unit's first part is written soon after its first finished line, so that a user sees progress; then every
`flush_s` seconds or `flush_bytes` bytes, when the unit ends, and at a drain. While the store or the database doesn't
answer, lines stay in their buffers and are tried again with jitter until the lease can't be trusted any more;
`is_troubled` tells the source to claim and feed nothing meanwhile, which bounds the buffers.
"""

from __future__ import annotations

import hashlib
import random
import threading
from collections.abc import Callable
from dataclasses import dataclass, field

import structlog
from sqlalchemy.exc import DBAPIError

from batchsvc import failpoints, ids
from batchsvc.batches import part_file, unit_queries
from batchsvc.batches.unit_queries import ClaimedUnit, NewPart
from batchsvc.clock import monotonic_s
from batchsvc.db.session import Database
from batchsvc.errors import ServiceError
from batchsvc.store import keys
from batchsvc.store.s3 import ObjectStore
from workers.lease import LeaseKeeper
from workers.thread import WorkThread
from workers.translate import FinishedLine

_FIRST_FLUSH_S = 0.5  # the first part has to count within a second of the first line
_RETRY_S = 0.2
_RETRY_MOST_S = 5.0

log = structlog.get_logger(__name__)


@dataclass(slots=True)
class _Buffer:
    unit: ClaimedUnit
    lines: list[FinishedLine] = field(default_factory=list)
    num_bytes: int = 0
    since_s: float = 0.0  # when the oldest line came
    has_part: bool = False
    is_ending: bool = False
    release: bool = False
    crashed: bool = False
    delay_s: float = 0.0
    stored: NewPart | None = None  # in the store; whether it counts is not known
    sent: int = 0  # lines that `stored` holds: the first ones

    def due_s(self, flush_s: float, flush_bytes: int) -> float | None:
        """Monotonic time at which to write; None: nothing to do."""
        if self.is_ending or self.num_bytes >= flush_bytes:
            return 0.0
        if not self.lines:
            return None
        return self.since_s + (flush_s if self.has_part else min(flush_s, _FIRST_FLUSH_S))


class Writer:
    """One thread that writes the parts of all live units.

    `on_end` gets a unit whose last word is written (`is_done`, or released); `on_lost` one that belongs to another.
    Both are called on the writer's thread.
    """

    def __init__(
        self,
        db: Database,
        store: ObjectStore,
        leases: LeaseKeeper,
        *,
        flush_s: float,
        flush_bytes: int,
        on_end: Callable[[ClaimedUnit, bool], None],
        on_lost: Callable[[list[str]], None],
        on_crash: Callable[[Exception], None],
    ) -> None:
        self._db = db
        self._store = store
        self._leases = leases
        self._flush_s = flush_s
        self._flush_bytes = flush_bytes
        self._on_end = on_end
        self._on_lost = on_lost
        self._changed = threading.Condition()
        self._buffers: dict[str, _Buffer] = {}
        self._failures = 0
        self._retry_s = 0.0
        self._stopped = False
        self._thread = WorkThread("writer", self._run, on_crash)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Stop at once, even with lines in the buffers: their units are someone else's after the lease."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()
        self._thread.join()

    @property
    def is_troubled(self) -> bool:
        """The store or the database doesn't answer."""
        return self._failures > 0

    @property
    def num_bytes(self) -> int:
        """Bytes of finished lines that wait for their part."""
        with self._changed:
            return sum(buffer.num_bytes for buffer in self._buffers.values())

    def add(self, unit: ClaimedUnit, lines: list[FinishedLine]) -> None:
        """Take finished lines of a live unit."""
        with self._changed:
            buffer = self._buffers.setdefault(unit.id, _Buffer(unit))
            if not buffer.lines:
                buffer.since_s = monotonic_s()
            buffer.lines += lines
            buffer.num_bytes += sum(len(finished.line.row) for finished in lines)
            self._changed.notify_all()

    def end(self, unit: ClaimedUnit, *, release: bool, crashed: bool = False, delay_s: float = 0) -> None:
        """No more lines come: write what is there, then, if it isn't done, `release` the unit."""
        with self._changed:
            buffer = self._buffers.setdefault(unit.id, _Buffer(unit))
            buffer.is_ending, buffer.release, buffer.crashed, buffer.delay_s = True, release, crashed, delay_s
            self._changed.notify_all()

    def drop(self, unit_id: str) -> None:
        """Forget a unit that was lost."""
        with self._changed:
            self._buffers.pop(unit_id, None)
            self._changed.notify_all()

    def _run(self) -> None:
        while (buffer := self._next()) is not None:
            if not self._leases.is_held(buffer.unit.id):
                self._lose(buffer)
                continue
            try:
                self._write(buffer)
            except (ServiceError, DBAPIError) as error:
                self._failures += 1
                wait = min(_RETRY_MOST_S, _RETRY_S * 2 ** min(self._failures, 8)) * random.uniform(0.5, 1.0)  # noqa: S311
                self._retry_s = monotonic_s() + wait
                log.warning("part.not_written", unit=buffer.unit.id, error=type(error).__name__, again_in_s=wait)
            else:
                self._failures = 0

    def _next(self) -> _Buffer | None:
        """Waits for the buffer that is due first; None when stopped."""
        with self._changed:
            while not self._stopped:
                now = monotonic_s()
                times = {
                    buffer.unit.id: max(due, self._retry_s)
                    for buffer in self._buffers.values()
                    if (due := buffer.due_s(self._flush_s, self._flush_bytes)) is not None
                }
                if times:
                    first = min(times, key=lambda unit_id: times[unit_id])
                    if times[first] <= now:
                        return self._buffers[first]
                self._changed.wait(max(0.0, min(times.values()) - now) if times else None)
            return None

    def _write(self, buffer: _Buffer) -> None:
        unit = buffer.unit
        if buffer.stored is None:
            with self._changed:
                lines = list(buffer.lines)  # more may come while these are stored
            if lines:
                failpoints.reach("lines.finished")
                buffer.stored, buffer.sent = self._put(unit, lines), len(lines)
                failpoints.reach("part.stored")
        if buffer.stored is not None:
            part = buffer.stored
            if not self._leases.is_held(unit.id):
                return self._lose(buffer)
            if not self._db.run(lambda session: unit_queries.commit_part(session, unit.id, unit.epoch, part)):
                return self._lose(buffer)
            failpoints.reach("part.counted")
            self._counted(buffer)
        with self._changed:
            is_over = buffer.is_ending and not buffer.lines
        if is_over:
            self._end(buffer)
        return None

    def _put(self, unit: ClaimedUnit, lines: list[FinishedLine]) -> NewPart:
        part_id = ids.part_id()
        key = keys.part(unit.batch_id, unit.epoch, part_id)
        parts = [finished.line for finished in lines]
        data = part_file.encode(parts)
        self._store.put(key, data)
        bits = 0
        for finished in lines:
            bits |= 1 << finished.bit
        return NewPart(
            id=part_id,
            s3_key=key,
            sha256=hashlib.sha256(data).hexdigest(),
            size_bytes=len(data),
            bitmap=bits.to_bytes((unit.num_lines + 7) // 8, "little"),
            lines_ok=sum(line.is_ok for line in parts),
            lines_err=sum(not line.is_ok for line in parts),
            est_tokens=sum(finished.est_tokens for finished in lines),
            input_tokens=sum(line.input_tokens for line in parts),
            cached_tokens=sum(line.cached_tokens for line in parts),
            output_tokens=sum(line.output_tokens for line in parts),
            cost_nanos=sum(line.cost_nanos for line in parts),
            standard_nanos=sum(line.standard_nanos for line in parts),
        )

    def _counted(self, buffer: _Buffer) -> None:
        with self._changed:
            counted, buffer.lines = buffer.lines[: buffer.sent], buffer.lines[buffer.sent :]
            buffer.num_bytes -= sum(len(finished.line.row) for finished in counted)
            buffer.stored, buffer.sent, buffer.has_part = None, 0, True
            buffer.since_s = monotonic_s()

    def _end(self, buffer: _Buffer) -> None:
        unit = buffer.unit
        failpoints.reach("unit.written")
        if buffer.release:
            crashed, delay_s = buffer.crashed, buffer.delay_s
            self._db.run(
                lambda session: unit_queries.release(session, unit.id, unit.epoch, crashed=crashed, delay_s=delay_s)
            )
        self.drop(unit.id)
        self._on_end(unit, not buffer.release)

    def _lose(self, buffer: _Buffer) -> None:
        log.warning("unit.lost", unit=buffer.unit.id, epoch=buffer.unit.epoch, lines=len(buffer.lines))
        self.drop(buffer.unit.id)
        self._on_lost([buffer.unit.id])
