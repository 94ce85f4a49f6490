"""Results on their way into a tenant's store: all of them, the manifest last, through kills, refusals and races."""

from __future__ import annotations

import hashlib
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import orjson
import pytest

from batchsvc.batches import deletion_service, export_queries, service, wipe_queries
from batchsvc.batches.lifecycle import Status
from batchsvc.batches.tables import Batch, Export
from batchsvc.db.session import database_now_ms
from batchsvc.files import service as files
from batchsvc.files import store_service
from batchsvc.files.retention import Kind
from tests.tenant_store import LOOPBACK, Tenant, listening
from tests.workers.conftest import DIGEST, World
from tests.workers.test_processes import environment
from workers.exporter import Exporter

_EXPORT = """
from batchsvc.db.session import Database
from batchsvc.settings import Settings
from batchsvc.store.s3 import ObjectStore
from workers.exporter import Exporter
settings = Settings.from_env()
Exporter(settings, Database(settings.database_url), ObjectStore(settings)).send_due()
"""
on_sqlite = pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)  # what the database is no part of
OUTPUT, ERROR = b'{"line": 1}\n{"line": 3}\n', b'{"line": 2}\n'


@pytest.fixture
def abroad(world: World, tenant: Tenant) -> World:
    """A world whose batches may go to the tenant's bucket, under out/."""
    world.settings = world.settings.model_copy(update={"egress_allow": LOOPBACK})
    tenant.register(world.db, project_of(world), "out/")
    return world


def project_of(world: World) -> str:
    return world.batch(world.add_batch(num_lines=1)).project_id


def add_export(world: World, tenant: Tenant, prefix: str = "out/night/", **options: Any) -> str:
    batch_id = world.add_batch(**options)
    with world.db.transaction() as session:
        batch = session.get_one(Batch, batch_id)
        batch.output_s3 = tenant.uri(prefix)
        export_queries.add(session, batch)
    return batch_id


def end(world: World, batch_id: str, output: bytes | None = OUTPUT, error: bytes | None = ERROR) -> None:
    """What publishing leaves behind."""
    with world.db.transaction() as session:
        batch = session.get_one(Batch, batch_id)
        now = database_now_ms(session)
        for kind, data in (("output", output), ("error", error)):
            if data is None:
                continue
            row = files.add_result(
                session,
                project_id=batch.project_id,
                filename=f"{batch_id}_{kind}.jsonl",
                s3_key=f"batch/{batch_id}/out/1/{kind}.jsonl",
                etag=world.store.put(f"batch/{batch_id}/out/1/{kind}.jsonl", data),
                sha256=hashlib.sha256(data).hexdigest(),
                size_bytes=len(data),
                created_ms=now,
                expires_ms=now + 3_600_000,
            )
            setattr(batch, f"{kind}_file_id", row.id)
            setattr(batch, "completed" if kind == "output" else "failed", data.count(b"\n"))
        batch.status = batch.why = Status.COMPLETED
        batch.ended_ms = now


def exporter(world: World) -> Exporter:
    return Exporter(world.settings, world.db, world.store)


def export_of(world: World, batch_id: str) -> Export:
    with world.db.reading() as session:
        return session.get_one(Export, batch_id)


def set_export(world: World, batch_id: str, **values: Any) -> None:
    with world.db.transaction() as session:
        for name, value in values.items():
            setattr(session.get_one(Export, batch_id), name, value)


def shown(world: World, batch_id: str) -> dict[str, Any]:
    with world.db.reading() as session:
        return dict(service.show(session, [session.get_one(Batch, batch_id)], 5)[0]["output_s3"])


def judge(world: World, tenant: Tenant, batch_id: str, expected: dict[str, bytes]) -> dict[str, Any]:
    """The manifest, once what stands in it is what is there, and nothing else is."""
    folder = f"out/night/{batch_id}/"
    manifest = orjson.loads(tenant.get(f"{folder}manifest.json"))
    found = {}
    for file in manifest["files"]:
        data = tenant.get(f"{folder}{file['kind']}.jsonl")
        assert file["uri"] == tenant.uri(f"{folder}{file['kind']}.jsonl")
        assert (file["bytes"], file["sha256"]) == (len(data), hashlib.sha256(data).hexdigest())
        assert file["lines"] == data.count(b"\n")
        found[file["kind"]] = data
    names = {f"{folder}{kind}.jsonl" for kind in found} | {f"{folder}manifest.json"}
    assert found == expected and {key for key in tenant.objects() if key.startswith(folder)} == names
    assert not tenant.uploads() and manifest["batch_id"] == batch_id
    batch = world.batch(batch_id)
    assert manifest["status"] == batch.status and manifest["ended_at"] == (batch.ended_ms or 0) // 1000
    row = export_of(world, batch_id)
    assert (row.state, row.error, row.lease_ms, row.uploads) == ("done", None, 0, []) and row.ended_ms
    assert shown(world, batch_id)["state"] == "done"
    return dict(manifest)


