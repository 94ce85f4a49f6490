"""Inputs in a tenant's store: copied once, at the version that was pinned, or the batch says why not."""

from __future__ import annotations

import gzip
import hashlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
from sqlalchemy import update

from batchsvc import ids
from batchsvc.batches import planning, service
from batchsvc.batches.planning import PlanProgress
from batchsvc.batches.tables import Batch
from batchsvc.db.session import database_now_ms
from batchsvc.files import importing, store_service
from batchsvc.files import service as files
from batchsvc.files.importing import Origin
from batchsvc.files.s3_uri import parse_object
from batchsvc.files.schemas import file_object
from batchsvc.files.tables import File
from batchsvc.settings import Settings
from batchsvc.store import keys
from batchsvc.store.s3 import ObjectInfo
from tests.batchsvc.batches.planned import PROJECT, Planned, jsonl, line
from tests.faults.s3_proxy import Rule, in_front_of_s3
from tests.tenant_store import LOOPBACK, Tenant, dripping, listening

on_sqlite = pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)  # what the database is no part of
TWO = jsonl(line("a"), line("b"))
_FETCH = """
from batchsvc.db.session import Database
from batchsvc.files import importing
from batchsvc.files.schemas import file_object
from batchsvc.files.tables import File
from batchsvc.settings import Settings
from batchsvc.store.s3 import ObjectStore
import sys
settings = Settings.from_env()
db = Database(settings.database_url)
with db.reading() as session:
    origin = importing.origin_of(session.get_one(File, sys.argv[1]))
importing.fetch(db, ObjectStore(settings), settings, origin, lambda: None)
"""


@pytest.fixture
def abroad(planned: Planned, tenant: Tenant) -> Planned:
    """The planner, with the tenant's bucket registered for its project."""
    tenant.register(planned.db, PROJECT, "in/")
    return planned.with_settings(egress_allow=LOOPBACK)


def add_batch(planned: Planned, tenant: Tenant, key: str = "in/requests.jsonl", **changes: Any) -> str:
    """A batch of an object as it is now, as the API makes it."""
    found = importing.head(planned.db, PROJECT, parse_object(tenant.uri(key), "x"), planned.context.settings)
    batch_id = planned.add_batch(b"", **changes)
    with planned.db.transaction() as session:
        file = record(session, tenant.uri(key), found)
        session.get_one(Batch, batch_id).input_file_id = file.id
    return batch_id


def record(session: Any, uri: str, found: ObjectInfo) -> File:
    file_id = ids.file_id()
    return files.add_import(
        session,
        file_id=file_id,
        project_id=PROJECT,
        s3_key=keys.input_file(PROJECT, file_id),
        source=parse_object(uri, "x"),
        source_etag=found.etag,
        size_bytes=found.size_bytes,
        life_s=3600,
    )


def file_of(planned: Planned, batch_id: str) -> File:
    with planned.db.reading() as session:
        return session.get_one(File, session.get_one(Batch, batch_id).input_file_id)


def reason(planned: Planned, batch_id: str) -> tuple[str, str]:
    batch = planned.batch(batch_id)
    assert batch.status == "failed" and batch.errors, batch.status
    (problem,) = batch.errors
    assert problem["param"] == "input_file_id" and problem["line"] is None
    return problem["code"], problem["message"]


def test_an_object_is_copied_once_and_is_a_file_like_any_other(abroad: Planned, tenant: Tenant) -> None:
    tenant.put("in/requests.jsonl", TWO)
    small = abroad.with_settings(window_lines=1)
    batch_id = add_batch(small, tenant)
    before = file_of(small, batch_id)
    assert (before.etag, before.sha256, before.filename) == ("", "", "requests.jsonl")
    assert planning.plan_next_window(small.context, batch_id, "w") == PlanProgress.AGAIN
    tenant.delete("in/requests.jsonl")  # the second window is read from our copy
    assert small.plan(batch_id) == PlanProgress.DONE
    assert small.batch(batch_id).status == "in_progress" and set(small.lines(batch_id)) == {1, 2}
    after = file_of(small, batch_id)
    assert (after.sha256, after.size_bytes) == (hashlib.sha256(TWO).hexdigest(), len(TWO))
    copy = small.store.head(after.s3_key)
    assert copy is not None and copy.etag == after.etag and small.store.get(after.s3_key) == TWO


