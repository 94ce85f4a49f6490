"""The protocol as a state machine: the real SQL on SQLite, with workers and finalizers that may stop at any point.

Every `yield` of an actor is a place where it may be killed or overtaken. Leases may be taken away at any moment (a
pause, a clock, a partition, a crash: twice in a row splits a unit, again and again condemns a line). Unfinished
sequences are saved under the same fence. The batch may be cancelled or expire, the object of a part that counts may be
damaged, a commit may be repeated because its answer was lost. Invariants after every step: no line counts twice, the
money is that of the lines that count, and what is published holds each line once. At the end of every history healthy
actors must be able to end the batch.

A subclass narrows the machine to few units and few faults: that is how a mutant's counterexample is found quickly.
"""

from __future__ import annotations

import itertools
import sqlite3
from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple

from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test
from sqlalchemy import StaticPool, create_engine, event, func, select

from batchsvc.accounts.tables import Project
from batchsvc.batches import finalize_queries, poison_queries, resume_queries, unit_queries
from batchsvc.batches.finalize_queries import ResultFile
from batchsvc.batches.lifecycle import TERMINAL, Status
from batchsvc.batches.resume_queries import SavedSequences
from batchsvc.batches.tables import Batch, Part, Unit, Window
from batchsvc.batches.unit_queries import ClaimedUnit, NewPart
from batchsvc.billing import service as billing
from batchsvc.billing.tables import LedgerEntry, UsageRow
from batchsvc.clock import now_ms
from batchsvc.db.session import Database
from batchsvc.files.tables import File
from batchsvc.store import keys
from batchsvc.tables import metadata

COST = 7
BATCH, DIGEST = "batch_model", "d"
FAULTS = frozenset({"kill", "lose_leases", "overtake", "stop", "damage", "repeat"})
_ACTORS = 6
_STEPS, _TO_THE_END = st.integers(1, 12), 100


class Line(NamedTuple):
    """A line by the unit file that it stands in, and its place there."""

    file: str
    bit: int


class MemoryDatabase(Database):
    """One SQLite database in memory, on one connection: the statements are the real ones."""

    def __init__(self) -> None:
        self.url, self.is_sqlite = "sqlite://", True
        self.engine = create_engine("sqlite://", poolclass=StaticPool, connect_args={"check_same_thread": False})
        event.listen(self.engine, "connect", lambda connection, _: setattr(connection, "isolation_level", None))
        event.listen(self.engine, "begin", lambda connection: connection.exec_driver_sql("BEGIN"))
        self._read_engine = self.engine.execution_options(read_only=True)

    @property
    def raw(self) -> sqlite3.Connection:
        with self.engine.connect() as connection:
            found = connection.connection.dbapi_connection
        assert isinstance(found, sqlite3.Connection)
        return found


class Service:
    """The batch, and an object store that refuses to write a key twice."""

    def __init__(self, num_units: int, num_lines: int) -> None:
        self.num_units, self.num_lines = num_units, num_lines
        self.db = _working_database()
        _template(num_units, num_lines).raw.backup(self.db.raw)
        self.objects: dict[str, dict[Line, bool]] = {}  # key -> lines, and whether each is an answer
        self.damaged: set[str] = set()
        self._part_ids = (f"part{number:04}" for number in itertools.count())  # told apart without chance

    def part_id(self) -> str:
        return next(self._part_ids)

    @property
    def total(self) -> int:
        return self.num_units * self.num_lines

    def num_changes(self) -> int:
        """Rows changed so far: what didn't change need not be checked again."""
        return self.db.raw.total_changes

    def put(self, key: str, lines: dict[Line, bool]) -> None:
        assert key not in self.objects, "an object is written once"
        self.objects[key] = lines

    def batch(self) -> Batch:
        with self.db.reading() as session:
            return session.get_one(Batch, BATCH)


def worker(service: Service, chunk: int, *, repeats: bool) -> Iterator[None]:
    """Claims one unit and runs `chunk` lines a part."""
    claimed = service.db.run(lambda session: unit_queries.claim(session, DIGEST, "w", 1000, 1))
    yield
    for unit in claimed:
        yield from _run_unit(service, unit, chunk, is_ok=True, repeats=repeats)


