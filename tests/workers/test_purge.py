"""Purges: what was deleted leaves rows and bucket, what is left stays as it was, whatever dies in between."""

from __future__ import annotations

import sqlite3
from pathlib import Path
from typing import Any

import orjson
import pytest
from sqlalchemy import select, update

from batchsvc import failpoints, ids
from batchsvc.accounts.tables import IdempotentAnswer
from batchsvc.batches import collection_queries, deletion_service, queries, quote_queries, service, wipe_queries
from batchsvc.batches.lifecycle import TERMINAL, Status, move
from batchsvc.batches.tables import Batch, Export, Garbage, Quote, Reconciliation, Window
from batchsvc.clock import now_ms
from batchsvc.errors import InvalidRequestError, NotFoundError
from batchsvc.files import purge_queries
from batchsvc.files import service as files
from batchsvc.files import upload_service as uploads
from batchsvc.files.purge_queries import DuePurge
from batchsvc.files.retention import Kind, Policy, date_of
from batchsvc.files.tables import File, Purge, Upload
from batchsvc.files.upload_schemas import CreateUpload
from batchsvc.http.uploads import Stored
from batchsvc.store import keys
from tests.workers.conftest import World, tenant_of
from tests.workers.test_finalize import finalizer, run_units
from workers.garbage import Collector
from workers.purge import Purger

WORD = "canary-7f3a"
DAY = date_of(now_ms())


def purger(world: World) -> Purger:
    return Purger(world.settings, world.db, Collector(world.settings, world.db, world.store))


def set_back(world: World, ms: int) -> None:
    """As if everything had been deleted so much earlier, and nobody were at it."""
    with world.db.transaction() as session:
        session.execute(update(Purge).values(deleted_ms=Purge.deleted_ms - ms, due_ms=0))


def purge(world: World) -> None:
    """Let both times come."""
    set_back(world, 10**9)
    purger(world).purge_due()
    assert not_purged(world) == []


def not_purged(world: World) -> list[str]:
    with world.db.reading() as session:
        return list(session.scalars(select(Purge.subject_id).where(Purge.purged_ms.is_(None))))


def discard(session: Any, key: str) -> None:
    session.merge(Garbage(s3_key=key, not_before_ms=0))


def project_of(world: World) -> str:
    with world.db.transaction() as session:
        return tenant_of(session, "tests")


def add_input(world: World, data: bytes = WORD.encode(), name: str = f"{WORD}.jsonl") -> File:
    project_id, file_id = project_of(world), ids.file_id()
    key = keys.input_file(project_id, file_id)
    etag = world.store.put(key, data)
    world.store.put(keys.plain_input(key), data)
    with world.db.transaction() as session:
        return files.add_upload(
            session,
            file_id=file_id,
            project_id=project_id,
            filename=name,
            s3_key=key,
            etag=etag,
            sha256="0" * 64,
            size_bytes=len(data),
            life_s=3600,
        )


def delete_file(world: World, file_id: str) -> None:
    with world.db.transaction() as session:
        files.delete(session, project_of(world), file_id, live_batch_of=service.live_batch_of, discard=discard)


def delete_batch(world: World, batch_id: str, *, with_input: bool = False) -> None:
    with world.db.transaction() as session:
        deletion_service.delete_batch(session, project_of(world), batch_id, with_input=with_input, discard=discard)


def stored(world: World, prefix: str = "") -> set[str]:
    return {key for key, _ in world.store.list_keys(prefix)}


def ended_batch(world: World, **values: Any) -> tuple[str, File]:
    """A batch that has run to its end, and its input."""
    file = add_input(world)
    batch_id = world.add_batch(num_lines=4, unit_lines=2)
    world.set_batch(
        batch_id,
        input_file_id=file.id,
        metadata_json={"who": WORD},
        name=WORD,
        errors=[{"code": "x", "line": 3, "message": f"no {WORD}", "param": WORD}],
        warnings=[{"code": "y", "line": None, "message": WORD, "param": None}],
        **values,
    )
    run_units(world)
    assert finalizer(world).finalize(batch_id)
    return batch_id, file


def test_a_plan_goes_half_a_grace_after_the_end_and_parts_live_as_long_as_the_output(world: World) -> None:
    batch_id, _ = ended_batch(world)
    prefix = keys.of_batch(batch_id)
    whole = stored(world, prefix)
    purger(world).purge_due()
    assert stored(world, prefix) == whole, "for a while `explain` reads the plan"
    purge(world)
    kinds = {key.split("/")[2] for key in stored(world, prefix)}
    assert kinds == {"part", "out"}
    world.judge(batch_id, Status.COMPLETED)

    delete_file(world, world.batch(batch_id).output_file_id or "")
    purge(world)
    assert stored(world, prefix) == set()
    batch = world.batch(batch_id)
    assert (batch.completed, batch.metadata_json, batch.name) == (4, {"who": WORD}, WORD), "only the file was deleted"
    assert batch.cost_nanos > 0