@on_sqlite
def test_a_packed_object_is_decoded_as_an_upload_is(abroad: Planned, tenant: Tenant) -> None:
    tenant.put("in/requests.jsonl", gzip.compress(TWO))
    batch_id = add_batch(abroad, tenant)
    assert abroad.plan(batch_id) == PlanProgress.DONE and set(abroad.lines(batch_id)) == {1, 2}


@on_sqlite
def test_an_empty_object_is_an_empty_file(abroad: Planned, tenant: Tenant) -> None:
    tenant.put("in/requests.jsonl", b"")
    batch_id = add_batch(abroad, tenant)
    assert abroad.plan(batch_id) == PlanProgress.DONE and reason(abroad, batch_id)[0] == "empty_file"


def test_an_object_that_was_replaced_or_deleted_since_fails_its_batch(abroad: Planned, tenant: Tenant) -> None:
    tenant.put("in/requests.jsonl", TWO)
    replaced = add_batch(abroad, tenant)
    tenant.put("in/requests.jsonl", jsonl(line("c"), line("d")))
    assert abroad.plan(replaced) == PlanProgress.DONE
    code, says = reason(abroad, replaced)
    assert code == "input_replaced" and tenant.uri("in/requests.jsonl") in says
    deleted = add_batch(abroad, tenant)
    tenant.delete("in/requests.jsonl")
    assert abroad.plan(deleted) == PlanProgress.DONE and reason(abroad, deleted)[0] == "input_not_found"
    for batch_id in (replaced, deleted):
        file = file_object(file_of(abroad, batch_id))
        assert (file["status"], file["sha256"]) == ("error", None) and file["status_details"]
        assert abroad.store.head(file_of(abroad, batch_id).s3_key) is None and not abroad.units(batch_id)


@on_sqlite
def test_an_object_that_is_replaced_while_it_is_copied_ends_the_import(abroad: Planned, tenant: Tenant) -> None:
    """The connection breaks off, and what is there to go on with is another version."""
    data = jsonl(*(line(f"c{number}", "x" * 1000) for number in range(3000)))
    tenant.put("in/requests.jsonl", data)
    origin = importing.origin_of(file_of(abroad, add_batch(abroad, tenant)))
    assert origin is not None and len(data) > 3 << 20
    passed: list[int] = []

    def keep() -> None:
        passed.append(1)
        if len(passed) == 2:
            tenant.put("in/requests.jsonl", data.replace(b"x", b"y"))

    with in_front_of_s3(tenant.server.endpoint) as proxy:
        proxy.rules = [Rule(effect="truncate", methods="GET", times=1)]
        tenant.register(abroad.db, PROJECT, "in/", endpoint=f"http://127.0.0.1:{proxy.port}")
        with pytest.raises(importing.ImportFailedError) as failed:
            importing.fetch(abroad.db, abroad.store, abroad.context.settings, origin, keep)
    assert failed.value.code == "input_replaced" and len(passed) >= 2
    assert abroad.store.head(origin.s3_key) is None, "no line of either version"


@on_sqlite
def test_a_connection_that_breaks_off_is_gone_on_with(abroad: Planned, tenant: Tenant) -> None:
    data = jsonl(*(line(f"c{number}", "x" * 1000) for number in range(3000)))
    tenant.put("in/requests.jsonl", data)
    origin = importing.origin_of(file_of(abroad, add_batch(abroad, tenant)))
    assert origin is not None
    with in_front_of_s3(tenant.server.endpoint) as proxy:
        proxy.rules = [Rule(effect="truncate", methods="GET", times=2)]
        tenant.register(abroad.db, PROJECT, "in/", endpoint=f"http://127.0.0.1:{proxy.port}")
        importing.fetch(abroad.db, abroad.store, abroad.context.settings, origin, lambda: None)
    assert abroad.store.get(origin.s3_key) == data


