"""The audit finds one nano-dollar in every place where one can be wrong, on both databases, and nothing where all is
right: batches that run, ended, were stopped, lost parts or files."""

from __future__ import annotations

import ast
import hashlib
import importlib.util
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import orjson
import pytest
import zstandard
from sqlalchemy import CursorResult, text
from sqlalchemy.exc import DBAPIError
from structlog.testing import capture_logs
from typer.testing import CliRunner

from batchsvc.batches import reconcile_sample_queries
from batchsvc.batches.lifecycle import Status
from batchsvc.batches.reconcile import Prices, Report, Sums, add_output_line
from batchsvc.batches.reconcile_queries import Reader
from batchsvc.batches.reconcile_run import Auditor
from batchsvc.billing import invoice_api, invoice_draft, invoice_service, movements
from batchsvc.billing.invoice_schemas import ChangeParty
from batchsvc.billing.month import Month
from batchsvc.cli.app import app
from batchsvc.clock import now_ms
from batchsvc.db.session import Database
from batchsvc.files.tables import File
from batchsvc.health import Checks
from batchsvc.metrics import Metrics
from batchsvc.settings import Settings
from batchsvc.store.s3 import ObjectStore
from tests import servers
from tests.dispatchers import NullDispatcher
from tests.workers.conftest import FAST, World
from tests.workers.test_finalize import finalizer, run_units
from workers.reaper import Reaper

SELLER = {"seller_name": "S", "seller_address": "A", "seller_country": "DE", "seller_tax_id": "T"}


@pytest.fixture
def world(migrated_url: str, s3_server: servers.S3Server, bucket: str) -> Iterator[World]:
    """As `world`, with the triggers of the migrations."""
    settings = Settings.from_env(
        {
            "DATABASE_URL": migrated_url,
            "REDIS_URL": "unix://unused",
            "AWS_ENDPOINT_URL_S3": s3_server.endpoint,
            "AWS_ACCESS_KEY_ID": s3_server.access_key,
            "AWS_SECRET_ACCESS_KEY": s3_server.secret_key,
            "BATCHSVC_BUCKET": bucket,
        }
    ).model_copy(update={**FAST, **SELLER})
    db, store = Database(settings.database_url), ObjectStore(settings)
    store.ensure_bucket()
    yield World(settings, db, store)
    db.dispose()


on_sqlite = pytest.mark.parametrize("migrated_url", ["sqlite"], indirect=True)  # of no interest on both


def audit(world: World, batch_id: str | None = None) -> Report:
    auditor = Auditor(world.settings.database_url, world.store)
    try:
        report = auditor.everything() if batch_id is None else auditor.batch(batch_id)
    finally:
        auditor.close()
    assert report is not None
    return report


def equal(world: World, batch_id: str | None = None) -> Report:
    report = audit(world, batch_id)
    assert [str(difference) for difference in report.differences] == []
    assert report.num_differences == 0
    return report


def ended_batch(world: World, **more: Any) -> str:
    batch_id = world.add_batch(**{"num_lines": 6, "unit_lines": 2, "windows": 2, "fold": 2, **more})
    run_units(world)
    assert finalizer(world).finalize(batch_id)
    return batch_id


def change(world: World, sql: str, **values: Any) -> None:
    """Changes rows as nobody can: past the triggers."""
    with world.db.transaction() as session:
        if world.db.is_sqlite:
            guards = session.execute(
                text("SELECT name FROM sqlite_master WHERE type = 'trigger' AND name LIKE '%_no_%'")
            ).scalars()
            for name in guards.all():
                session.execute(text(f"DROP TRIGGER {name}"))
        else:
            session.execute(text("SET LOCAL session_replication_role = replica"))
        changed = session.execute(text(sql), values)
        assert isinstance(changed, CursorResult) and changed.rowcount, sql


def test_ended_batches_are_equal(world: World) -> None:
    batch_id = ended_batch(world)
    report = equal(world, batch_id)
    assert (report.batches, report.lines, report.parts) == (1, 12, len(world.parts(batch_id)))
    with world.db.transaction() as session:
        project = world.batch(batch_id).project_id
        movements.post(session, "refund", project, 5, reason="so", key="1", batch_id=batch_id)
        movements.post(session, "topup", project, 7, reason="so", key="1")
    assert equal(world).batches == 1


# ---- one nano-dollar in each place

Undo = Callable[[], None]
Tamper = Callable[[World, str], Undo]


def tamper_output_line(world: World, batch_id: str) -> Undo:
    """One line says that it cost more."""
    row = world.batch(batch_id)
    with world.db.reading() as session:
        file = session.get_one(File, row.output_file_id)
    text_ = world.store.get(file.s3_key)
    old = b'"cost_nanos":%d' % orjson.loads(text_.splitlines()[3])["response"]["body"]["usage"]["cost_nanos"]
    at = text_.index(old)
    changed = text_[:at] + b'"cost_nanos":%d' % (int(old.split(b":")[1]) + 1) + text_[at + len(old) :]
    return swap(world, "files", file.id, file.s3_key, text_, changed)