def undertaker(service: Service) -> Iterator[None]:
    """Writes the error line of a condemned line, as the reaper does."""
    claimed = service.db.run(lambda session: unit_queries.claim_poison(session, "r", 1000, 1))
    yield
    for unit in claimed:
        yield from _run_unit(service, unit, service.num_lines, is_ok=False, repeats=False)


def _run_unit(service: Service, unit: ClaimedUnit, chunk: int, *, is_ok: bool, repeats: bool) -> Iterator[None]:
    done = int.from_bytes(unit.done_bitmap, "little")
    todo = [bit for bit in range(unit.num_lines) if not done >> bit & 1]
    if unit.resume_key is not None:
        assert {line.file for line in service.objects[unit.resume_key]} == {unit.s3_key}, "sequences of its own lines"
    for start in range(0, len(todo), chunk):
        bits = todo[start : start + chunk]
        yield  # the engine is on its way, nothing is durable
        if is_ok:
            key = keys.progress_of(BATCH, unit.id, unit.epoch, start)
            service.put(key, {Line(unit.s3_key, bit): is_ok for bit in bits})
            yield  # unfinished sequences are stored, but the row doesn't name them
            saved = SavedSequences(num_lines=len(bits), num_tokens=1, key=key, sha256="")
            if not service.db.run(lambda s, saved=saved: resume_queries.save(s, unit.id, unit.epoch, saved)):
                return
            yield
        part_id = service.part_id()
        key = keys.part(BATCH, unit.epoch, part_id)
        service.put(key, {Line(unit.s3_key, bit): is_ok for bit in bits})
        yield  # stored, but it doesn't count
        part = _part(part_id, key, bits, is_ok=is_ok)
        for _ in range(1 + repeats):  # again, because the answer was lost: it changes nothing
            counted = service.db.run(lambda s, part=part: unit_queries.commit_part(s, unit.id, unit.epoch, part))
            yield
            if not counted:
                return
    service.db.run(lambda session: unit_queries.release(session, unit.id, unit.epoch))


def _part(part_id: str, key: str, bits: list[int], *, is_ok: bool) -> NewPart:
    count = len(bits) if is_ok else 0
    return NewPart(
        id=part_id,
        s3_key=key,
        sha256="",
        size_bytes=1,
        bitmap=bytes([sum(1 << bit for bit in bits)]),
        lines_ok=count,
        lines_err=len(bits) - count,
        input_tokens=count,
        cached_tokens=0,
        output_tokens=count,
        cost_nanos=COST * count,
        standard_nanos=2 * COST * count,
    )


def finalizer(service: Service) -> Iterator[None]:
    """Takes back what is damaged, or publishes what counts."""
    lease = service.db.run(lambda session: finalize_queries.begin(session, BATCH, "f", 1000))
    yield
    if lease is None:
        return
    with service.db.reading() as session:
        parts = finalize_queries.parts(session, BATCH, 0)
    yield
    damaged = [part for part in parts if part.s3_key in service.damaged]
    for part in damaged:
        if not service.db.run(lambda s, part=part: finalize_queries.void_part(s, BATCH, lease.epoch, part.id)):
            return
        yield
    if damaged:
        service.db.run(lambda session: finalize_queries.give_up(session, BATCH, lease.epoch))
        return
    lines = {line: is_ok for part in parts for line, is_ok in service.objects[part.s3_key].items()}
    num_ok = sum(lines.values())
    key = keys.output(BATCH, lease.epoch, "output")
    service.put(key, lines)
    yield
    result = ResultFile(kind="output", s3_key=key, etag="", sha256="", size_bytes=1)
    ended = {"completed": num_ok, "failed": service.total - num_ok, "file_ttl_s": 10}
    service.db.run(lambda session: finalize_queries.publish(session, BATCH, lease.epoch, [result], **ended))
    yield


