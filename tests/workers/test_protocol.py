"""The protocol as a state machine: the real SQL on SQLite, with workers and finalizers that may stop at any point.

Every `yield` of an actor is a place where it may be killed or overtaken. Leases may be taken away at any moment (a
pause, a clock, a partition), the batch may be cancelled or expire. Invariants after every step: no line counts twice,
and what is published holds each line once, with a ledger equal to its lines.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test
from sqlalchemy import StaticPool, create_engine, event, func, select
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.orm import Session

from batchsvc import ids
from batchsvc.accounts.tables import Project
from batchsvc.batches import finalize_queries, unit_queries
from batchsvc.batches.finalize_queries import ResultFile
from batchsvc.batches.lifecycle import TERMINAL, Status
from batchsvc.batches.tables import Batch, Part, Unit, Window
from batchsvc.batches.unit_queries import NewPart
from batchsvc.billing import service as billing
from batchsvc.billing.tables import LedgerEntry, UsageRow
from batchsvc.clock import now_ms
from batchsvc.db.session import Database
from batchsvc.files.tables import File
from batchsvc.tables import metadata

UNITS, LINES, COST = 3, 4, 7
BATCH = "batch_model"


class MemoryDatabase(Database):
    """One SQLite database in memory, on one connection: the statements are the real ones."""

    def __init__(self) -> None:
        self.url, self.is_sqlite = "sqlite://", True
        self.engine = create_engine("sqlite://", poolclass=StaticPool, connect_args={"check_same_thread": False})
        event.listen(self.engine, "connect", lambda connection, _: setattr(connection, "isolation_level", None))
        event.listen(self.engine, "begin", lambda connection: connection.exec_driver_sql("BEGIN"))
        self._read_engine = self.engine.execution_options(read_only=True)


class Service:
    """The batch, and an object store that refuses to write a key twice."""

    def __init__(self) -> None:
        self.db = MemoryDatabase()
        metadata.create_all(self.db.engine)
        self.objects: dict[str, list[tuple[int, int]]] = {}
        now = now_ms()
        with self.db.transaction() as session:
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
                model_digest="d",
                price_version=1,
                reserved_nanos=10**6,
                total=UNITS * LINES,
            )
            session.add(batch)
            session.flush()
            billing.post_reserve(session, batch)
            session.add(Window(batch_id=BATCH, no=0, num_lines=UNITS * LINES, line_nos_key="lines"))
            for no in range(UNITS):
                session.add(
                    Unit(
                        id=f"unit{no}",
                        batch_id=BATCH,
                        project_id="proj",
                        model_digest="d",
                        window_no=0,
                        no=no,
                        s3_key=f"unit/{no}",
                        sha256="",
                        num_lines=LINES,
                        state="ready",
                        done_bitmap=b"\0",
                    )
                )

    def num_changes(self) -> int:
        """Rows changed so far: what didn't change need not be checked again."""
        with self.db.engine.connect() as connection:
            return int(connection.connection.dbapi_connection.total_changes)

    def put(self, key: str, lines: list[tuple[int, int]]) -> None:
        assert key not in self.objects, "an object is written once"
        self.objects[key] = lines

    def batch(self) -> Batch:
        with self.db.reading() as session:
            return session.get_one(Batch, BATCH)


def worker(service: Service, chunk: int) -> Iterator[None]:
    claimed = service.db.run(lambda session: unit_queries.claim(session, "d", "w", 1000, 1))
    yield
    if not claimed:
        return
    unit = claimed[0]
    todo = [bit for bit in range(LINES) if not unit.done_bitmap[0] >> bit & 1]
    for start in range(0, len(todo), chunk):
        bits = todo[start : start + chunk]
        yield  # the engine ran, nothing is durable
        part_id = ids.part_id()
        key = f"part/{unit.id}/{unit.epoch}-{part_id}"
        service.put(key, [(unit.no, bit) for bit in bits])
        yield  # stored, but it doesn't count
        part = NewPart(
            id=part_id,
            s3_key=key,
            sha256="",
            size_bytes=1,
            bitmap=bytes([sum(1 << bit for bit in bits)]),
            lines_ok=len(bits),
            lines_err=0,
            input_tokens=len(bits),
            cached_tokens=0,
            output_tokens=len(bits),
            cost_nanos=COST * len(bits),
            standard_nanos=2 * COST * len(bits),
        )
        counted = service.db.run(
            lambda session, part=part: unit_queries.commit_part(session, unit.id, unit.epoch, part)
        )
        yield
        if not counted:
            return
    service.db.run(lambda session: unit_queries.release(session, unit.id, unit.epoch))


def finalizer(service: Service) -> Iterator[None]:
    lease = service.db.run(lambda session: finalize_queries.begin(session, BATCH, "f", 1000))
    yield
    if lease is None:
        return
    with service.db.reading() as session:
        keys = [part.s3_key for part in finalize_queries.parts(session, BATCH, 0)]
    yield
    output = [line for key in keys for line in service.objects[key]]
    key = f"out/{lease.epoch}"
    service.put(key, output)
    yield
    result = ResultFile(kind="output", s3_key=key, etag="", sha256="", size_bytes=1)
    service.db.run(
        lambda session: finalize_queries.publish(
            session,
            BATCH,
            lease.epoch,
            [result],
            completed=len(output),
            failed=lease.total - len(output),
            file_ttl_s=10,
        )
    )
    yield