def tamper_part_object(world: World, batch_id: str) -> Undo:
    part = world.parts(batch_id)[0]
    lines = zstandard.ZstdDecompressor().decompress(world.store.get(part.s3_key)).splitlines()
    cost = orjson.loads(lines[0])["cost_nanos"]
    lines[0] = lines[0].replace(b'"cost_nanos":%d' % cost, b'"cost_nanos":%d' % (cost + 1))  # in head and row alike
    data = zstandard.ZstdCompressor().compress(b"\n".join([*lines, b""]))
    return swap(world, "parts", part.id, part.s3_key, world.store.get(part.s3_key), data)


def swap(world: World, table: str, id_: str, key: str, before: bytes, after: bytes) -> Undo:
    """Stores other bytes, and notes them as what was stored, so that only adding up can tell."""

    def put(data: bytes) -> None:
        world.store.put(key, data)
        change(
            world,
            f"UPDATE {table} SET sha256 = :sha256, bytes = :bytes WHERE id = :id",
            sha256=hashlib.sha256(data).hexdigest(),
            bytes=len(data),
            id=id_,
        )

    put(after)
    return lambda: put(before)


def tamper(sql: str) -> Tamper:
    def run(world: World, batch_id: str) -> Undo:
        part = world.parts(batch_id)[0].id
        values = {"batch": batch_id, "part": part, "project": world.batch(batch_id).project_id}
        values = {name: value for name, value in values.items() if f":{name}" in sql}
        change(world, sql, **values)
        back = sql.replace("+ 1", "- 1") if "+ 1" in sql else sql.replace("- 1", "+ 1")
        return lambda: change(world, back, **values)

    return run


PART = "transaction_id = (SELECT id FROM ledger_transactions WHERE part_id = :part)"
PLACES: dict[str, tuple[Tamper, str, str]] = {  # what is changed; where that shows, and in which number
    "output line": (tamper_output_line, "output file line", "cost_nanos"),
    "part object": (tamper_part_object, "part_", "cost_nanos"),
    "parts row": (tamper("UPDATE parts SET cost_nanos = cost_nanos + 1 WHERE id = :part"), "part_", "cost_nanos"),
    "standard price": (
        tamper("UPDATE parts SET standard_nanos = standard_nanos + 1 WHERE id = :part"), "part_", "standard_nanos"
    ),
    "usage row": (
        tamper("UPDATE usage SET cost_nanos = cost_nanos + 1 WHERE part_id = :part"), "usage row part_", "cost_nanos"
    ),
    "rollup": (
        tamper("UPDATE usage_hours SET cost_nanos = cost_nanos + 1 WHERE batch_id = :batch"),
        "usage_hours", "cost_nanos",
    ),
    "ledger entry": (
        tamper(f"UPDATE ledger_entries SET amount_nanos = amount_nanos + 1 WHERE account = 'revenue' AND {PART}"),
        "ledger part:part_", "revenue",
    ),
    "reservation": (
        tamper(
            "UPDATE ledger_entries SET amount_nanos = amount_nanos + 1 WHERE account LIKE 'reserved:%' AND"
            " transaction_id = (SELECT id FROM ledger_transactions WHERE kind = 'reserve' AND batch_id = :batch)"
        ),
        "ledger", "reserved in all",
    ),
    "balance": (
        tamper("UPDATE balances SET available_nanos = available_nanos + 1 WHERE project_id = :project"),
        "balance of proj", "available_nanos",
    ),
    "month": (
        tamper("UPDATE balances SET month_nanos = month_nanos - 1 WHERE project_id = :project"),
        "balance of proj", "month_nanos",
    ),
    "batch column": (
        tamper("UPDATE batches SET cost_nanos = cost_nanos - 1 WHERE id = :batch"), "by its output file", "cost_nanos"
    ),
    "invoice line": (
        tamper(
            "UPDATE invoice_lines SET amount_nanos = amount_nanos + 1 WHERE no = 1 AND invoice_id ="
            " (SELECT id FROM invoices)"
        ),
        "invoice INV-", "usage of the month",
    ),
    "invoice": (
        tamper("UPDATE invoices SET net_nanos = net_nanos + 1 WHERE status = 'issued'"), "invoice INV-", "net_nanos"
    ),
}  # fmt: skip


