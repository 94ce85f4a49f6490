"""Makes a golden data directory with the code at hand: `python -m tests.golden.make --release 0.1.0`.

Real processes work on real services and are killed in the middle; what they leave is packed into tests/data/golden:

    billed      a batch of last month, on an issued invoice
    ended       a batch that has ended, with an error line; its webhook waits for a receiver that doesn't answer
    running     a unit done, one leased and half done, at least one open
    paused      a batch that its project has paused
    validating  a batch that nobody has planned yet

and an upload of which one part has come, a top-up, and a quote. Deadlines and lives are moved to the year 2100.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import multiprocessing
import random
import sqlite3
import subprocess
import tarfile
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import zstandard
from sqlalchemy import text
from sqlalchemy.orm import Session

from batchsvc.billing import invoice_api, invoice_draft, invoice_service
from batchsvc.billing import service as billing
from batchsvc.billing.invoice_schemas import ChangeParty
from batchsvc.billing.month import Month
from batchsvc.clock import now_ms
from batchsvc.db import migrate
from engine.load.meta import read_meta
from tests import servers
from tests.faults.cluster import Cluster, Job, Services, TinyModel
from tests.faults.roles import PRELOAD
from tests.golden.load import ABOUT, DATABASE, OBJECTS, ROOT
from tests.tiny import make_tiny_model

YEAR_2100_MS = 4_102_444_800_000
SETTINGS = {
    "BATCHSVC_EGRESS_ALLOW": "127.0.0.0/8",
    "BATCHSVC_SELLER_NAME": "Golden Inference",
    "BATCHSVC_SELLER_ADDRESS": "2 Old Street;Dublin",
    "BATCHSVC_SELLER_COUNTRY": "IE",
    "BATCHSVC_SELLER_TAX_ID": "IE1",
}
NOBODY = "http://127.0.0.1:9/hook"  # where nothing listens
_BILLED_TABLES = ("usage", "parts", "ledger_transactions")
DAY_MS = 86_400_000


def main() -> None:
    """Make the directory of one release; the code at hand is the release."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--release", required=True, help="its version, such as 0.1.0")
    parser.add_argument("--out", type=Path, default=ROOT, help="where the directories are")
    chosen = parser.parse_args()
    folder = chosen.out / chosen.release
    folder.mkdir(parents=True)  # a release's is made once
    with tempfile.TemporaryDirectory(prefix="golden-") as scratch:
        about = make(Path(scratch), folder, chosen.release)
    (folder / ABOUT).write_text(json.dumps(about, indent=1) + "\n")
    size = sum(path.stat().st_size for path in folder.iterdir())
    print(f"{folder}: {size / 1024:.0f} KiB")


def make(scratch: Path, folder: Path, release: str) -> dict[str, Any]:
    """Work, be killed, pack. Returns what about.json says."""
    path = make_tiny_model(scratch / "tiny")
    meta = read_meta(path)
    tiny = TinyModel(path=path, digest=meta.digest, context_tokens=meta.context_tokens)
    url = f"sqlite:///{scratch / 'golden.sqlite3'}"
    migrate.upgrade(url)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    (scratch / "valkey").mkdir()
    (scratch / "s3").mkdir()
    with servers.start_valkey(scratch / "valkey") as redis_url, servers.start_s3(scratch / "s3") as s3:
        services = Services(
            database_url=url,
            redis_url=redis_url,
            s3_endpoint=s3.endpoint,
            s3_access_key=s3.access_key,
            s3_secret_key=s3.secret_key,
            bucket="golden",
        )
        cluster = Cluster(services, tiny, scratch, random.Random(0), context.Process, dict(SETTINGS))
        try:
            jobs, invoice = _work(cluster)
            batches = {role: {"id": job.id, "custom_ids": _custom_ids(job)} for role, job in jobs.items()}
            _outlive(cluster)
            _pack_objects(cluster, folder / OBJECTS)
            project_id = cluster.project_id
        finally:
            cluster.close()
    _pack_database(scratch / "golden.sqlite3", folder / DATABASE)
    return {
        "release": release,
        "revision": migrate.current(url),
        "commit": subprocess.check_output(["git", "rev-parse", "HEAD"], text=True).strip(),
        "project_id": project_id,
        "model_digest": tiny.digest,
        "invoice": invoice,
        "batches": batches,
    }


