"""The writer: when a part is due, that no line is lost or doubled whatever the store and the database do meanwhile."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from sqlalchemy.exc import OperationalError

from batchsvc.batches import unit_queries
from batchsvc.batches.resume_file import Unfinished
from batchsvc.batches.unit_queries import Claim, ClaimedUnit
from batchsvc.clock import monotonic_s
from batchsvc.store.s3 import ObjectStore
from tests.workers.conftest import DIGEST, World
from tests.workers.helpers import finish
from workers.breaker import Breaker
from workers.lease import Beat, LeaseKeeper
from workers.writer import Writer, _Buffer


class Desk:
    """A writer with one claimed unit of 12 lines."""

    def __init__(self, world: World, store: ObjectStore | None = None, flush_s: float = 0.05) -> None:
        self.world = world
        self.batch_id = world.add_batch(num_lines=12, unit_lines=12)
        self.ended: list[tuple[str, bool]] = []
        self.lost: list[Claim] = []
        self.crashed: list[Exception] = []
        self.breaker = Breaker()
        self.running: list[Unfinished] = []
        self.leases = LeaseKeeper(
            world.db,
            "me",
            digest=DIGEST,
            lease_s=30,
            renew_s=10,
            beat=lambda: Beat(False, {}),
            breaker=self.breaker,
            on_lost=self.lost.extend,
            on_stop=lambda _: None,
            on_crash=self.crashed.append,
        )
        self.writer = Writer(
            world.db,
            store or world.store,
            self.leases,
            flush_s=flush_s,
            flush_bytes=1 << 20,
            breaker=self.breaker,
            unfinished=lambda unit_id: list(self.running),
            on_end=lambda unit, is_done: self.ended.append((unit.id, is_done)),
            on_lost=self.lost.extend,
            on_crash=self.crashed.append,
        )
        began = monotonic_s()
        self.unit = world.db.run(lambda session: unit_queries.claim(session, DIGEST, "me", 30, 1))[0]
        self.leases.hold(self.unit.id, self.unit.epoch, began)
        self.lines = finish(world, self.unit)

    def completed(self) -> int:
        return self.world.batch(self.batch_id).completed


@contextmanager
def desk(world: World, **options: Any) -> Iterator[Desk]:
    made = Desk(world, **options)
    made.writer.start()
    yield made
    made.writer.stop()
    assert not made.crashed, made.crashed


def until(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.01)


def test_the_first_part_comes_within_a_second_and_later_ones_by_size_or_time(sqlite_world: World) -> None:
    made = Desk(sqlite_world)
    buffer = _Buffer(made.unit)
    assert buffer.due_s(5, 100) is None, "nothing to write"
    buffer.lines, buffer.since_s = made.lines[:1], 1000
    assert 1000 < (buffer.due_s(5, 100) or 0) < 1001
    assert buffer.due_s(0.1, 100) == pytest.approx(1000.1)
    buffer.has_part = True
    assert buffer.due_s(5, 100) == 1005
    buffer.num_bytes = 100
    assert buffer.due_s(5, 100) == 0, "large enough"
    buffer.num_bytes, buffer.is_ending = 1, True
    assert buffer.due_s(5, 100) == 0, "the unit ends"


def test_lines_that_come_while_a_part_is_stored_wait_for_the_next(sqlite_world: World) -> None:
    storing, go_on = threading.Event(), threading.Event()

    class Slow(ObjectStore):
        def put(self, key: str, data: bytes, *, content_type: str = "application/octet-stream") -> str:
            storing.set()
            assert go_on.wait(30)
            return super().put(key, data, content_type=content_type)

    with desk(sqlite_world, store=Slow(sqlite_world.settings)) as made:
        made.writer.add(made.unit, made.lines[:5])
        assert storing.wait(30)
        made.writer.add(made.unit, made.lines[5:])
        made.writer.end(made.unit, release=False)
        go_on.set()
        until(lambda: bool(made.ended), "the unit ends")
        assert made.completed() == 12 and made.ended == [(made.unit.id, True)]
        assert sorted(part.lines_ok for part in sqlite_world.parts(made.batch_id)) == [5, 7]
        assert made.writer.num_bytes == 0


def test_a_commit_whose_answer_was_lost_counts_once(sqlite_world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    with desk(sqlite_world) as made:
        run = sqlite_world.db.run

        def losing(work: Callable[..., Any], **options: Any) -> Any:
            answer = run(work, **options)
            if not calls:
                calls.append(1)
                raise OperationalError("COMMIT", {}, Exception("the server closed the connection"))
            return answer

        monkeypatch.setattr(sqlite_world.db, "run", losing)
        made.writer.add(made.unit, made.lines)
        made.writer.end(made.unit, release=False)
        until(lambda: bool(made.ended), "the unit ends")
        assert made.completed() == 12 and len(sqlite_world.parts(made.batch_id)) == 1 and calls


def test_a_lost_unit_is_dropped_without_a_word(sqlite_world: World) -> None:
    with desk(sqlite_world) as made:
        sqlite_world.db.run(lambda session: unit_queries.seal(session, made.batch_id))
        made.writer.add(made.unit, made.lines)
        until(lambda: bool(made.lost), "the loss is told")
        assert made.lost == [made.unit.claim] and made.completed() == 0 and made.writer.num_bytes == 0


def test_nothing_is_written_for_a_unit_that_is_not_held(sqlite_world: World) -> None:
    with desk(sqlite_world) as made:
        made.leases.forget([made.unit.claim])
        made.writer.add(made.unit, made.lines)
        until(lambda: bool(made.lost), "the loss is told")
        assert made.completed() == 0 and not list(sqlite_world.store.list_keys(f"batch/{made.batch_id}/part/"))


def test_what_the_writer_gives_up_is_freed_by_the_next_renewal(sqlite_world: World) -> None:
    """The lease thread was late, and comes before anybody else has noticed: it must not renew what nobody runs."""
    with desk(sqlite_world) as made:
        made.leases.hold(made.unit.id, made.unit.epoch, monotonic_s() - 3600)
        made.writer.add(made.unit, made.lines)
        until(lambda: bool(made.lost), "the writer doesn't trust the lease")
        made.leases.tick()
        (unit,) = sqlite_world.units(made.batch_id)
        assert (unit.state, unit.crash_count, unit.num_done) == ("ready", 0, 0)


def test_a_write_that_comes_too_late_leaves_the_next_claim_alone(sqlite_world: World) -> None:
    """The same worker claims a unit again while a part of its first claim is still on its way (row 52)."""
    storing, go_on = threading.Event(), threading.Event()

    class Slow(ObjectStore):
        def put(self, key: str, data: bytes, *, content_type: str = "application/octet-stream") -> str:
            storing.set()
            assert go_on.wait(30)
            return super().put(key, data, content_type=content_type)

    world = sqlite_world
    with desk(world, store=Slow(world.settings)) as made:
        made.writer.add(made.unit, made.lines)
        assert storing.wait(30)
        made.leases.forget([made.unit.claim])
        made.writer.drop(made.unit.claim)
        with world.db.transaction() as session:
            assert unit_queries.release(session, made.unit.id, made.unit.epoch)
        (again,) = world.db.run(lambda session: unit_queries.claim(session, DIGEST, "me", 30, 1))
        made.leases.hold(again.id, again.epoch, monotonic_s())
        made.writer.begin(again)
        made.writer.add(again, finish(world, again))
        go_on.set()
        until(lambda: made.lost == [made.unit.claim], "the first claim is lost")
        made.writer.end(again, release=False)
        until(lambda: made.ended == [(again.id, True)], "the second is done")
    assert made.completed() == 12


def test_a_failure_to_write_is_forgotten_with_the_last_unit(sqlite_world: World) -> None:
    """Its worker would else wait for ever for a write that nobody makes."""
    with desk(sqlite_world) as made:
        made.breaker.failed("writes")
        made.leases.forget([made.unit.claim])
        made.writer.add(made.unit, made.lines)
        until(lambda: bool(made.lost), "the loss is noticed")
        assert not made.breaker.is_open


def test_a_unit_given_back_keeps_its_finished_lines(sqlite_world: World) -> None:
    with desk(sqlite_world) as made:
        made.writer.add(made.unit, made.lines[:4])
        made.writer.end(made.unit, release=True, crashed=True)
        until(lambda: bool(made.ended), "the unit ends")
        unit = sqlite_world.units(made.batch_id)[0]
        assert (unit.state, unit.num_done, unit.crash_count, unit.owner) == ("ready", 4, 1, None)
        again: ClaimedUnit = sqlite_world.db.run(lambda session: unit_queries.claim(session, DIGEST, "next", 30, 1))[0]
        assert len(finish(sqlite_world, again)) == 8