def bill(world: World, batch_id: str) -> None:
    """Moves what there is into last month, as if time had passed, and bills it."""
    project = world.batch(batch_id).project_id
    month = Month.of(now_ms() - 32 * 86_400_000)
    at = month.end_ms - 1
    hour = at // 3_600_000 * 3_600_000
    for table in ("usage", "parts", "ledger_transactions"):
        change(world, f"UPDATE {table} SET created_ms = :at WHERE batch_id = :batch", at=at, batch=batch_id)
    change(world, "UPDATE usage_hours SET hour_ms = :hour WHERE batch_id = :batch", hour=hour, batch=batch_id)
    number = month.year * 12 + month.month - 1
    change(world, "UPDATE balances SET month = :month WHERE project_id = :project", month=number, project=project)
    with world.db.transaction() as session:
        buyer = ChangeParty(name="B", address="B", country="FR", tax_id="B")
        invoice_api.change_party(session, project, buyer)
    with world.db.transaction() as session:
        drafted = invoice_draft.draft(session, world.settings, project, month)
    world.db.run(lambda session: invoice_service.issue(session, drafted.id))


def test_one_nano_dollar_is_found_in_each_place(world: World) -> None:
    batch_id = ended_batch(world, num_lines=4, windows=1)
    bill(world, batch_id)
    assert equal(world).invoices == 1
    for name, (run, where, number) in PLACES.items():
        undo = run(world, batch_id)
        found = [(difference.place, difference.number, difference) for difference in audit(world).differences]
        undo()
        hits = [difference for at, which, difference in found if where in at and number in which]
        assert hits, (name, found)
        stored, added_up = hits[0].stored, hits[0].added_up
        assert isinstance(stored, int) and isinstance(added_up, int) and abs(stored - added_up) == 1, name
        assert f"off by {stored - added_up:+d}" in str(hits[0])
    equal(world)


# ---- what is no difference


def test_a_running_batch_is_equal(world: World) -> None:
    batch_id = world.add_batch(num_lines=6, unit_lines=2, windows=2)
    equal(world, batch_id)
    run_units(world, most_units=3, lines=1)
    report = equal(world, batch_id)
    assert report.parts == 3 and report.lines == 0, "there are no files yet"
    equal(world)


@on_sqlite
def test_a_line_that_counts_twice_is_found(world: World) -> None:
    batch_id = world.add_batch(num_lines=2, unit_lines=2)
    run_units(world)
    first, second = world.parts(batch_id)
    world.store.put(second.s3_key, world.store.get(first.s3_key))
    assert any("times it was delivered" in str(found) for found in audit(world, batch_id).differences)


@on_sqlite
@pytest.mark.parametrize("why", [Status.CANCELLED, Status.EXPIRED])
def test_lines_that_never_ran_are_no_difference(world: World, why: Status) -> None:
    batch_id = world.add_batch(num_lines=6, unit_lines=2)
    run_units(world, most_units=2, lines=1)
    stopped = {"status": Status.CANCELLING, "cancelling_ms": 1} if why == Status.CANCELLED else {"expires_ms": 1}
    world.set_batch(batch_id, **stopped)
    assert finalizer(world).finalize(batch_id)
    report = equal(world, batch_id)
    assert report.notes == [f"{batch_id}: 4 lines never ran, and cost nothing."]
    equal(world)


@on_sqlite
def test_parts_that_were_taken_back_count_nowhere(world: World) -> None:
    batch_id = world.add_batch(num_lines=4, unit_lines=2)
    run_units(world)
    damaged = world.parts(batch_id)[0]
    world.store.delete([damaged.s3_key])
    assert [found.stored for found in audit(world, batch_id).differences] == ["missing"]
    assert finalizer(world).finalize(batch_id) is False
    equal(world, batch_id)
    run_units(world)
    assert finalizer(world).finalize(batch_id)
    assert "1 damaged parts were taken back" in equal(world, batch_id).notes[0]


@on_sqlite
def test_files_and_parts_that_are_gone_are_told_of(world: World) -> None:
    batch_id = ended_batch(world)
    file_id = world.batch(batch_id).output_file_id
    world.store.delete([part.s3_key for part in world.parts(batch_id)])
    with world.db.transaction() as session:
        session.get_one(File, file_id).deleted_ms = now_ms()
    notes = equal(world, batch_id).notes
    assert len(notes) == 2 and "its output file was deleted" in notes[0] and "were cleared away" in notes[1]


# ---- the command


