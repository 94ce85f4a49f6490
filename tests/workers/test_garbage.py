"""Garbage: what nobody refers to goes, after a grace that outlasts every lease; what somebody refers to stays."""

from __future__ import annotations

import time
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sqlalchemy import select

from batchsvc.batches import finalize_queries, garbage_queries, unit_queries
from batchsvc.batches.lifecycle import Status
from batchsvc.batches.tables import Garbage, Part, Unit, Window
from batchsvc.clock import now_ms
from batchsvc.files import service as files
from batchsvc.files import upload_service as uploads
from batchsvc.files.upload_schemas import CreateUpload
from batchsvc.http.uploads import Stored
from batchsvc.settings import Settings, SettingsError
from batchsvc.store import keys
from batchsvc.store.s3 import MIN_PART_BYTES
from tests.workers.conftest import DIGEST, World, tenant_of
from tests.workers.helpers import finish, put_part
from tests.workers.test_finalize import finalizer, run_units
from workers.garbage import Collector

_TICK_S = 1.1  # the store tells the time of a write in whole seconds


def collector(world: World, grace_s: float) -> Collector:
    return Collector(world.settings.model_copy(update={"garbage_grace_s": grace_s}), world.db, world.store)


def add_file(world: World, key: str, project_id: str) -> None:
    world.store.put(key, b"x")
    with world.db.transaction() as session:
        files.add_result(
            session,
            project_id=project_id,
            filename="f",
            s3_key=key,
            etag="",
            sha256="",
            size_bytes=1,
            created_ms=now_ms(),
            expires_ms=now_ms() + 10**6,
        )


def test_the_audit_deletes_what_nobody_refers_to(world: World) -> None:
    running, ended = (world.add_batch(num_lines=2, unit_lines=2) for _ in range(2))
    run_units(world)
    world.set_batch(ended, status=Status.COMPLETED)
    world.set_batch(running, status=Status.FINALIZING, fin_epoch=3)
    project_id = world.units(ended)[0].project_id
    unit = world.units(running)[0]
    saved = [keys.progress_of(running, unit.id, 1, no) for no in (1, 2)]
    with world.db.transaction() as session:
        session.get_one(Unit, unit.id).resume_key = saved[1]
        part = session.scalars(select(Part).where(Part.batch_id == running)).first()
        assert part is not None
        part.is_void = True
    names = [f"batch/{ended}/out/1/output.jsonl", f"in/{project_id}/file-kept"]
    for key in names:
        add_file(world, key, project_id)
    kept = [*names, saved[1], keys.output(running, 3, "output")]
    gone = [
        saved[0],
        keys.output(running, 2, "output"),
        keys.part(running, 1, "part_never_counted"),
        keys.unit(running, 9, 0),
        keys.window_lines(running, 9, 0),
        keys.part(ended, 1, "part_x"),
        "batch/batch_never/part/x",
        f"in/{project_id}/file-lost",
    ]
    for key in [*kept, *gone]:
        world.store.put(key, b"x")
    kept += [unit.s3_key, *(row.s3_key for row in world.parts(running) if not row.is_void)]
    gone += [part.s3_key, *(row.s3_key for row in world.parts(ended)), world.units(ended)[0].s3_key]
    time.sleep(_TICK_S)
    assert collector(world, 60).audit() == 0, "all of it is young"
    assert collector(world, 0).audit() == len(gone) + 1, "the ended batch's window file goes too"
    assert [key for key in kept if not world.store.head(key)] == []
    assert [key for key in gone if world.store.head(key)] == []


def test_uploads_that_nobody_completes_are_given_up(world: World) -> None:
    batch_id = world.add_batch(num_lines=2, unit_lines=2)
    world.set_batch(batch_id, status=Status.FINALIZING, fin_epoch=2, fin_lease_ms=2**45)
    dead = [keys.output(batch_id, 1, "output"), "in/p/file-never", "batch/batch_never/out/1/error.jsonl"]
    live = keys.output(batch_id, 2, "output")
    uploads = {key: world.store.start_multipart(key) for key in [*dead, live]}
    for key, upload_id in uploads.items():
        world.store.upload_part(key, upload_id, 1, b"x" * MIN_PART_BYTES)
    time.sleep(_TICK_S)
    assert collector(world, 60).audit() == 0
    assert {upload.key for upload in world.store.list_uploads("")} == uploads.keys()
    collector(world, 0).audit()
    assert {upload.key for upload in world.store.list_uploads("")} == {live}


def test_parts_of_an_upload_stay_while_it_is_pending(world: World) -> None:
    with world.db.transaction() as session:
        project_id = tenant_of(session, "tests")
        body = CreateUpload(bytes=1, filename="a.jsonl", purpose="batch")
        for name in ("pending", "late"):
            row = uploads.create(
                session, project_id, body, upload_id=f"upload_{name}", ttl_s=60, life_s=3600, max_bytes=9
            )
            key = keys.upload_part(project_id, row.id, "p")
            world.store.put(key, b"x")
            stored = Stored(etag="", sha256="", size_bytes=1)
            uploads.add_part(session, project_id, row.id, part_id=name, s3_key=key, stored=stored, max_bytes=9)
            row.expires_ms = now_ms() + (10**6 if name == "pending" else -1)
    never = keys.upload_part(project_id, "upload_pending", "of-a-dead-process")
    world.store.put(never, b"x")
    time.sleep(_TICK_S)
    assert collector(world, 0).audit() == 1
    assert world.store.head(never) is None
    assert (
        world.db.run(lambda session: uploads.expire(session, discard=lambda s, key: garbage_queries.discard(s, [key])))
        == 1
    )
    assert collector(world, 0).delete_due() == 1
    assert [key for key, _ in world.store.list_keys(keys.UPLOADS)] == [
        keys.upload_part(project_id, "upload_pending", "p")
    ]


