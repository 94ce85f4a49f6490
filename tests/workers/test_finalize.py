"""Finalizing: one published set in input order, whatever dies or races, and a bill equal to its lines."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from sqlalchemy import select

from batchsvc.batches import finalize_queries, unit_queries
from batchsvc.batches.lifecycle import Status
from batchsvc.batches.tables import Garbage
from batchsvc.batches.unit_queries import ClaimedUnit, NewPart
from batchsvc.files.tables import File
from batchsvc.store.s3 import ObjectStore
from tests.workers.conftest import DIGEST, World
from tests.workers.helpers import finish, put_part
from workers import stream
from workers.finalize import Finalizer


def run_units(world: World, most_units: int = 100, lines: int | None = None, digest: str = DIGEST) -> None:
    """Work like an engine worker: claim, finish (at most `lines` of each unit) in two parts, release."""
    for unit in world.db.run(lambda session: unit_queries.claim(session, digest, "w", 30, most_units)):
        done = finish(world, unit, lines)
        for part in filter(None, (done[::2], done[1::2])):
            commit(world, unit, put_part(world, unit, part))
        world.db.run(lambda session, unit=unit: unit_queries.release(session, unit.id, unit.epoch))


def commit(world: World, unit: ClaimedUnit, part: NewPart) -> None:
    assert world.db.run(lambda session: unit_queries.commit_part(session, unit.id, unit.epoch, part))


def finalizer(world: World, store: ObjectStore | None = None, owner: str = "f") -> Finalizer:
    return Finalizer(world.settings, world.db, store or world.store, owner)


def test_a_batch_is_merged_in_input_order_across_windows_and_buckets(world: World) -> None:
    world.settings = world.settings.model_copy(update={"spool_bytes": 1024})
    batch_id = world.add_batch(num_lines=30, unit_lines=7, windows=3, fold=2)
    assert finalizer(world).finalize(batch_id) is False, "units are left"
    run_units(world)
    assert finalizer(world).finalize(batch_id) is True
    world.judge(batch_id, Status.COMPLETED)
    assert len(world.result(batch_id, "output")) == 90 and world.batch(batch_id).error_file_id is None
    assert finalizer(world).finalize(batch_id) is False, "an ended batch never changes"


@pytest.mark.parametrize("why", [Status.CANCELLED, Status.EXPIRED])
def test_what_never_ran_becomes_error_lines(world: World, why: Status) -> None:
    batch_id = world.add_batch(num_lines=12, unit_lines=4)
    run_units(world, most_units=2, lines=3)
    stop: dict[str, Any] = {"status": Status.CANCELLING, "cancelling_ms": 2**45}
    world.set_batch(batch_id, **(stop if why == Status.CANCELLED else {"expires_ms": 1}))
    assert finalizer(world).finalize(batch_id) is True
    world.judge(batch_id, why)
    batch = world.batch(batch_id)
    assert batch.completed > 0 and batch.completed + batch.failed == batch.total == 12
    errors = world.result(batch_id, "error")
    code = "batch_cancelled" if why == Status.CANCELLED else "batch_expired"
    assert {line["error"]["code"] for line in errors} == {code} and all(line["response"] is None for line in errors)


def test_a_stopped_batch_waits_for_its_workers_but_not_for_ever(world: World) -> None:
    batch_id = world.add_batch(num_lines=4, unit_lines=4)
    world.db.run(lambda session: unit_queries.claim(session, DIGEST, "w", 300, 1))
    world.set_batch(batch_id, status=Status.CANCELLING, cancelling_ms=2**45)
    assert finalizer(world).finalize(batch_id) is False
    world.set_batch(batch_id, cancelling_ms=1)
    assert finalizer(world).finalize(batch_id) is True
    world.judge(batch_id, Status.CANCELLED)


def test_a_finished_batch_past_its_time_is_completed(world: World) -> None:
    batch_id = world.add_batch(num_lines=4, unit_lines=4)
    run_units(world)
    world.set_batch(batch_id, expires_ms=1)
    assert finalizer(world).finalize(batch_id) is True
    world.judge(batch_id, Status.COMPLETED)


def test_two_finalizers_at_once_publish_one_set(world: World) -> None:
    batch_id = world.add_batch(num_lines=20, unit_lines=5)
    run_units(world)
    published: list[bool] = []
    barrier = threading.Barrier(2)

    class Slow(ObjectStore):
        """Lets the second finalizer in before the first one stores its results."""

        def put(self, key: str, data: bytes, **kinds: Any) -> str:
            if key.endswith("/1/output.jsonl"):
                world.set_batch(batch_id, fin_lease_ms=1)  # its lease is taken for over
                barrier.wait(30)
                barrier.wait(30)
            return super().put(key, data, **kinds)

    silent = world.settings.model_copy(update={"renew_s": 600.0})  # else it might renew what is taken from it
    one = Finalizer(silent, world.db, Slow(world.settings), "one")
    first = threading.Thread(target=lambda: published.append(one.finalize(batch_id)))
    first.start()
    barrier.wait(30)
    published.append(finalizer(world, owner="two").finalize(batch_id))
    after = world.batch(batch_id)
    barrier.wait(30)
    first.join()
    assert sorted(published) == [False, True]
    world.judge(batch_id, Status.COMPLETED)
    assert world.batch(batch_id).output_file_id == after.output_file_id and after.fin_epoch == 2
    with world.db.reading() as session:
        assert len(session.scalars(select(File)).all()) == 1
        garbage = set(session.scalars(select(Garbage.s3_key)))
        kept = set(session.scalars(select(File.s3_key)))
    assert any(key.endswith("/1/output.jsonl") for key in garbage) and not garbage & kept


class KilledError(Exception):
    """Stands for kill -9: nothing of ours catches it."""


def failing_store(world: World, fails_at: int) -> ObjectStore:
    """The real store, which dies before its n-th call."""
    calls = iter(range(fails_at))
    deadly = {"put", "get", "start_multipart", "upload_part", "complete_multipart"}

    class Dying(ObjectStore):
        def __getattribute__(self, name: str) -> Any:
            if name in deadly and next(calls, None) is None:
                raise KilledError(name)
            return super().__getattribute__(name)

    return Dying(world.settings)


def test_a_finalizer_killed_before_any_call_to_the_store_has_a_successor(
    sqlite_world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = sqlite_world
    monkeypatch.setattr(stream, "PART_BYTES", 5 * 1024 * 1024)
    batch_id = world.add_batch(num_lines=6, unit_lines=3, windows=2)
    run_units(world, most_units=3)
    world.set_batch(batch_id, status=Status.CANCELLING, cancelling_ms=1)
    kills = 0
    while kills < 100:
        try:
            assert finalizer(world, failing_store(world, kills)).finalize(batch_id)
            break
        except KilledError:
            kills += 1
            assert world.batch(batch_id).status == Status.FINALIZING
            assert finalizer(world).finalize(batch_id) is False, "its lease still runs"
            world.set_batch(batch_id, fin_lease_ms=1)
    assert kills > 8
    world.judge(batch_id, Status.CANCELLED)


@pytest.mark.parametrize("step", ["windows", "parts", "publish"])
def test_a_finalizer_killed_around_its_transactions_has_a_successor(
    sqlite_world: World, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    world = sqlite_world
    batch_id = world.add_batch(num_lines=8, unit_lines=4)
    run_units(world)
    with monkeypatch.context() as patch:

        def killed(*_: object, **__: object) -> None:
            raise KilledError(step)

        patch.setattr(finalize_queries, step, killed)
        with pytest.raises(KilledError):
            finalizer(world).finalize(batch_id)
    world.set_batch(batch_id, fin_lease_ms=1)
    assert finalizer(world).finalize(batch_id) is True
    world.judge(batch_id, Status.COMPLETED)


def test_a_publication_whose_answer_was_lost_stands(sqlite_world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    world = sqlite_world
    batch_id = world.add_batch(num_lines=4, unit_lines=4)
    run_units(world)

    def attempt(work: Callable[..., Any], **_: Any) -> Any:
        if "publish" in work.__code__.co_names:
            world.db.__class__.run(world.db, work)  # committed, but the answer is lost
        return world.db.__class__.run(world.db, work)

    monkeypatch.setattr(world.db, "run", attempt)
    assert finalizer(world).finalize(batch_id) is True
    world.judge(batch_id, Status.COMPLETED)
    with world.db.reading() as session:
        assert not session.scalars(select(Garbage.s3_key)).all()


def test_a_large_stream_is_uploaded_in_parts_and_cleared_after_a_kill(
    sqlite_world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = sqlite_world
    batch_id = world.add_batch(num_lines=30, unit_lines=30)
    unit = world.db.run(lambda session: unit_queries.claim(session, DIGEST, "w", 30, 1))[0]
    lines = [
        replace(line, line=replace(line.line, row=line.line.row[:-1] + b',"pad":"' + b"x" * 600_000 + b'"}'))
        for line in finish(world, unit)
    ]
    commit(world, unit, put_part(world, unit, lines))

    class Dies(ObjectStore):
        def complete_multipart(self, *_: Any, **__: Any) -> str:
            raise KilledError

    with pytest.raises(KilledError):
        finalizer(world, Dies(world.settings)).finalize(batch_id)
    world.set_batch(batch_id, fin_lease_ms=1)
    aborted: list[str] = []

    class Watching(ObjectStore):
        def abort_multipart(self, key: str, upload_id: str) -> None:
            aborted.append(key)
            super().abort_multipart(key, upload_id)

    assert finalizer(world, Watching(world.settings)).finalize(batch_id)
    assert len(aborted) == 1
    world.judge(batch_id, Status.COMPLETED)
    assert sum(len(line["pad"]) for line in world.result(batch_id, "output")) == 30 * 600_000