def test_all_results_go_over_and_the_manifest_says_what_they_are(abroad: World, tenant: Tenant) -> None:
    batch_id = add_export(abroad, tenant, num_lines=3)
    both = add_export(abroad, tenant, num_lines=3)
    abroad.mix(both, "e" * 64)
    end(abroad, both)
    assert exporter(abroad).send_due() == 1, "the other one hasn't ended"
    named = judge(abroad, tenant, both, {"output": OUTPUT, "error": ERROR})
    assert {name: pin["digest"] for name, pin in named["models"].items()} == {"a": DIGEST, "b": "e" * 64}
    end(abroad, batch_id)
    assert exporter(abroad).send_due() == 1 and exporter(abroad).send_due() == 0
    manifest = judge(abroad, tenant, batch_id, {"output": OUTPUT, "error": ERROR})
    assert manifest["request_counts"] == {"total": 3, "completed": 2, "failed": 1}
    assert manifest["usage"]["cost_nanos"] == 0 and manifest["model"] == "tiny" and manifest["models"] is None


@on_sqlite
@pytest.mark.parametrize("status", [Status.FAILED, Status.CANCELLED, Status.EXPIRED])
def test_a_batch_without_results_has_a_manifest_too(abroad: World, tenant: Tenant, status: Status) -> None:
    """So nobody waits for what never comes."""
    batch_id = add_export(abroad, tenant)
    problem = {"code": "empty_file", "line": None, "message": "The file has no requests.", "param": None}
    now = abroad.db.run(database_now_ms)
    errors = [problem] if status == Status.FAILED else None
    abroad.set_batch(batch_id, status=status, why=status, ended_ms=now, in_progress_ms=None, errors=errors)
    assert exporter(abroad).send_due() == 1
    manifest = judge(abroad, tenant, batch_id, {})
    assert manifest["errors"] == ({"object": "list", "data": [problem]} if errors else None)


@pytest.mark.parametrize(
    ("database_url", "where"),
    [
        ("sqlite", "export.begun"),
        ("postgresql", "export.begun"),
        ("sqlite", "export.copied"),
        ("postgresql", "export.completed"),
    ],
    indirect=["database_url"],
)
def test_an_exporter_that_is_killed_midway_is_gone_on_with(
    abroad: World, tenant: Tenant, tmp_path: Path, where: str
) -> None:
    data = b'{"line": 1, "text": "' + b"x" * (9 << 20 if where == "export.begun" else 9) + b'"}\n'
    batch_id = add_export(abroad, tenant, num_lines=1)
    end(abroad, batch_id, data, None)
    env = environment(abroad.settings, tmp_path, BATCHSVC_EGRESS_ALLOW=LOOPBACK, BATCHSVC_FAILPOINTS=f"{where}=kill")
    killed = subprocess.run([sys.executable, "-c", _EXPORT], env=env, check=False)
    assert killed.returncode == -signal.SIGKILL
    manifest = f"out/night/{batch_id}/manifest.json"
    assert (manifest in tenant.objects()) == (where == "export.completed")
    assert len(tenant.uploads()) == len(export_of(abroad, batch_id).uploads) == (where == "export.begun")
    assert exporter(abroad).send_due() == 0, "its lease isn't over"
    set_export(abroad, batch_id, lease_ms=0)
    assert exporter(abroad).send_due() == 1
    judge(abroad, tenant, batch_id, {"output": data})
    assert export_of(abroad, batch_id).epoch == 2


def test_an_exporter_that_was_overtaken_changes_nothing(abroad: World, tenant: Tenant) -> None:
    batch_id = add_export(abroad, tenant, num_lines=3)
    end(abroad, batch_id)
    slow = abroad.db.run(lambda session: export_queries.claim(session, "slow", 30))
    assert slow is not None and slow.epoch == 1
    set_export(abroad, batch_id, lease_ms=0)
    assert exporter(abroad).send_due() == 1
    with abroad.db.transaction() as session:
        assert not export_queries.keep(session, slow, 30) and not export_queries.finish(session, slow)
        assert not export_queries.note_upload(session, slow, "k", "u")
        assert export_queries.fail(session, slow, "late", is_final=True) is None
        export_queries.give_back(session, slow)
    judge(abroad, tenant, batch_id, {"output": OUTPUT, "error": ERROR})