class Protocol(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.service = Service()
        self.actors: list[Iterator[None]] = []
        self.published: str | None = None
        self.checked = -1

    @rule(chunk=st.integers(1, LINES))
    def start_worker(self, chunk: int) -> None:
        if len(self.actors) < 5:
            self.actors.append(worker(self.service, chunk))

    @rule()
    def start_finalizer(self) -> None:
        if len(self.actors) < 6:
            self.actors.append(finalizer(self.service))

    @precondition(lambda self: self.actors)
    @rule(data=st.data(), steps=st.integers(1, 12))
    def run_actor(self, data: st.DataObject, steps: int) -> None:
        index = data.draw(st.integers(0, len(self.actors) - 1))
        for _ in range(steps):
            if next(self.actors[index], "ended") == "ended":
                self.actors.pop(index)
                return
            self.check()

    @precondition(lambda self: self.actors)
    @rule(data=st.data())
    def kill_actor(self, data: st.DataObject) -> None:
        self.actors.pop(data.draw(st.integers(0, len(self.actors) - 1)))

    @rule(data=st.data())
    def lose_leases(self, data: st.DataObject) -> None:
        lost = data.draw(st.sets(st.integers(0, UNITS - 1)))
        with self.service.db.transaction() as session:
            for unit in session.scalars(select(Unit).where(Unit.no.in_(lost), Unit.state == "leased")):
                unit.lease_ms = 0
        self.service.db.run(unit_queries.free_expired)

    @rule()
    def overtake_finalizer(self) -> None:
        self.lose_finalizer()
        self.start_finalizer()

    def lose_finalizer(self) -> None:
        with self.service.db.transaction() as session:
            session.get_one(Batch, BATCH).fin_lease_ms = 0

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

    @invariant()
    def check(self) -> None:
        changes = self.service.num_changes()
        if changes == self.checked:
            return
        self.checked = changes
        with self.service.db.reading() as session:
            parts = session.scalars(select(Part)).all()
            counted = [line for part in parts for line in self.service.objects[part.s3_key]]
            assert len(counted) == len(set(counted)), "a line counts once"
            bill = COST * len(counted)
            assert session.scalar(select(func.coalesce(func.sum(UsageRow.cost_nanos), 0))) == bill
            revenue = select(func.coalesce(func.sum(LedgerEntry.amount_nanos), 0))
            assert session.scalar(revenue.where(LedgerEntry.account == "revenue")) == bill
            assert session.scalar(revenue) == 0
            batch = session.get_one(Batch, BATCH)
            assert batch.cost_nanos == bill
            if batch.status in TERMINAL:
                file = session.get_one(File, batch.output_file_id)
                assert self.published in (None, file.id), "what is published stays"
                self.published = file.id
                assert sorted(self.service.objects[file.s3_key]) == sorted(counted), "all that counts is published"
                assert (batch.completed, batch.failed) == (len(counted), UNITS * LINES - len(counted))
                assert batch.status == batch.why
                assert (batch.status == Status.COMPLETED) <= (batch.failed == 0)
                reserved = session.scalar(revenue.where(LedgerEntry.account.startswith("reserved")))
                assert reserved == 0, "the reservation is released"

    def teardown(self) -> None:
        """Healthy actors end every batch, whatever went before."""
        for _ in range(2 * UNITS + 2):
            if self.service.batch().status in TERMINAL:
                break
            self.lose_finalizer()
            with self.service.db.transaction() as session:
                for unit in session.scalars(select(Unit).where(Unit.state == "leased")):
                    unit.lease_ms = 0
            self.service.db.run(unit_queries.free_expired)
            for actor in (worker(self.service, 2), finalizer(self.service)):
                for _ in actor:
                    self.check()
        assert self.service.batch().status in TERMINAL, f"stuck in {self.service.batch().status}"
        self.check()
        self.service.db.dispose()


def run_protocol(examples: int) -> None:
    run_state_machine_as_test(
        Protocol,
        settings=settings(
            max_examples=examples,
            stateful_step_count=40,
            deadline=None,
            database=None,
            suppress_health_check=list(HealthCheck),
            phases=[Phase.generate],
        ),
    )


def test_the_protocol_holds_whatever_dies_and_whenever() -> None:
    run_protocol(15)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_the_protocol_holds_in_many_histories() -> None:
    run_protocol(1_500)


def no_fence(session: Session, unit_id: str, epoch: int, part: NewPart) -> bool:
    unit = session.get_one(Unit, unit_id)
    if unit.state != "sealed":
        unit.state, unit.epoch = "leased", epoch
        session.flush()
    try:
        return COMMIT(session, unit_id, epoch, part)
    except ValueError:  # a bitmap that is not looked at either
        unit.done_bitmap = b"\0"
        session.flush()
        return COMMIT(session, unit_id, epoch, part)


def no_seal(session: Session, batch_id: str) -> int:
    return sum(unit.state != "done" for unit in session.scalars(select(Unit).where(Unit.batch_id == batch_id)))


def no_fin_fence(session: Session, batch_id: str, _fin_epoch: int) -> Batch | None:
    batch = session.get_one(Batch, batch_id)
    batch.status = Status.FINALIZING
    session.flush()
    return batch


COMMIT = unit_queries.commit_part
MUTANTS = {
    "a commit looks at no epoch": (unit_queries, "commit_part", no_fence),
    "the batch isn't sealed": (unit_queries, "seal", no_seal),
    "a publication looks at no epoch": (finalize_queries, "_mine", no_fin_fence),
}


@pytest.mark.mutants
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("removed", MUTANTS)
def test_each_guard_is_missed(monkeypatch: pytest.MonkeyPatch, removed: str) -> None:
    module, name, mutant = MUTANTS[removed]
    monkeypatch.setattr(module, name, mutant)
    with pytest.raises((AssertionError, SQLAlchemyError)):
        run_protocol(1_500)
