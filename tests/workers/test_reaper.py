"""The reaper: each repair alone, on both databases."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest
from sqlalchemy import select
from sqlalchemy.exc import OperationalError

from batchsvc.batches import garbage_queries, service, unit_queries, worker_queries
from batchsvc.batches.lifecycle import Status
from batchsvc.batches.tables import Garbage, Unit, Window, Worker
from batchsvc.clock import monotonic_s, now_ms
from batchsvc.errors import UnavailableError
from batchsvc.files import service as files
from batchsvc.files.tables import File
from tests.workers.conftest import DIGEST, World
from workers.reaper import Reaper


class Line:
    """A dispatcher that keeps what was sent; `length` is what every queue claims to hold."""

    def __init__(self, length: int | None = 0) -> None:
        self.length = length
        self.sent: list[tuple[str, str, int]] = []

    def plan(self, batch_id: str) -> None:
        self.sent.append(("plan", batch_id, 1))

    def finalize(self, batch_id: str) -> None:
        self.sent.append(("finalize", batch_id, 1))

    def quote(self, quote_id: str) -> None:
        self.sent.append(("quote", quote_id, 1))

    def ticket(self, digest: str, count: int = 1) -> None:
        self.sent.append(("ticket", digest, count))

    def waiting(self, queue_name: str) -> int | None:
        return self.length

    def close(self) -> None:
        pass


def reaper(world: World, line: Line, do: Callable[[str], object] = lambda _: None) -> Reaper:
    return Reaper(world.settings, world.db, world.store, line, plan=do, finalize=do, quote=do)


def test_leases_that_are_over_are_freed_with_a_mark(world: World) -> None:
    batch_id = world.add_batch(num_lines=4, unit_lines=2)
    world.db.run(lambda session: unit_queries.claim(session, DIGEST, "w", 0.01, 1))
    world.db.run(lambda session: unit_queries.claim(session, DIGEST, "w", 60, 1))
    time.sleep(0.05)
    reaper(world, Line()).tick()
    assert [(unit.state, unit.crash_count) for unit in world.units(batch_id)] == [("ready", 1), ("leased", 0)]


def test_an_outage_of_the_database_is_no_crash_of_the_workers(
    sqlite_world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever couldn't renew gets a lease's time to do it, from the moment on at which the database is back."""
    world = sqlite_world
    batch_id = world.add_batch(num_lines=2, unit_lines=2)
    world.db.run(lambda session: unit_queries.claim(session, DIGEST, "w", 0.01, 1))
    here, real = reaper(world, Line()), unit_queries.free_expired
    here._settings = world.settings.model_copy(update={"lease_s": 600.0})

    def away(_session: object) -> int:
        raise OperationalError("UPDATE", {}, Exception("the server closed the connection"))

    monkeypatch.setattr(unit_queries, "free_expired", away)
    time.sleep(0.05)
    here.tick()
    monkeypatch.setattr(unit_queries, "free_expired", real)
    here.tick()
    assert world.units(batch_id)[0].state == "leased", "its owner may be about to renew it"
    here._unsure_until_s = monotonic_s()
    here.tick()
    assert (world.units(batch_id)[0].state, world.units(batch_id)[0].crash_count) == ("ready", 1)


def test_the_queue_is_filled_up_to_the_claimable_units(world: World) -> None:
    world.add_batch(num_lines=10, unit_lines=2)
    line = Line(length=2)
    here = reaper(world, line)
    here.tick()
    here.tick()
    assert line.sent == [("ticket", DIGEST, 3), ("ticket", DIGEST, 2)], "each unit has one ticket until it is quiet"
    full = Line(length=5)
    reaper(world, full).tick()
    silent = Line(length=None)
    reaper(world, silent).tick()
    assert not full.sent and not silent.sent