@on_sqlite
def test_wrong_keys_are_said_and_tried_again_until_they_are_right(abroad: World, tenant: Tenant) -> None:
    batch_id = add_export(abroad, tenant, num_lines=3)
    end(abroad, batch_id)
    tenant.register(abroad.db, abroad.batch(batch_id).project_id, "out/", secret_key="wrong-secret")
    for attempt, wait_s in ((1, 5), (2, 30)):
        assert exporter(abroad).send_due() == 1 and exporter(abroad).send_due() == 0
        row = export_of(abroad, batch_id)
        assert (row.state, row.num_failures, row.lease_ms) == ("pending", attempt, 0)
        left_ms = row.due_ms - abroad.db.run(database_now_ms)
        assert 1000 * wait_s - 3000 < left_ms <= 1000 * wait_s
        said = shown(abroad, batch_id)
        assert said["state"] == "pending" and "refuses this" in said["error"] and "wrong-secret" not in said["error"]
        set_export(abroad, batch_id, due_ms=0)
    tenant.register(abroad.db, abroad.batch(batch_id).project_id, "out/")
    assert exporter(abroad).send_due() == 1
    judge(abroad, tenant, batch_id, {"output": OUTPUT, "error": ERROR})
    assert shown(abroad, batch_id)["attempts"] == 3


@on_sqlite
def test_a_key_of_ours_that_opens_no_secret_costs_no_attempt(abroad: World, tenant: Tenant) -> None:
    batch_id = add_export(abroad, tenant, num_lines=3)
    end(abroad, batch_id)
    right = abroad.settings
    abroad.settings = right.model_copy(update={"secret_key": "f" * 64})
    set_export(abroad, batch_id, num_failures=export_queries._GIVE_UP - 1)
    assert exporter(abroad).send_due() == 1 and exporter(abroad).send_due() == 0, "not at once again"
    row = export_of(abroad, batch_id)
    assert (row.state, row.num_failures, row.lease_ms) == ("pending", export_queries._GIVE_UP - 1, 0)
    assert "BATCHSVC_SECRET_KEY" in shown(abroad, batch_id)["error"]
    abroad.settings = right
    set_export(abroad, batch_id, due_ms=0)
    assert exporter(abroad).send_due() == 1
    judge(abroad, tenant, batch_id, {"output": OUTPUT, "error": ERROR})


@on_sqlite
def test_what_is_not_registered_any_more_gets_no_request(abroad: World, tenant: Tenant) -> None:
    batch_id = add_export(abroad, tenant, num_lines=3)
    end(abroad, batch_id)
    with listening() as (endpoint, came):
        row = tenant.register(abroad.db, abroad.batch(batch_id).project_id, "out/", endpoint=endpoint)
        abroad.db.run(lambda session: store_service.remove(session, row.id))
        assert exporter(abroad).send_due() == 1
        assert "isn't registered" in (export_of(abroad, batch_id).error or "") and not came
        tenant.register(abroad.db, abroad.batch(batch_id).project_id, "out/", endpoint=endpoint)
        set_export(abroad, batch_id, due_ms=0)
        abroad.settings = abroad.settings.model_copy(update={"egress_allow": ""})
        assert exporter(abroad).send_due() == 1 and not came
        abroad.settings = abroad.settings.model_copy(update={"egress_allow": LOOPBACK, "bucket": tenant.bucket})
        set_export(abroad, batch_id, due_ms=0)
        assert exporter(abroad).send_due() == 1 and not came, "our own bucket"