def _work(cluster: Cluster) -> tuple[dict[str, Job], str]:
    cluster.serve()
    hook = {"name": "hook", "url": NOBODY, "event_types": ["batch.completed"]}
    control = cluster.start("control")
    engine = cluster.start("engine")
    billed = cluster.submit(10)
    cluster.wait(billed, "completed")
    invoice = _bill_last_month(cluster, billed)
    assert cluster.call("POST", "/v1/webhook_endpoints", json=hook).status_code == 200
    lines = cluster.lines(12)
    lines[4]["body"]["temperature"] = 99  # costs this line alone
    ended = cluster.submit(12, lines=lines)
    cluster.wait(ended, "completed")
    cluster.until(lambda: _rows(cluster, "SELECT 1 FROM webhook_deliveries WHERE attempts <> '[]'"), "it was tried")
    engine.kill()
    paused = cluster.submit(12)
    cluster.wait(paused, "in_progress")
    assert cluster.call("POST", f"/v1/batches/{paused.id}/pause", json={}).status_code == 200
    slow = cluster.start("engine", BATCHSVC_FAKE_TOKENS_PER_S=150, BATCHSVC_MAX_RUNNING=4)
    running = cluster.submit(140)
    cluster.until(lambda: _is_half_done(cluster, running), "some of it is done, some leased, some open")
    slow.kill()
    control.kill()
    validating = cluster.submit(12)
    quoted = cluster.upload(cluster.lines(5))
    quote = {"input_file_id": quoted, "endpoint": "/v1/chat/completions"}
    assert cluster.call("POST", "/v1/batches/quote", json=quote).status_code == 200
    upload = {"filename": "in.jsonl", "purpose": "batch", "bytes": 2_000, "mime_type": "application/jsonl"}
    begun = cluster.call("POST", "/v1/uploads", json=upload)
    assert begun.status_code == 200, begun.text
    part = {"data": ("part", b"x" * 1_000)}
    assert cluster.call("POST", f"/v1/uploads/{begun.json()['id']}/parts", files=part).status_code == 200
    with cluster.db.transaction() as session:
        billing.post_topup(session, cluster.project_id, 5_000_000_000, reason="golden", key="golden")
    for watch in cluster.watches.values():
        watch.stop()
    for process in cluster.alive():
        process.kill()
    jobs = {"billed": billed, "ended": ended, "running": running, "paused": paused, "validating": validating}
    statuses = {role: cluster.batch(job).status for role, job in jobs.items()}
    assert statuses == {
        "billed": "completed",
        "ended": "completed",
        "running": "in_progress",
        "paused": "in_progress",
        "validating": "validating",
    }
    return jobs, invoice


def _is_half_done(cluster: Cluster, job: Job) -> bool:
    units = cluster.units(job)
    states = {unit.state for unit in units}
    return {"done", "leased", "ready"} <= states and any(
        unit.state == "leased" and 0 < unit.num_done < unit.num_lines for unit in units
    )


def _bill_last_month(cluster: Cluster, job: Job) -> str:
    """Move what there is into last month, as if time had passed, and issue its invoice. Returns the number."""
    month = Month.of(now_ms() - 32 * DAY_MS)
    at, hour = month.end_ms - 1, (month.end_ms - 1) // 3_600_000 * 3_600_000
    with cluster.db.transaction() as session, _without_triggers(session):
        for table in _BILLED_TABLES:
            session.execute(text(f"UPDATE {table} SET created_ms = :at WHERE batch_id = :id"), {"at": at, "id": job.id})
        session.execute(text("UPDATE usage_hours SET hour_ms = :hour"), {"hour": hour})
        session.execute(text("UPDATE balances SET month = :no"), {"no": month.year * 12 + month.month - 1})
    with cluster.db.transaction() as session:
        buyer = ChangeParty(name="Golden Ltd", address="1 Old Street", country="FR", tax_id="FR1")
        invoice_api.change_party(session, cluster.project_id, buyer)
    with cluster.db.transaction() as session:
        drafted = invoice_draft.draft(session, cluster.settings, cluster.project_id, month)
    issued = cluster.db.run(lambda session: invoice_service.issue(session, drafted.id))
    assert issued.number and issued.net_nanos > 0
    return issued.number


@contextlib.contextmanager
def _without_triggers(session: Session) -> Iterator[None]:
    """The ledger is append-only: its triggers are put aside to change when something was."""
    found = session.execute(text("SELECT name, sql FROM sqlite_master WHERE type = 'trigger'")).all()
    for name, _ in found:
        session.execute(text(f"DROP TRIGGER {name}"))
    yield
    for _, sql in found:
        session.connection().exec_driver_sql(sql)


def _outlive(cluster: Cluster) -> None:
    """No deadline passes and no file expires before a test looks."""
    later = {"later": YEAR_2100_MS}
    with cluster.db.transaction() as session:
        unended = "status NOT IN ('completed', 'failed', 'cancelled', 'expired')"
        session.execute(text(f"UPDATE batches SET expires_ms = :later WHERE {unended}"), later)
        session.execute(text("UPDATE files SET expires_ms = :later WHERE expires_ms IS NOT NULL"), later)
        session.execute(text("UPDATE uploads SET expires_ms = :later"), later)


def _pack_database(path: Path, target: Path) -> None:
    connection = sqlite3.connect(path, isolation_level=None)
    connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    connection.execute("PRAGMA journal_mode=DELETE")
    connection.execute("VACUUM")
    assert connection.execute("PRAGMA integrity_check").fetchone() == ("ok",)
    connection.close()
    target.write_bytes(zstandard.ZstdCompressor(level=19).compress(path.read_bytes()))


def _pack_objects(cluster: Cluster, target: Path) -> None:
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as tar:
        for prefix in ("batch/", "in/", "up/"):
            for key, _ in sorted(cluster.store.list_keys(prefix)):
                data = cluster.store.get(key)
                member = tarfile.TarInfo(key)
                member.size = len(data)
                tar.addfile(member, io.BytesIO(data))
    target.write_bytes(zstandard.ZstdCompressor(level=19).compress(packed.getvalue()))


def _custom_ids(job: Job) -> list[str]:
    return [str(line["custom_id"]) for line in job.lines]


def _rows(cluster: Cluster, sql: str) -> list[Any]:
    with cluster.db.reading() as session:
        return list(session.execute(text(sql)).all())


if __name__ == "__main__":
    main()