def test_a_deleted_input_goes_with_what_was_planned_and_quoted_of_it(world: World) -> None:
    batch_id, file = ended_batch(world)
    twin = add_input(world)
    quote_id, planning = ids.quote_id(), ids.quote_id()
    problems = [{"code": "bad_value", "line": 2, "message": f"not {WORD}", "param": f"messages.{WORD}"}]
    with world.db.transaction() as session:
        for name, status in ((quote_id, quote_queries.READY), (planning, quote_queries.QUEUED)):
            key = keys.window_lines(name, 1, 0)
            world.store.put(key, WORD.encode())
            session.add(
                Quote(
                    id=name,
                    project_id=file.project_id,
                    api_key_id="key",
                    status=status,
                    endpoint="/v1/chat/completions",
                    input_file_id=file.id,
                    input_sha256="",
                    completion_window="24h",
                    tier="batch_24h",
                    on_invalid="skip",
                    created_ms=now_ms(),
                    price_version=1,
                    aliases={},
                    plan_limits={},
                    num_lines=4,
                    found={"lines": 4},
                    windows=[{"last_line": 4, "next_offset": 9, "num_prompts": 4, "key": key, "sha256": "1"}],
                    problems=problems,
                    errors=problems,
                    advice={"saved_nanos": 5, "misplaced": [{"text": WORD}]},
                    plan_epoch=1,
                    plan_owner="planner",
                    plan_lease_ms=10**15,
                )
            )
        session.add(Reconciliation(batch_id=batch_id, checked_ms=1, num_differences=1, first=f"line ({WORD})"))
    delete_file(world, file.id)
    with pytest.raises(NotFoundError, match=f"{file.id} is gone: it was deleted on {DAY}"), world.db.reading() as s:
        files.get(s, file.project_id, file.id)
    purge(world)

    assert stored(world, keys.INPUTS) == {twin.s3_key, keys.plain_input(twin.s3_key)}, "the same bytes, another file"
    assert stored(world, keys.of_batch(quote_id)) == stored(world, keys.of_batch(planning)) == set()
    kept = {key.split("/")[2] for key in stored(world, keys.of_batch(batch_id))}
    assert kept == {"part", "out"}, "the results were not deleted"
    batch = world.batch(batch_id)
    says = f"Deleted with the input on {DAY}."
    assert batch.errors == [{"code": "x", "line": 3, "message": says, "param": None}]
    assert batch.warnings == [{"code": "y", "line": None, "message": says, "param": None}]
    with world.db.reading() as session:
        row = session.get_one(File, file.id)
        assert (row.filename, row.size_bytes) == ("", len(WORD))
        quote = session.get_one(Quote, quote_id)
        assert (quote.status, quote.num_lines, quote.found) == (quote_queries.READY, 4, {"lines": 4})
        assert quote.problems == quote.errors == [{"code": "bad_value", "line": 2, "message": says, "param": None}]
        assert quote.advice is None and quote.windows[0]["last_line"] == 4 and not quote.windows[0]["key"]
        unfinished = session.get_one(Quote, planning)
        assert unfinished.status == quote_queries.FAILED and unfinished.errors is not None
        assert unfinished.errors[0]["code"] == "input_deleted" and unfinished.errors[0]["message"] == says
        assert session.get_one(Reconciliation, batch_id).first is None
    with world.db.transaction() as session:
        window_writer = quote_queries.keep(session, planning, 1, 30)
        assert not window_writer, "its planner can write no more"
    world.judge(batch_id, Status.COMPLETED)