def test_tasks_that_were_lost_are_sent_again_or_done_here(world: World) -> None:
    planned = world.add_batch(num_lines=2, unit_lines=2)
    world.set_units(planned, state="pending")
    world.set_batch(planned, status=Status.VALIDATING)
    done = world.add_batch(num_lines=2, unit_lines=2)
    world.set_units(done, state="done")
    line = Line()
    reaper(world, line).tick()
    assert line.sent == [("plan", planned, 1), ("finalize", done, 1)]
    behind = Line(length=1)
    reaper(world, behind).tick()
    assert not behind.sent, "the queue holds them already"
    did: list[str] = []
    reaper(world, Line(length=None), did.append).tick()
    assert did == [planned, done], "without Redis it does the work itself"


def test_what_no_message_starts_is_done_here(world: World) -> None:
    """Redis answers, but takes no message, or nobody reads them."""
    planned = world.add_batch(num_lines=2, unit_lines=2)
    world.set_units(planned, state="pending")
    world.set_batch(planned, status=Status.VALIDATING)
    line, did = Line(length=0), list[str]()
    patient = reaper(world, line, did.append)
    for _ in range(6):
        patient.tick()
    assert (len(line.sent), did) == (6, [])
    patient.tick()
    assert (len(line.sent), did) == (6, [planned])
    world.set_batch(planned, plan_lease_ms=now_ms() + 60_000)
    patient.tick()
    world.set_batch(planned, plan_lease_ms=0)
    patient.tick()
    assert (len(line.sent), did) == (7, [planned]), "somebody had begun: messages arrive again"


def test_a_batch_whose_time_is_over_before_it_was_planned_expires_empty(world: World) -> None:
    batch_id = world.add_batch(num_lines=4, unit_lines=2)
    stored = [unit.s3_key for unit in world.units(batch_id)]
    world.set_units(batch_id, state="pending")
    world.set_batch(batch_id, status=Status.VALIDATING, in_progress_ms=None, expires_ms=1)
    here = reaper(world, Line())
    here.tick()
    here.sweep()
    batch = world.batch(batch_id)
    assert (batch.status, batch.why, batch.total, batch.plan_epoch) == (Status.EXPIRED, Status.EXPIRED, 0, 1)
    with world.db.reading() as session:
        assert not session.scalars(select(Unit)).all() and not session.scalars(select(Window)).all()
    assert not any(world.store.head(key) for key in stored)


def test_the_plan_of_a_cancelled_batch_is_forgotten_though_its_planner_is_gone(world: World) -> None:
    batch_id, other = world.add_batch(num_lines=4, unit_lines=2), world.add_batch(num_lines=2, unit_lines=2)
    stored = [unit.s3_key for unit in world.units(batch_id)]
    world.set_units(batch_id, state="pending")
    world.set_batch(batch_id, status=Status.VALIDATING, in_progress_ms=None)
    with world.db.transaction() as session:
        service.cancel(session, world.batch(batch_id).project_id, batch_id)
    here = reaper(world, Line())
    here.tick()
    here.sweep()
    assert world.batch(batch_id).status == Status.CANCELLED and not world.units(batch_id)
    with world.db.reading() as session:
        assert set(session.scalars(select(Window.batch_id))) == {other}
    assert not any(world.store.head(key) for key in stored)
    assert len(world.units(other)) == 1


def test_dead_workers_are_forgotten_once_they_hold_nothing(world: World) -> None:
    world.add_batch(num_lines=2, unit_lines=2)
    for owner in ("alive", "idle", "holding"):
        world.db.run(lambda session, owner=owner: worker_queries.register(session, owner, DIGEST))
    with world.db.transaction() as session:
        for row in session.scalars(select(Worker).where(Worker.id != "alive")):
            row.beat_ms = 1
    world.db.run(lambda session: unit_queries.claim(session, DIGEST, "holding", 60, 1))
    reaper(world, Line()).tick()
    with world.db.reading() as session:
        assert set(session.scalars(select(Worker.id))) == {"alive", "holding"}