class Protocol(RuleBasedStateMachine):
    """All of it. `weaken` is called before each history: there a mutant removes its guard."""

    num_units, num_lines = 3, 4
    faults = FAULTS

    def __init__(self) -> None:
        super().__init__()
        self.service = Service(self.num_units, self.num_lines)
        self.actors: list[Iterator[None]] = []
        self.published: str | None = None
        self.checked = -1

    @rule(chunk=st.integers(1, 4), repeats=st.booleans(), steps=_STEPS)
    def start_worker(self, chunk: int, repeats: bool, steps: int) -> None:
        self._start(worker(self.service, chunk, repeats=repeats and "repeat" in self.faults), steps)

    @rule(steps=_STEPS)
    def start_finalizer(self, steps: int) -> None:
        self._start(finalizer(self.service), steps)

    @precondition(lambda self: "lose_leases" in self.faults)
    @rule(steps=_STEPS)
    def start_undertaker(self, steps: int) -> None:
        self._start(undertaker(self.service), steps)

    def _start(self, actor: Iterator[None], steps: int) -> None:
        if len(self.actors) < _ACTORS:
            self.actors.append(actor)
            self._run(actor, steps)

    def _run(self, actor: Iterator[None], steps: int) -> None:
        for _ in range(steps):
            if next(actor, "ended") == "ended":
                self.actors.remove(actor)
                return
            self.check()

    @precondition(lambda self: self.actors)
    @rule(data=st.data(), steps=_STEPS)
    def run_actor(self, data: st.DataObject, steps: int) -> None:
        self._run(data.draw(st.sampled_from(self.actors)), steps)

    @precondition(lambda self: self.actors and "kill" in self.faults)
    @rule(data=st.data())
    def kill_actor(self, data: st.DataObject) -> None:
        self.actors.remove(data.draw(st.sampled_from(self.actors)))

    @precondition(lambda self: "lose_leases" in self.faults)
    @rule(data=st.data())
    def lose_leases(self, data: st.DataObject) -> None:
        with self.service.db.transaction() as session:
            held = session.scalars(select(Unit).where(Unit.state == "leased").order_by(Unit.no)).all()
            for unit in held:
                if data.draw(st.booleans()):
                    unit.lease_ms = 0
        self.service.db.run(unit_queries.free_expired)

    @precondition(lambda self: "overtake" in self.faults)
    @rule(steps=_STEPS)
    def overtake_finalizer(self, steps: int) -> None:
        self.lose_finalizer()
        self.start_finalizer(steps)

    def lose_finalizer(self) -> None:
        with self.service.db.transaction() as session:
            session.get_one(Batch, BATCH).fin_lease_ms = 0

    @precondition(lambda self: "stop" in self.faults)
    @rule(how=st.sampled_from(["cancel", "expire"]))
    def stop_batch(self, how: str) -> None:
        with self.service.db.transaction() as session:
            batch = session.get_one(Batch, BATCH)
            if batch.status != Status.IN_PROGRESS:
                return
            if how == "cancel":
                batch.status, batch.cancelling_ms = Status.CANCELLING, 1
            else:
                batch.expires_ms = 1

    @precondition(lambda self: "damage" in self.faults)
    @rule(data=st.data())
    def damage_part(self, data: st.DataObject) -> None:
        with self.service.db.reading() as session:
            found = session.scalars(select(Part.s3_key).where(~Part.is_void).order_by(Part.created_ms, Part.id)).all()
        if found and self.service.batch().status not in TERMINAL:
            self.service.damaged.add(data.draw(st.sampled_from(found)))

    @invariant()
    def check(self) -> None:
        changes = self.service.num_changes()
        if changes != self.checked:
            self.checked = changes
            self._check()

    def _check(self) -> None:
        service = self.service
        with service.db.reading() as session:
            parts = session.scalars(select(Part).where(~Part.is_void)).all()
            counted = [item for part in parts for item in service.objects[part.s3_key].items()]
            lines = dict(counted)
            assert len(counted) == len(lines), "a line counts once"
            num_ok = sum(lines.values())
            bill = COST * num_ok
            assert session.scalar(select(func.coalesce(func.sum(UsageRow.cost_nanos), 0))) == bill
            revenue = select(func.coalesce(func.sum(LedgerEntry.amount_nanos), 0))
            assert session.scalar(revenue.where(LedgerEntry.account == "revenue")) == bill
            assert session.scalar(revenue) == 0
            batch = session.get_one(Batch, BATCH)
            assert batch.cost_nanos == bill
            if batch.status not in TERMINAL:
                assert (batch.completed, batch.failed) == (num_ok, len(lines) - num_ok)
                return
            file = session.get_one(File, batch.output_file_id)
            assert self.published in (None, file.id), "what is published stays"
            self.published = file.id
            assert service.objects[file.s3_key] == lines, "all that counts is published"
            assert (batch.completed, batch.failed) == (num_ok, service.total - num_ok)
            assert batch.status == batch.why
            assert (batch.status == Status.COMPLETED) <= (len(lines) == service.total), "each line has its end"
            reserved = session.scalar(revenue.where(LedgerEntry.account.startswith("reserved")))
            assert reserved == 0, "the reservation is released"

    def teardown(self) -> None:
        """Healthy actors end every batch, whatever went before; and what sleeps may wake when all is over."""
        for _ in range(4 * self.service.total + 4):
            if self.service.batch().status in TERMINAL:
                break
            self._heal()
            for actor in (worker(self.service, 4, repeats=False), undertaker(self.service), finalizer(self.service)):
                for _ in actor:
                    self.check()
        assert self.service.batch().status in TERMINAL, f"stuck in {self.service.batch().status}"
        self.check()
        for sleeper in list(self.actors):
            self._run(sleeper, _TO_THE_END)

    def _heal(self) -> None:
        self.lose_finalizer()
        with self.service.db.transaction() as session:
            if session.get_one(Batch, BATCH).is_paused:
                poison_queries.resume(session, BATCH)
            for unit in session.scalars(select(Unit).where(Unit.state == "leased")):
                unit.state, unit.owner = "ready", None  # its owner let go in order