def test_a_deleted_batch_keeps_ids_counts_tokens_and_money(world: World) -> None:
    batch_id, file = ended_batch(world, output_s3=f"s3://bucket/{WORD}/")
    before = world.batch(batch_id)
    export = {"prefix": f"s3://bucket/{WORD}/", "manifest": f"s3://bucket/{WORD}/m", "error": WORD}
    shown = {"id": batch_id, "metadata": {"who": WORD}, "name": WORD, "output_s3": export}
    body = orjson.dumps({**shown, "nested": {"id": "x", "name": "y"}})
    with world.db.transaction() as session:
        session.add(Export(batch_id=batch_id, project_id=file.project_id, state="pending", uploads=[], epoch=1))
        session.add(
            IdempotentAnswer(
                project_id=file.project_id, key="batches k", fingerprint="f", body=body.decode(), created_ms=now_ms()
            )
        )
    delete_batch(world, batch_id)
    with world.db.reading() as session:
        assert session.get_one(Export, batch_id).state == "failed", "nobody exports it any more"
        with pytest.raises(NotFoundError, match=f"{batch_id} was deleted on {DAY}"):
            service.get(session, file.project_id, batch_id)
        assert files.get(session, file.project_id, file.id).id == file.id, "its input is a file of its own"
    with pytest.raises(NotFoundError, match="was deleted on"):
        delete_batch(world, batch_id)
    purge(world)
    assert stored(world, keys.of_batch(batch_id)) == set()
    after = world.batch(batch_id)
    assert after.metadata_json is None and after.name is None and after.output_s3 is None
    for name in ("id", "status", "total", "completed", "failed", "input_tokens", "output_tokens", "cost_nanos"):
        assert getattr(after, name) == getattr(before, name), name
    with world.db.reading() as session:
        (answer,) = session.scalars(select(IdempotentAnswer)).all()
        found = orjson.loads(answer.body)
        gone = dict.fromkeys(("metadata", "name", "output_s3"))
        assert found == {"id": batch_id, **gone, "nested": {"id": "x", "name": "y"}}
        assert WORD not in answer.body


def test_a_running_batch_and_what_it_reads_stay(world: World) -> None:
    file, batch_id = add_input(world), world.add_batch(num_lines=2, unit_lines=2)
    world.set_batch(batch_id, input_file_id=file.id)
    with pytest.raises(InvalidRequestError, match=f"{file.id} is the input of {batch_id}, which hasn't ended"):
        delete_file(world, file.id)
    with pytest.raises(InvalidRequestError, match="hasn't ended: cancel it first"):
        delete_batch(world, batch_id)
    before = stored(world)
    with world.db.transaction() as session:  # even if something says so
        purge_queries.add(session, Kind.BATCH, batch_id, 0)
        purge_queries.add(session, Kind.FILE, file.id, 0)
        purge_queries.add(session, Kind.PLAN, batch_id, 0)
        assert [wipe_queries.wipe(session, kind, batch_id) for kind in Kind] == [[], [], [], []]
    purge(world)
    assert stored(world) == before

    other = world.add_batch(num_lines=2, unit_lines=2)
    world.set_batch(other, input_file_id=file.id, status=Status.COMPLETED)
    with pytest.raises(InvalidRequestError, match=f"The input of {other} is read by {batch_id}"):
        delete_batch(world, other, with_input=True)
    assert world.batch(other).deleted_ms is None


def test_pieces_of_an_upload_go_also_those_that_no_row_names(world: World) -> None:
    project_id = project_of(world)
    made: list[str] = []
    for _ in range(2):
        body = CreateUpload(bytes=5, filename=f"{WORD}.jsonl", purpose="batch")
        with world.db.transaction() as session:
            upload_id = ids.upload_id()
            uploads.create(session, project_id, body, upload_id=upload_id, ttl_s=60, life_s=3600, max_bytes=10)
            part_id = ids.upload_part_id()
            key = keys.upload_part(project_id, upload_id, part_id)
            etag = world.store.put(key, WORD.encode()[:5])
            piece = Stored(etag=etag, sha256="", size_bytes=5)
            uploads.add_part(session, project_id, upload_id, part_id=part_id, s3_key=key, stored=piece, max_bytes=10)
        made.append(upload_id)
    cancelled, pending = made
    lost = keys.upload_part(project_id, cancelled, "upart_of_a_killed_api")
    world.store.put(lost, WORD.encode())
    world.store.start_multipart(keys.upload_part(project_id, cancelled, "upart_half"))
    with world.db.transaction() as session:
        uploads.cancel(session, project_id, cancelled, discard=discard)
    purge(world)
    (kept,) = stored(world, keys.UPLOADS)
    assert kept.startswith(keys.of_upload(project_id, pending)), "the other one goes on"
    assert list(world.store.list_uploads(keys.UPLOADS)) == []
    with world.db.reading() as session:
        assert session.get_one(Upload, cancelled).filename == ""
        assert session.get_one(Upload, pending).filename == f"{WORD}.jsonl"