@on_sqlite
def test_a_store_that_is_not_registered_any_more_gets_no_request(abroad: Planned, tenant: Tenant) -> None:
    tenant.put("in/requests.jsonl", TWO)
    batch_id = add_batch(abroad, tenant)
    with listening() as (endpoint, came):
        row = tenant.register(abroad.db, PROJECT, "in/", endpoint=endpoint)
        abroad.db.run(lambda session: store_service.remove(session, row.id))
        assert abroad.plan(batch_id) == PlanProgress.DONE
        code, says = reason(abroad, batch_id)
        assert code == "store_not_registered" and "batchsvc admin stores add" in says and not came


@on_sqlite
def test_a_bucket_that_is_our_own_is_never_read(abroad: Planned, tenant: Tenant) -> None:
    """Also where another address leads to it: the name is what is refused."""
    tenant.put("in/requests.jsonl", TWO)
    batch_id = add_batch(abroad, tenant)
    renamed = abroad.with_settings(bucket=tenant.bucket)
    assert renamed.plan(batch_id) == PlanProgress.DONE
    assert reason(renamed, batch_id)[0] == "store_not_registered"


@on_sqlite
@pytest.mark.parametrize(
    ("changes", "code"),
    [({"secret_key": "wrong"}, "store_refused"), ({"endpoint": "http://10.1.1.1"}, "address_refused")],
)
def test_wrong_keys_and_refused_addresses_end_the_batch_at_once(
    abroad: Planned, tenant: Tenant, changes: dict[str, str], code: str
) -> None:
    tenant.put("in/requests.jsonl", TWO)
    batch_id = add_batch(abroad, tenant)
    tenant.register(abroad.db, PROJECT, "in/", **changes)
    assert abroad.plan(batch_id) == PlanProgress.DONE
    found, says = reason(abroad, batch_id)
    assert found == code and "wrong" not in says


def test_a_store_that_does_not_answer_is_asked_again_later_and_given_up(abroad: Planned, tenant: Tenant) -> None:
    tenant.put("in/requests.jsonl", TWO)
    batch_id = add_batch(abroad, tenant)
    tenant.register(abroad.db, PROJECT, "in/", endpoint="http://127.0.0.1:1")
    waits = list(importing._WAITS_S)
    for wait_s in waits:
        assert planning.plan_next_window(abroad.context, batch_id, "w") == PlanProgress.LOST
        batch = abroad.batch(batch_id)
        left_ms = batch.plan_lease_ms - abroad.db.run(database_now_ms)
        assert batch.status == "validating" and 1000 * wait_s - 3000 < left_ms <= 1000 * wait_s
        with abroad.db.reading() as session:
            (shown,) = service.show(session, [batch], 5)
        assert "the store of its input" in shown["waiting_for"]
        assert planning.plan_next_window(abroad.context, batch_id, "w") == PlanProgress.LOST, "nobody tries before"
        with abroad.db.transaction() as session:
            session.execute(update(Batch).values(plan_lease_ms=0))
    assert planning.plan_next_window(abroad.context, batch_id, "w") == PlanProgress.DONE
    assert reason(abroad, batch_id)[0] == "input_unavailable"
    with abroad.db.transaction() as session:  # a new batch of the same version begins to count anew
        found = ObjectInfo(len(TWO), file_of(abroad, batch_id).source_etag or "")
        again = record(session, tenant.uri("in/requests.jsonl"), found)
        assert (again.id, again.num_failures) == (file_of(abroad, batch_id).id, 0)


@on_sqlite
def test_a_store_that_comes_back_is_copied_from(abroad: Planned, tenant: Tenant) -> None:
    tenant.put("in/requests.jsonl", TWO)
    batch_id = add_batch(abroad, tenant)
    tenant.register(abroad.db, PROJECT, "in/", endpoint="http://127.0.0.1:1")
    assert planning.plan_next_window(abroad.context, batch_id, "w") == PlanProgress.LOST
    tenant.register(abroad.db, PROJECT, "in/")
    with abroad.db.transaction() as session:
        session.execute(update(Batch).values(plan_lease_ms=0))
    assert abroad.plan(batch_id) == PlanProgress.DONE and abroad.batch(batch_id).status == "in_progress"