def run_protocol(machine: type[Protocol], *, examples: int, steps: int = 40, is_repeatable: bool = False) -> None:
    """So many histories of so many steps. `is_repeatable`: the same ones each time."""
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=examples,
            stateful_step_count=steps,
            deadline=None,
            database=None,
            derandomize=is_repeatable,
            report_multiple_bugs=False,
            suppress_health_check=list(HealthCheck),
            phases=[Phase.generate],
        ),
    )


@lru_cache(maxsize=1)
def _working_database() -> MemoryDatabase:
    """The one that all histories use, one after the other: its statements are compiled once."""
    return MemoryDatabase()


@lru_cache(maxsize=8)
def _template(num_units: int, num_lines: int) -> MemoryDatabase:
    """A database with a batch in progress."""
    db, now = MemoryDatabase(), now_ms()
    metadata.create_all(db.engine)
    with db.transaction() as session:
        session.add(Project(id="proj", name="p", salt="s", created_ms=now))
        batch = Batch(
            id=BATCH,
            project_id="proj",
            api_key_id="key",
            endpoint="/v1/chat/completions",
            input_file_id="file",
            completion_window="24h",
            tier="batch_24h",
            status=Status.IN_PROGRESS,
            created_ms=now,
            expires_ms=now + 10**9,
            model_id="m",
            model_digest=DIGEST,
            price_version=1,
            reserved_nanos=10**6,
            total=num_units * num_lines,
        )
        session.add(batch)
        session.flush()
        billing.post_reserve(session, batch)
        session.add(Window(batch_id=BATCH, no=0, num_lines=num_units * num_lines, line_nos_key="lines"))
        for no in range(num_units):
            session.add(
                Unit(
                    id=f"unit{no}",
                    batch_id=BATCH,
                    project_id="proj",
                    model_digest=DIGEST,
                    window_no=0,
                    no=no,
                    s3_key=f"unit/{no}",
                    sha256="",
                    num_lines=num_lines,
                    state="ready",
                    done_bitmap=b"\0",
                )
            )
    return db