def test_what_a_late_writer_stores_goes_the_second_time(world: World) -> None:
    world.settings = world.settings.model_copy(update={"lease_s": 1_000.0})
    batch_id, _ = ended_batch(world)
    delete_batch(world, batch_id)
    policy = Policy.of(world.settings.retention_grace_s, world.settings.lease_s)
    set_back(world, policy.first_ms(Kind.BATCH, 0) + 1_000)
    assert purger(world).purge_due() >= 1
    assert stored(world, keys.of_batch(batch_id)) == set()
    late = keys.part(batch_id, 1, "part_of_a_worker_that_lost_its_lease")
    world.store.put(late, WORD.encode())
    with world.db.reading() as session:
        waits = session.get_one(Purge, (batch_id, "batch"))
        assert waits.swept_ms is not None and waits.purged_ms is None
        assert waits.due_ms == waits.deleted_ms + max(policy.first_ms(Kind.BATCH, 0), 3 * policy.lease_ms)
    purge(world)
    assert late not in stored(world)
    assert purger(world).purge_due() == 0, "it is done for good"


@pytest.mark.parametrize("name", ["purge.rows_wiped", "purge.objects_gone"])
def test_a_collector_that_dies_is_followed_by_another(
    sqlite_world: World, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    world = sqlite_world
    batch_id, file = ended_batch(world)
    delete_batch(world, batch_id, with_input=True)
    set_back(world, 10**9)

    class KilledError(BaseException):
        """As kill -9: nobody catches it."""

    def die(reached: str) -> None:
        if reached == name:
            raise KilledError

    monkeypatch.setattr(failpoints, "reach", die)
    with pytest.raises(KilledError):
        purger(world).purge_due()
    monkeypatch.undo()
    assert purger(world).purge_due() < 5, "what the dead one has taken is let alone for a while"
    purge(world)
    assert not {key for key in stored(world) if batch_id in key or file.id in key}


def test_all_is_gone_within_the_grace_though_its_first_collector_dies(
    sqlite_world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A clock that is moved on tick by tick: how long a machine takes for it decides nothing."""
    world, tick_ms = sqlite_world, 1_200_000
    world.settings = world.settings.model_copy(update={"lease_s": 20_000.0, "retention_grace_s": 86_400.0})
    policy = Policy.of(world.settings.retention_grace_s, world.settings.lease_s)
    batch_id, _ = ended_batch(world)
    delete_batch(world, batch_id, with_input=True)

    def die(_reached: str) -> None:
        raise KeyboardInterrupt

    moved_ms = 0
    while not_purged(world):
        moved_ms += tick_ms
        assert moved_ms <= policy.grace_ms, not_purged(world)
        with world.db.transaction() as session:
            earlier = {"deleted_ms": Purge.deleted_ms - tick_ms, "due_ms": Purge.due_ms - tick_ms}
            session.execute(update(Purge).values(earlier))
        if moved_ms == tick_ms:
            with monkeypatch.context() as patched:
                patched.setattr(failpoints, "reach", die)
                with pytest.raises(KeyboardInterrupt):
                    purger(world).purge_due()
        purger(world).purge_due()
    assert moved_ms >= 3 * policy.lease_ms, "nor before the last writer has noticed"
    assert not {key for key in stored(world) if batch_id in key}


def test_a_failed_purge_is_tried_again_and_is_overdue_meanwhile(world: World) -> None:
    file = add_input(world)
    delete_file(world, file.id)
    away = purger(world)
    delete, world.store.delete = world.store.delete, _refuse  # type: ignore[method-assign]
    set_back(world, round(world.settings.retention_grace_s * 1000) + 1)
    assert away.purge_due() == 0 and away.num_overdue() == 1
    assert away.purge_due() == 0, "not at once"
    with world.db.reading() as session:
        row = session.get_one(Purge, (file.id, "file"))
        assert (row.num_failures, row.swept_ms, row.purged_ms) == (1, None, None)
    world.store.delete = delete  # type: ignore[method-assign]
    set_back(world, 0)
    assert away.purge_due() == 1 and away.num_overdue() == 0
    assert stored(world, keys.INPUTS) == set()


def _refuse(_keys: object) -> None:
    raise OSError("the store is away")


def test_purges_wait_while_the_collection_is_held(world: World) -> None:
    file = add_input(world)
    delete_file(world, file.id)
    set_back(world, 10**9)
    with world.db.transaction() as session:
        collection_queries.hold_collection(session, "backup", reason="a backup", hold_s=600)
    assert purger(world).purge_due() == 0 and file.s3_key in stored(world)
    with world.db.transaction() as session:
        collection_queries.release_collection(session, "backup")
    assert purger(world).purge_due() == 1 and file.s3_key not in stored(world)


def test_an_expired_file_goes_like_a_deleted_one(world: World) -> None:
    file = add_input(world)
    with world.db.transaction() as session:
        session.get_one(File, file.id).expires_ms = now_ms() - 86_400_000
        live = lambda inner, file_id: queries.live_batch_of(inner, file_id, TERMINAL)  # noqa: E731
        assert files.expire(session, is_read=queries.is_read(TERMINAL), live_batch_of=live, discard=discard) == 1
    over = f"{file.id} is gone: its life was over on {date_of(now_ms() - 86_400_000)}"
    with pytest.raises(NotFoundError, match=over), world.db.reading() as session:
        files.get(session, file.project_id, file.id)
    purge(world)
    assert stored(world, keys.INPUTS) == set()


def test_what_an_older_version_deletes_is_wiped_too(world: World) -> None:
    batch_id, file = ended_batch(world)
    with world.db.transaction() as session:  # as it did: no word of a purge
        session.execute(update(File).values(deleted_ms=5))
        session.execute(update(Batch).values(deleted_ms=5))
    for _ in range(2):
        purger(world).adopt()
    with world.db.reading() as session:
        batch = session.get_one(Batch, batch_id)
        found = {(row.subject_id, row.kind) for row in session.scalars(select(Purge).where(Purge.kind != "plan"))}
        assert found == {(file.id, "file"), (batch.output_file_id, "file"), (batch_id, "batch")}
    purge(world)
    assert not {key for key in stored(world) if batch_id in key or file.id in key}


def test_repair_brings_nothing_back(world: World) -> None:
    from batchsvc.batches import repair_queries

    batch_id, file = ended_batch(world)
    delete_batch(world, batch_id, with_input=True)
    with world.db.transaction() as session:
        session.execute(update(Window).where(Window.batch_id == batch_id).values(is_damaged=True))
    with world.db.transaction() as session:
        assert repair_queries.due(session) == []
        assert repair_queries.claim(session, batch_id, "planner", 30) is None
    purge(world)
    assert not {key for key in stored(world) if batch_id in key or file.id in key}


def test_a_batch_that_ends_without_having_run_has_its_plan_wiped_too(world: World) -> None:
    batch_id = world.add_batch(num_lines=2, unit_lines=2)
    world.set_batch(batch_id, status=Status.VALIDATING, in_progress_ms=None)
    with world.db.transaction() as session:
        assert move(session, batch_id, Status.CANCELLED, now_ms=now_ms())
        assert not move(session, batch_id, Status.FAILED, now_ms=now_ms())
    purge(world)
    assert stored(world, keys.of_batch(batch_id)) == set()


def test_sqlite_forgets_the_bytes_too(sqlite_world: World) -> None:
    """Neither the file nor its write-ahead log has them: `secure_delete`, and the log is cut off."""
    world = sqlite_world
    path = Path(world.settings.database_url.removeprefix("sqlite:///"))

    def found() -> int:
        logs = (path.with_name(path.name + end) for end in ("", "-wal", "-shm"))
        return sum(log.read_bytes().count(WORD.encode()) for log in logs if log.exists())

    batch_ids = [ended_batch(world)[0] for _ in range(3)]
    assert found() >= 6
    for batch_id in batch_ids:
        delete_batch(world, batch_id, with_input=True)
    purge(world)
    assert found() == 0
    connection = sqlite3.connect(path)
    assert connection.execute("PRAGMA integrity_check").fetchone() == ("ok",)
    connection.close()


def test_several_collectors_at_once_do_it_once_each(world: World) -> None:
    made = [add_input(world) for _ in range(6)]
    for file in made:
        delete_file(world, file.id)
    set_back(world, 10**9)
    policy = Policy.of(world.settings.retention_grace_s, world.settings.lease_s)
    with world.db.transaction() as session:
        taken = purge_queries.take(session, policy, 4)
    assert purger(world).purge_due() == 2, "the others are somebody's"
    for one in taken:
        with world.db.transaction() as session:
            wipe_queries.wipe(session, one.kind, one.subject_id)
            purge_queries.note_wiped(session, one, policy)
            purge_queries.note_wiped(session, DuePurge(**{**_fields(one), "is_last": True}), policy)
    with world.db.reading() as session:
        assert purge_queries.overdue(session, policy) == 0
        assert all(purge_queries.purged_ms(session, Kind.FILE, file.id) for file in made)


def _fields(one: DuePurge) -> dict[str, Any]:
    return {"subject_id": one.subject_id, "kind": one.kind, "deleted_ms": one.deleted_ms}
