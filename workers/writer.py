"""Turns finished lines into parts: a buffer a unit, stored under a new key, then counted by a fenced transaction.

A unit's first part is written soon after its first finished line, so that a user sees progress; then every
`flush_s` seconds or `flush_bytes` bytes, when the unit ends, and at a drain. Every `flush_s` seconds, and when a unit
is given back, the sequences that still run are saved too, so that whoever takes over goes on where they were. What was
stored counts with one transaction: part, sequences and, when the unit is given back, the end of its lease.

While the store or the database doesn't answer, lines stay in their buffers and are tried again with jitter until the
lease can't be trusted any more; the breaker tells the source to claim and feed nothing meanwhile, which bounds the
buffers.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import structlog
from sqlalchemy.exc import DBAPIError
from sqlalchemy.orm import Session

from batchsvc import failpoints
from batchsvc.batches import resume_queries, unit_queries
from batchsvc.batches.resume_file import Unfinished
from batchsvc.batches.resume_queries import SavedSequences
from batchsvc.batches.traces import BatchTraces
from batchsvc.batches.unit_queries import Claim, ClaimedUnit, NewPart
from batchsvc.clock import monotonic_s, now_ns
from batchsvc.db.session import Database
from batchsvc.errors import ServiceError
from batchsvc.store.s3 import ObjectStore
from batchsvc.threads import WorkThread
from workers import objects
from workers.breaker import Breaker
from workers.lease import LeaseKeeper
from workers.translate import FinishedLine

_FIRST_FLUSH_S = 0.5  # the first part has to count within a second of the first line

log = structlog.get_logger(__name__)


@dataclass(slots=True)
class _Write:
    """One write of a unit: what it takes, and how much of that is in the store. Whether it counts is not known."""

    lines: list[FinishedLine]  # the first ones of the buffer
    sequences: Sequence[Unfinished]
    saves: bool  # whether the sequences are to be stored
    ends: bool
    part: NewPart | None = None
    saved: SavedSequences | None = None


@dataclass(slots=True)
class _Buffer:
    unit: ClaimedUnit
    lines: list[FinishedLine] = field(default_factory=list)
    failures: list[FinishedLine] = field(default_factory=list)  # error lines of what may perhaps run again
    num_bytes: int = 0
    since_s: float = 0.0  # when the oldest line came
    has_part: bool = False
    num_left: int = 0  # lines that don't count yet
    is_ending: bool = False
    release: bool = False
    crashed: bool = False
    delay_s: float = 0.0
    last_sequences: Sequence[Unfinished] = ()  # what ran when the unit was given back
    is_live: bool = False  # its sequences run in the engine
    saved_s: float = 0.0  # when sequences were last saved, or the unit began
    saved_mark: list[tuple[int, int]] = field(default_factory=list)  # what was saved then
    saved_key: str | None = None  # where, if this owner has saved any
    num_saves: int = 0
    write: _Write | None = None
    began_ns: int = field(default_factory=now_ns)

    def __post_init__(self) -> None:
        self.num_left = self.unit.num_lines - int.from_bytes(self.unit.done_bitmap, "little").bit_count()

    @property
    def has_work(self) -> bool:
        return bool(self.lines or self.failures or self.is_ending or self.write)

    def due_s(self, flush_s: float, flush_bytes: int) -> float | None:
        """Monotonic time at which to write; None: nothing to do."""
        if self.is_ending or self.num_bytes >= flush_bytes or (self.lines and self.unit.is_suspect):
            return 0.0
        times = [self.saved_s + flush_s] if self.is_live else []
        if self.lines or self.failures:
            times.append(self.since_s + (flush_s if self.has_part else min(flush_s, _FIRST_FLUSH_S)))
        return min(times, default=None)


class Writer:
    """One thread that writes the parts of all live units.

    `unfinished` gives what runs of a unit at this moment. `on_end` gets a unit whose last word is written (`is_done`,
    or released); `on_lost` one that belongs to another. All are called on the writer's thread.
    """

    def __init__(
        self,
        db: Database,
        store: ObjectStore,
        leases: LeaseKeeper,
        *,
        flush_s: float,
        flush_bytes: int,
        breaker: Breaker,
        unfinished: Callable[[str], list[Unfinished]],
        on_end: Callable[[ClaimedUnit, bool], None],
        on_lost: Callable[[list[Claim]], None],
        on_crash: Callable[[Exception], None],
    ) -> None:
        self._db = db
        self._store = store
        self._leases = leases
        self._flush_s = flush_s
        self._flush_bytes = flush_bytes
        self._breaker = breaker
        self._unfinished = unfinished
        self._on_end = on_end
        self._on_lost = on_lost
        self._changed = threading.Condition()
        self._buffers: dict[str, _Buffer] = {}
        self._stopped = False
        self._ended: Counter[str] = Counter()
        self._traces = BatchTraces(db)
        self._thread = WorkThread("writer", self._run, on_crash)

    def start(self) -> None:
        self._thread.start()

    def stop(self, timeout_s: float | None = None) -> None:
        """Stop after the write under way, even with lines in the buffers: their units are someone else's then."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()
        self._thread.join(timeout_s)

    @property
    def num_bytes(self) -> int:
        """Bytes of finished lines that wait for their part."""
        with self._changed:
            return sum(buffer.num_bytes for buffer in self._buffers.values())

    def num_open(self) -> int:
        """Units whose last word isn't written."""
        with self._changed:
            return len(self._buffers)

    def ended(self) -> dict[str, int]:
        """Lines that count since the start, ok and error, and the tokens that they are billed for."""
        with self._changed:
            return dict(self._ended)

    def has_work(self) -> bool:
        """Whether anything waits to be written."""
        with self._changed:
            return any(buffer.has_work for buffer in self._buffers.values())

    def begin(self, unit: ClaimedUnit) -> None:
        """A unit's sequences run from now on."""
        with self._changed:
            buffer = self._of(unit)
            buffer.is_live, buffer.saved_s = True, monotonic_s()
            self._changed.notify_all()

    def add(self, unit: ClaimedUnit, lines: list[FinishedLine]) -> None:
        """Take finished lines of a live unit."""
        with self._changed:
            buffer = self._aged(unit)
            buffer.lines += lines
            buffer.num_bytes += sum(len(finished.line.row) for finished in lines)
            self._changed.notify_all()

    def fail(self, unit: ClaimedUnit, lines: list[FinishedLine]) -> None:
        """Take error lines of what failed for a reason of the engine: they count unless the lines may run again."""
        with self._changed:
            self._aged(unit).failures += lines
            self._changed.notify_all()

    def end(
        self,
        unit: ClaimedUnit,
        *,
        release: bool,
        crashed: bool = False,
        delay_s: float = 0,
        unfinished: Sequence[Unfinished] = (),
    ) -> None:
        """No more lines come: write what is there, save what is unfinished, then, if it isn't done, `release` the
        unit."""
        with self._changed:
            buffer = self._of(unit)
            buffer.is_ending, buffer.release, buffer.crashed = True, release, crashed
            buffer.delay_s, buffer.last_sequences = max(delay_s, buffer.delay_s), unfinished
            self._changed.notify_all()

    def drop(self, claim: Claim) -> None:
        """Forget a unit that was lost."""
        with self._changed:
            buffer = self._buffers.get(claim.unit_id)
            if buffer is not None and buffer.unit.epoch == claim.epoch:
                del self._buffers[claim.unit_id]
            if not self._buffers:  # nothing is left whose writing could show that it works again
                self._breaker.worked("writes")
            self._changed.notify_all()

    def _of(self, unit: ClaimedUnit) -> _Buffer:
        buffer = self._buffers.get(unit.id)
        if buffer is None or buffer.unit.epoch != unit.epoch:  # what an earlier claim has left is void
            buffer = self._buffers[unit.id] = _Buffer(unit)
        return buffer

    def _aged(self, unit: ClaimedUnit) -> _Buffer:
        buffer = self._of(unit)
        if not buffer.lines and not buffer.failures:
            buffer.since_s = monotonic_s()
        return buffer

    def _run(self) -> None:
        while (buffer := self._next()) is not None:
            if not self._leases.is_held(buffer.unit.claim):
                self._lose(buffer)
                continue
            try:
                has_written = self._write(buffer)
            except (ServiceError, DBAPIError) as error:
                wait_s = self._breaker.failed("writes")
                log.warning("part.not_written", unit=buffer.unit.id, error=type(error).__name__, again_in_s=wait_s)
            else:
                if has_written:
                    self._breaker.worked("writes")

    def _next(self) -> _Buffer | None:
        """Waits for the buffer that is due first; None when stopped."""
        with self._changed:
            while not self._stopped:
                now = monotonic_s()
                retry_s = self._breaker.retry_s("writes")
                times = {
                    buffer.unit.id: max(due, retry_s)
                    for buffer in self._buffers.values()
                    if (due := buffer.due_s(self._flush_s, self._flush_bytes)) is not None
                }
                if times:
                    first = min(times, key=lambda unit_id: times[unit_id])
                    if times[first] <= now:
                        return self._buffers[first]
                self._changed.wait(max(0.0, min(times.values()) - now) if times else None)
            return None

    def _write(self, buffer: _Buffer) -> bool:
        """Write what is due of a unit. False: nothing was, or the unit is lost."""
        unit = buffer.unit
        if buffer.failures and not self._settle(buffer):
            return self._lose(buffer)
        if buffer.write is None:
            buffer.write = self._take(buffer)
        write = buffer.write
        began_ns = now_ns()
        self._put(buffer, write)
        if not self._leases.is_held(unit.claim):
            return self._lose(buffer)
        is_news = bool(write.part or write.saved or (write.ends and buffer.num_left))
        if is_news:
            if not self._db.run(lambda session: self._count(session, buffer, write)):
                return self._lose(buffer)
            if write.part:
                self._traces.counted(unit, write.part, began_ns=began_ns)
                failpoints.reach("part.counted")
        self._counted(buffer, write)
        if write.ends:
            self._end(buffer)
        return is_news

    def _settle(self, buffer: _Buffer) -> bool:
        """Ask which of the failed lines end as error lines. False: the unit is lost."""
        unit = buffer.unit
        with self._changed:
            failures = list(buffer.failures)
        failed_now = {line.bit: unit.attempts.get(line.bit, 0) + 1 for line in failures}
        verdict = self._db.run(lambda session: unit_queries.return_lines(session, unit.id, unit.epoch, failed_now))
        if verdict is None:
            return False
        with self._changed:
            ended = [line for line in failures if line.bit in verdict.failed]
            buffer.failures = buffer.failures[len(failures) :]
            buffer.lines += ended
            buffer.num_bytes += sum(len(finished.line.row) for finished in ended)
            buffer.delay_s = max(buffer.delay_s, verdict.delay_s)
        return True

    def _take(self, buffer: _Buffer) -> _Write:
        """What the next write is about. Sequences first: one that ends meanwhile is known twice, never not at all."""
        sequences: Sequence[Unfinished] = self._unfinished(buffer.unit.id) if buffer.is_live else ()
        with self._changed:
            ends = buffer.is_ending and not buffer.failures
            if buffer.is_ending:
                sequences = buffer.last_sequences
            is_due = ends or monotonic_s() >= buffer.saved_s + self._flush_s
            is_news = bool(sequences) and _mark(sequences) != buffer.saved_mark
            return _Write(list(buffer.lines), sequences, saves=is_due and is_news, ends=ends)

    def _put(self, buffer: _Buffer, write: _Write) -> None:
        """Store what isn't stored yet."""
        unit = buffer.unit
        if write.lines and write.part is None:
            failpoints.reach("lines.finished")
            write.part = objects.store_part(self._store, unit, write.lines)
            failpoints.reach("part.stored")
        if write.saved is None and write.saves:
            buffer.num_saves += 1  # never the same key twice, not even for a try that failed
            write.saved = objects.store_sequences(self._store, unit, write.sequences, buffer.num_saves)
            failpoints.reach("sequences.stored")
        elif write.saved is None and write.part and buffer.is_live:
            write.saved = objects.counted(write.sequences)

    def _count(self, session: Session, buffer: _Buffer, write: _Write) -> bool:
        unit, lines_left = buffer.unit, buffer.num_left - len(write.lines)
        if write.part and not unit_queries.commit_part(session, unit.id, unit.epoch, write.part):
            return False
        if not lines_left:
            return True
        if write.saved and not resume_queries.save(session, unit.id, unit.epoch, write.saved):
            return False
        if write.ends and buffer.release:
            crashed, delay_s = buffer.crashed, buffer.delay_s
            return unit_queries.release(session, unit.id, unit.epoch, crashed=crashed, delay_s=delay_s)
        return True

    def _counted(self, buffer: _Buffer, write: _Write) -> None:
        now, old_key = monotonic_s(), None
        with self._changed:
            buffer.write = None
            del buffer.lines[: len(write.lines)]
            buffer.num_bytes -= sum(len(finished.line.row) for finished in write.lines)
            buffer.num_left -= len(write.lines)
            buffer.since_s = now
            buffer.has_part |= write.part is not None
            if (part := write.part) is not None:
                self._ended.update(
                    ok=part.lines_ok,
                    error=part.lines_err,
                    input_tokens=part.input_tokens,
                    cached_tokens=part.cached_tokens,
                    output_tokens=part.output_tokens,
                )
            if write.saves or now >= buffer.saved_s + self._flush_s:
                buffer.saved_s = now
            if write.saved and write.saved.key:
                old_key, buffer.saved_key = buffer.saved_key, write.saved.key
                buffer.saved_mark = _mark(write.sequences)
        if old_key:
            self._delete(old_key)

    def _end(self, buffer: _Buffer) -> None:
        failpoints.reach("unit.written")
        is_done = not buffer.num_left
        if is_done and buffer.saved_key:
            self._delete(buffer.saved_key)
        self.drop(buffer.unit.claim)
        self._traces.ran(buffer.unit, "done" if is_done else "given back", began_ns=buffer.began_ns)
        self._on_end(buffer.unit, is_done)

    def _lose(self, buffer: _Buffer) -> bool:
        log.warning("unit.lost", unit=buffer.unit.id, epoch=buffer.unit.epoch, lines=len(buffer.lines))
        self.drop(buffer.unit.claim)
        self._traces.ran(buffer.unit, "lost", began_ns=buffer.began_ns)
        self._leases.give_up([buffer.unit.claim])  # a renewal that comes late must not keep what nobody runs
        self._on_lost([buffer.unit.claim])
        return False

    def _delete(self, key: str) -> None:
        """Delete an object of this owner that no row names any more; what stays is for the reaper's audit."""
        try:
            self._store.delete([key])
        except ServiceError as error:
            log.info("sequences.not_deleted", key=key, error=type(error).__name__)


def _mark(sequences: Sequence[Unfinished]) -> list[tuple[int, int]]:
    """Tells one state of sequences that only grow from another."""
    return [(one.line_no, one.num_tokens) for one in sequences]