@pytest.mark.parametrize("database_url", ["postgresql"], indirect=True)
def test_who_was_killed_after_the_copy_leaves_it_to_the_next(abroad: Planned, tenant: Tenant) -> None:
    tenant.put("in/requests.jsonl", TWO)
    batch_id = add_batch(abroad, tenant)
    killed = subprocess.run(
        [sys.executable, "-c", _FETCH, file_of(abroad, batch_id).id],
        env=os.environ | environment(abroad.context.settings) | {"BATCHSVC_FAILPOINTS": "import.stored=kill"},
        check=False,
    )
    assert killed.returncode == -signal.SIGKILL
    file = file_of(abroad, batch_id)
    assert file.sha256 == "" and abroad.store.get(file.s3_key) == TWO
    tenant.delete("in/requests.jsonl")
    assert abroad.plan(batch_id) == PlanProgress.DONE and abroad.batch(batch_id).status == "in_progress"
    assert file_of(abroad, batch_id).sha256 == hashlib.sha256(TWO).hexdigest()


def environment(settings: Settings) -> dict[str, str]:
    return {
        "DATABASE_URL": settings.database_url,
        "REDIS_URL": settings.redis_url,
        "AWS_ENDPOINT_URL_S3": settings.s3_endpoint or "",
        "AWS_ACCESS_KEY_ID": settings.s3_access_key or "",
        "AWS_SECRET_ACCESS_KEY": settings.s3_secret_key or "",
        "BATCHSVC_BUCKET": settings.bucket,
        "BATCHSVC_EGRESS_ALLOW": LOOPBACK,
        "BATCHSVC_SECRET_KEY": settings.secret_key or "",
    }


@on_sqlite
@pytest.mark.parametrize("lie", [lambda data: data[:-1], lambda data: data + b"x"])
def test_a_store_that_says_another_length_than_it_sends_is_not_believed(
    abroad: Planned, tenant: Tenant, lie: Callable[[bytes], bytes]
) -> None:
    tenant.put("in/requests.jsonl", lie(TWO))
    uri = parse_object(tenant.uri("in/requests.jsonl"), "x")
    found = importing.head(abroad.db, PROJECT, uri, abroad.context.settings)
    origin = Origin(
        file_id="file-x",
        project_id=PROJECT,
        s3_key="in/x",
        uri=str(uri),
        etag=found.etag,
        size_bytes=len(TWO),
    )
    with pytest.raises(importing.ImportFailedError, match="was replaced"):
        importing.fetch(abroad.db, abroad.store, abroad.context.settings, origin, lambda: None)
    assert abroad.store.head("in/x") is None


@on_sqlite
def test_a_store_that_drips_is_put_off(abroad: Planned, tenant: Tenant, monkeypatch: pytest.MonkeyPatch) -> None:
    """It sends a byte now and then, so that no read of it ever times out."""
    tenant.put("in/requests.jsonl", TWO)
    origin = importing.origin_of(file_of(abroad, add_batch(abroad, tenant)))
    assert origin is not None
    monkeypatch.setattr(importing, "_SLOW_S", 0.5)
    monkeypatch.setattr(importing, "_LOOK_S", 0.1)
    head = b'HTTP/1.1 200 OK\r\nContent-Length: %d\r\nETag: "%s"\r\n\r\n' % (len(TWO), origin.etag.encode())
    with dripping(head) as port:
        tenant.register(abroad.db, PROJECT, "in/", endpoint=f"http://127.0.0.1:{port}")
        with pytest.raises(importing.PutOffError):
            importing.fetch(abroad.db, abroad.store, abroad.context.settings, origin, lambda: None)
    assert abroad.store.head(origin.s3_key) is None