@on_sqlite
def test_it_is_given_up_after_a_while_and_at_once_when_the_results_are_gone(abroad: World, tenant: Tenant) -> None:
    batch_id = add_export(abroad, tenant, num_lines=3)
    end(abroad, batch_id)
    tenant.register(abroad.db, abroad.batch(batch_id).project_id, "out/", endpoint="http://127.0.0.1:1")
    set_export(abroad, batch_id, num_failures=export_queries._GIVE_UP - 1)
    assert exporter(abroad).send_due() == 1
    assert shown(abroad, batch_id)["state"] == "failed" and "doesn't answer" in shown(abroad, batch_id)["error"]
    tenant.register(abroad.db, abroad.batch(batch_id).project_id, "out/")
    gone = add_export(abroad, tenant, num_lines=3)
    end(abroad, gone)
    with abroad.db.transaction() as session:
        files.delete(
            session,
            abroad.batch(gone).project_id,
            abroad.batch(gone).error_file_id or "",
            live_batch_of=lambda *_: None,
            discard=lambda *_: None,
        )
    assert exporter(abroad).send_due() == 1
    assert shown(abroad, gone)["state"] == "failed" and "was deleted" in shown(abroad, gone)["error"]
    assert not tenant.objects()


def test_uploads_that_were_begun_are_ended_when_the_batch_is_deleted(abroad: World, tenant: Tenant) -> None:
    """The exporter that began them was killed, or is overtaken by the deletion."""
    batch_ids = [add_export(abroad, tenant, num_lines=3) for _ in range(2)]
    for batch_id in batch_ids:
        end(abroad, batch_id)
        key = f"out/night/{batch_id}/output.jsonl"
        upload_id = tenant.client.create_multipart_upload(Bucket=tenant.bucket, Key=key)["UploadId"]
        set_export(abroad, batch_id, uploads=[[key, upload_id]], lease_ms=10**15, owner="dead", epoch=1)
    first, wiped = batch_ids
    project_id = abroad.batch(first).project_id
    for batch_id in batch_ids:
        with abroad.db.transaction() as session:
            deletion_service.delete_batch(session, project_id, batch_id, with_input=False, discard=lambda *_: None)
    with abroad.db.transaction() as session:
        wipe_queries.wipe(session, Kind.BATCH, wiped)
    assert (export_of(abroad, wiped).state, export_of(abroad, wiped).uploads) == ("failed", []), "its time is over"
    assert len(tenant.uploads()) == 2
    assert exporter(abroad).send_due() == 1
    assert (export_of(abroad, first).state, export_of(abroad, first).uploads) == ("failed", [])
    assert len(tenant.uploads()) == 1 and not tenant.objects()
    assert export_of(abroad, first).error == export_queries.WAS_DELETED


@on_sqlite
def test_results_that_are_damaged_get_no_manifest(abroad: World, tenant: Tenant) -> None:
    batch_id = add_export(abroad, tenant, num_lines=3)
    end(abroad, batch_id)
    with abroad.db.transaction() as session:
        row = files.find_stored(session, abroad.batch(batch_id).project_id, abroad.batch(batch_id).output_file_id or "")
        assert row is not None
        row.etag = abroad.store.put(row.s3_key, OUTPUT.replace(b"1", b"9"))
    assert exporter(abroad).send_due() == 1
    assert export_of(abroad, batch_id).state == "pending"
    assert f"out/night/{batch_id}/manifest.json" not in tenant.objects()


def test_one_export_of_a_project_is_on_its_way_and_the_others_wait(abroad: World, tenant: Tenant) -> None:
    batch_ids = [add_export(abroad, tenant, num_lines=3) for _ in range(2)]
    other = add_export(abroad, tenant, num_lines=3, project="others")
    for batch_id in (*batch_ids, other):
        end(abroad, batch_id)
    claims = [abroad.db.run(lambda session: export_queries.claim(session, "a", 30)) for _ in range(3)]
    taken = [claimed.batch_id for claimed in claims if claimed]
    assert len(taken) == 2 and other in taken
    for claimed in claims:
        if claimed:
            abroad.db.run(lambda session, claimed=claimed: export_queries.give_back(session, claimed))
    abroad.db.run(lambda session: store_service.remove(session, store_service.list_stores(session)[0].id))
    assert exporter(abroad).send_due() == 3, "each is tried"


@on_sqlite
def test_a_process_that_stops_gives_back_what_it_has(abroad: World, tenant: Tenant) -> None:
    batch_id = add_export(abroad, tenant, num_lines=3)
    end(abroad, batch_id)
    stopping = exporter(abroad)
    stopping._stopped.set()
    claimed = stopping._claim()
    assert claimed is not None
    stopping._serve(claimed)
    row = export_of(abroad, batch_id)
    assert (row.state, row.num_failures, row.lease_ms) == ("pending", 0, 0)
    assert exporter(abroad).send_due() == 1
    judge(abroad, tenant, batch_id, {"output": OUTPUT, "error": ERROR})