@on_sqlite
def test_the_command_says_what_differs_and_exits_1(world: World) -> None:
    batch_id = ended_batch(world)
    settings = world.settings
    env = {
        "DATABASE_URL": settings.database_url,
        "REDIS_URL": settings.redis_url,
        "AWS_ENDPOINT_URL_S3": settings.s3_endpoint,
        "AWS_ACCESS_KEY_ID": settings.s3_access_key,
        "AWS_SECRET_ACCESS_KEY": settings.s3_secret_key,
        "BATCHSVC_BUCKET": settings.bucket,
    }
    run = partial(CliRunner().invoke, app, env=env)
    done = run(["reconcile", "--all", "--from-env"])
    assert (done.exit_code, done.stdout.splitlines()[-1].split(": ")[1]) == (0, "no difference.")
    PLACES["usage row"][0](world, batch_id)
    done = run(["reconcile", "--batch", batch_id, "--from-env"])
    assert done.exit_code == 1 and "off by +1" in done.stdout
    shown = orjson.loads(run(["reconcile", "--from-env", "--json"]).stdout)
    assert shown["is_equal"] is False and shown["num_differences"] == len(shown["differences"]) > 0
    assert run(["reconcile", "--batch", "batch_x", "--from-env"]).exit_code != 0


# ---- the reaper's sample


@on_sqlite
def test_the_reaper_adds_up_what_has_ended(world: World) -> None:
    batch_id, differs = ended_batch(world), ended_batch(world)
    change(world, "UPDATE batches SET cost_nanos = cost_nanos + 1 WHERE id = :batch", batch=differs)
    nothing = NullDispatcher()
    reaper = Reaper(
        world.settings,
        world.db,
        world.store,
        nothing,
        plan=lambda _: None,
        finalize=lambda _: None,
        quote=lambda _: None,
    )
    with capture_logs() as logs:
        reaper.reconcile()
        reaper.reconcile(3600)  # too soon after the last one
        with world.db.reading() as session:
            assert reconcile_sample_queries.counts(session)[0] == 1
        reaper.reconcile()
        reaper.reconcile()  # none is left
    errors = [entry for entry in logs if entry["event"] == "batch.differs"]
    assert {entry["batch"] for entry in errors} == {differs} and errors[0]["log_level"] == "error"
    checks = Checks(world.db, lambda: world.store, world.settings.redis_url)
    text_ = Metrics(world.db, world.settings, checks).text().decode()
    assert "batchsvc_batches_reconciled_total 2.0" in text_
    assert f"batchsvc_reconcile_differences {float(errors[0]['of'])}" in text_
    assert "batchsvc_unreconciled_nanos 1.0" in text_
    assert batch_id not in {entry["batch"] for entry in errors}


# ---- how it reads


def test_it_cannot_write(world: World) -> None:
    reader = Reader(world.settings.database_url)
    with reader.snapshot() as now, pytest.raises(DBAPIError):
        now.rows("DELETE FROM garbage RETURNING s3_key")
    reader.close()


@pytest.mark.parametrize(
    ("usage", "output"),
    [
        ({"prompt_tokens": 9, "prompt_tokens_details": {"cached_tokens": 4}, "completion_tokens": 3}, 3),
        ({"prompt_tokens": 9, "prompt_tokens_details": {"cached_tokens": 4}}, 0),
        ({"input_tokens": 9, "input_tokens_details": {"cached_tokens": 4}, "output_tokens": 3}, 3),
    ],
    ids=["chat", "embeddings", "responses"],
)
def test_usages_of_all_endpoints_are_read(usage: dict[str, Any], output: int) -> None:
    rates = {"input": 10**6, "cached_input": 10**5, "output": 10**7}
    costs = 5 + 10 * output  # and 4 tenths, rounded away
    body = {"usage": usage | {"total_tokens": 9 + output, "cost_nanos": costs}}
    line = orjson.dumps({"line": 7, "custom_id": "a", "response": {"body": body}})
    report, sums = Report(), Sums()
    assert add_output_line(report, "file", line, Prices(own=rates, standard=rates), sums) == 7
    assert not report.num_differences
    assert (sums.input_tokens, sums.cached_tokens, sums.output_tokens, sums.cost_nanos) == (9, 4, output, costs)


def test_it_shares_nothing_with_what_writes() -> None:
    """Of this project it imports its own files and the store, and so does whatever these import."""
    may = {"batchsvc.errors", "batchsvc.store.s3", "batchsvc.settings", "batchsvc.egress", "batchsvc.sealing"}
    may |= {"batchsvc.setting_errors", "batchsvc.setting_sources"}
    waiting, seen = ["batchsvc.batches.reconcile_run"], set()
    while waiting:
        name = waiting.pop()
        seen.add(name)
        for module in imports(name) - seen:
            assert module in may or module.startswith("batchsvc.batches.reconcile"), f"{name} imports {module}"
            waiting.append(module)
    assert len(seen) >= 8


def imports(name: str) -> set[str]:
    spec = importlib.util.find_spec(name)
    assert spec is not None and spec.origin is not None
    tree = ast.parse(Path(spec.origin).read_text(encoding="utf-8"))
    found = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    found |= {str(node.module) for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    return {module for module in found if module.split(".")[0] in ("batchsvc", "engine", "workers")}