def test_files_past_their_life_go_and_so_do_their_objects(world: World) -> None:
    world.add_batch(num_lines=2, unit_lines=2)
    project_id = next(iter(world.units(world.add_batch(num_lines=2, unit_lines=2)))).project_id
    world.store.put("in/p/file-a", b"x")
    with world.db.transaction() as session:
        row = files.add_upload(
            session,
            file_id="file-a",
            project_id=project_id,
            filename="a.jsonl",
            s3_key="in/p/file-a",
            etag="",
            sha256="",
            size_bytes=1,
            life_s=3600,
        )
        row.expires_ms = 1
    here = reaper(world, Line())
    here.tick()
    here.sweep()
    with world.db.reading() as session:
        assert "in/p/file-a" not in files.known_keys(session, ["in/p/file-a"])
    assert world.store.head("in/p/file-a") is None
    with world.db.reading() as session:
        assert not session.scalars(select(Garbage)).all()


def test_garbage_waits_for_its_time(world: World) -> None:
    for key, grace_s in (("g/now", 0), ("g/later", 600)):
        world.store.put(key, b"x")
        world.db.run(lambda session, key=key, grace_s=grace_s: garbage_queries.discard(session, [key], grace_s=grace_s))
    reaper(world, Line()).sweep()
    assert world.store.head("g/now") is None and world.store.head("g/later") is not None


def test_a_tick_wakes_those_who_send_and_does_none_of_their_work(sqlite_world: World) -> None:
    woken: list[bool] = []
    world = sqlite_world
    Reaper(
        *(world.settings, world.db, world.store, Line()),
        plan=woken.append,
        finalize=woken.append,
        quote=woken.append,
        wake_senders=[lambda: woken.append(True)],
    ).tick()
    assert woken == [True]


def test_a_store_that_is_gone_delays_no_repair(sqlite_world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    world = sqlite_world
    batch_id = world.add_batch(num_lines=2, unit_lines=2)
    world.db.run(lambda session: garbage_queries.discard(session, ["g/now"]))
    is_asked, is_over = threading.Event(), threading.Event()

    def silent(_keys: object) -> None:
        is_asked.set()
        assert is_over.wait(30)
        raise UnavailableError("The object store doesn't answer.", code="store_unavailable")

    monkeypatch.setattr(world.store, "delete", silent)
    here = reaper(world, Line())
    here.start()
    try:
        assert is_asked.wait(10), "somebody deletes what is due"
        world.db.run(lambda session: unit_queries.claim(session, DIGEST, "dead", 0.01, 1))
        last_s = monotonic_s() + 10
        while world.units(batch_id)[0].state != "ready":
            assert monotonic_s() < last_s, "leases are repaired while the store is silent"
            time.sleep(0.05)
        assert not is_over.is_set()
    finally:
        is_over.set()
        here.stop()


def test_inputs_that_are_read_hold_up_no_other_file(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "_EXPIRE_AT_ONCE", 2)
    batch_ids = [world.add_batch(num_lines=2, unit_lines=2) for _ in range(3)]
    project_id = world.batch(batch_ids[0]).project_id
    with world.db.transaction() as session:
        for number, name in enumerate(("read-0", "read-1", "read-2", "free")):
            made = {"filename": "a.jsonl", "s3_key": f"in/p/{name}", "etag": "", "sha256": "", "size_bytes": 1}
            row = files.add_upload(session, file_id=name, project_id=project_id, life_s=3600, **made)  # type: ignore[arg-type]
            row.expires_ms = 1 + number
    for number, batch_id in enumerate(batch_ids):
        world.set_batch(batch_id, input_file_id=f"read-{number}")
    reaper(world, Line()).tick()
    with world.db.reading() as session:
        found = {row.id: row.deleted_ms is not None for row in session.scalars(select(File))}
    assert found == {"read-0": False, "read-1": False, "read-2": False, "free": True}