def test_a_part_that_is_about_to_count_needs_the_grace(world: World) -> None:
    """The worker stored a part and sleeps before the commit, its lease alive: without a grace the part is lost."""
    batch_id = world.add_batch(num_lines=4, unit_lines=2)
    for grace_s, is_kept in ((60, True), (0, False)):
        (unit,) = world.db.run(lambda session: unit_queries.claim(session, DIGEST, "w", 30, 1))
        part = put_part(world, unit, finish(world, unit))
        time.sleep(_TICK_S)
        collector(world, grace_s).audit()
        assert world.db.run(
            lambda session, unit=unit, part=part: unit_queries.commit_part(session, unit.id, unit.epoch, part)
        )
        assert (world.store.head(part.s3_key) is not None) is is_kept
    assert finalizer(world).finalize(batch_id) is False, "and then its lines have to run again"
    run_units(world)
    assert finalizer(world).finalize(batch_id)
    world.judge(batch_id, Status.COMPLETED)


def test_a_grace_shorter_than_leases_is_refused() -> None:
    needed = {"DATABASE_URL": "sqlite:///x", "REDIS_URL": "redis://x"}
    assert Settings.from_env({**needed, "BATCHSVC_GARBAGE_GRACE_S": "61"}).garbage_grace_s == 61
    for grace in ("0", "60"):
        with pytest.raises(SettingsError, match="GARBAGE_GRACE_S"):
            Settings.from_env({**needed, "BATCHSVC_GARBAGE_GRACE_S": grace})


def test_what_was_marked_and_is_needed_after_all_stays(world: World) -> None:
    batch_id = world.add_batch(num_lines=2, unit_lines=2)
    marked = [world.units(batch_id)[0].s3_key, keys.unit(batch_id, 7, 0)]
    world.store.put(marked[1], b"x")
    world.db.run(lambda session: garbage_queries.discard(session, marked))
    assert collector(world, 60).delete_due() == 1
    assert world.store.head(marked[0]) and not world.store.head(marked[1])
    with world.db.reading() as session:
        assert not session.scalars(select(Garbage)).all()


STEPS = st.lists(
    st.sampled_from(["claim", "store", "commit", "lose", "finalize", "void", "collect", "expire"]), max_size=14
)


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(steps=STEPS)
def test_nothing_referred_to_is_ever_deleted(sqlite_world: World, steps: list[str]) -> None:
    """Any history of workers and finalizers, with a collector that takes all it may at every moment."""
    world = sqlite_world
    batch_id = world.add_batch(num_lines=4, unit_lines=2)
    held: Any = None
    part: Any = None
    for step in steps:
        if step == "claim":
            claimed = world.db.run(lambda session: unit_queries.claim(session, DIGEST, "w", 30, 1))
            held, part = (claimed[0], None) if claimed else (held, part)
        elif step == "store" and held is not None and (lines := finish(world, held)):
            part = put_part(world, held, lines[:1])
        elif step == "commit" and part is not None:
            if world.store.head(part.s3_key):  # a writer within its grace
                world.db.run(lambda session, u=held, p=part: unit_queries.commit_part(session, u.id, u.epoch, p))
            held = part = None
        elif step == "lose":
            world.set_units(batch_id, lease_ms=0)
            world.db.run(unit_queries.free_expired)
        elif step == "expire":
            world.set_batch(batch_id, expires_ms=1)
        elif step == "finalize":
            world.set_batch(batch_id, fin_lease_ms=0)
            finalizer(world).finalize(batch_id)
        elif step == "void" and world.batch(batch_id).status == Status.FINALIZING:
            epoch = world.batch(batch_id).fin_epoch
            for row in world.parts(batch_id)[:1]:
                world.db.run(lambda s, e=epoch, r=row: finalize_queries.void_part(s, batch_id, e, r.id))
        elif step == "collect":
            collector(world, -2).audit()
            collector(world, -2).delete_due()
        check(world, batch_id)


def check(world: World, batch_id: str) -> None:
    batch = world.batch(batch_id)
    with world.db.reading() as session:
        needed = set(session.scalars(select(files.File.s3_key).where(files.File.deleted_ms.is_(None))))
        if batch.ended_ms is None:
            for column in (Unit.s3_key, Window.line_nos_key):
                needed.update(session.scalars(select(column).where(column.class_.batch_id == batch_id)))
            counting = select(Part.s3_key).where(Part.batch_id == batch_id, Part.is_void.is_(False))
            needed.update(session.scalars(counting))
    there = {key for key, _ in world.store.list_keys("")}
    assert needed <= there
