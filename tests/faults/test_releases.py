"""Row 71: what a release has left in mid-work is finished by this version, and its workers may still be at it.

The golden data directories (tests/golden) are what real processes of each release left when they were killed. Beside
that, a release's own code works on with this version's: taken out of the repository's history, it is started before the
upgrade and goes on after it.
"""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from sqlalchemy import text

from batchsvc.accounts import service as accounts
from batchsvc.batches import snapshot_queries
from batchsvc.batches.reconcile_run import Auditor
from batchsvc.batches.tables import Batch
from batchsvc.db import migrate
from batchsvc.db.session import Database
from batchsvc.files.tables import File
from batchsvc.settings import Settings
from batchsvc.stack.services import choose_ports
from batchsvc.store.s3 import ObjectStore
from tests.faults.cluster import FAULT_PERIODS, LIVENESS_S, MODEL, Cluster, Services, TinyModel, sha256
from tests.golden.load import Golden
from tests.receiver import Receiver, receiving

pytestmark = pytest.mark.faults
LOOPBACK = {"BATCHSVC_EGRESS_ALLOW": "127.0.0.0/8"}
ROOT = Path(__file__).parents[2]
FINISHED = ("running", "paused", "validating")
RELEASES = {golden.release: golden for golden in Golden.every()}


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    with receiving() as made:
        yield made


@pytest.fixture
def empty(request: pytest.FixtureRequest, services: Services, tmp_path: Path) -> Services:
    """Services whose database has no table yet; the fixtures of the cluster have migrated it."""
    if services.database_url.startswith("sqlite"):
        path = Path(services.database_url.removeprefix("sqlite:///"))
        for file in path.parent.glob(path.name + "*"):
            file.unlink()
    else:
        database = Database(services.database_url)
        with database.engine.begin() as connection:
            connection.execute(text("DROP SCHEMA public CASCADE"))
            connection.execute(text("CREATE SCHEMA public"))
        database.engine.dispose()
    return services


@pytest.mark.parametrize(
    ("release", "database_url"),
    [
        pytest.param(name, kind, marks=[pytest.mark.quick_faults] if kind == "sqlite" else [])
        for name in RELEASES
        for kind in ("sqlite", "postgresql")
    ],
    indirect=["database_url"],
)
def test_row_71_what_a_release_has_left_is_finished(
    release: str,
    empty: Services,
    request: pytest.FixtureRequest,
    receiver: Receiver,
    tmp_path: Path,
) -> None:
    golden = RELEASES[release]
    load(golden, empty, tmp_path)
    assert migrate.current(empty.database_url) == golden.revision
    upgrade(empty)
    cluster: Cluster = request.getfixturevalue("cluster")
    golden.adopt(cluster.db, model=cluster.model.path, digest=cluster.model.digest, receiver=receiver.url)
    with cluster.db.reading() as session:
        needed = list(snapshot_queries.named_keys(session))
        before = row(session, "SELECT * FROM invoices WHERE number = :number", number=golden.invoice)
    assert needed and all(cluster.store.head(key) for key in needed)
    with cluster.db.transaction() as session:
        _, key = accounts.create_key(session, golden.project_id, "golden")
    cluster.start("control", **LOOPBACK)
    cluster.start("engine")
    cluster.serve(**LOOPBACK)
    ids = {role: found["id"] for role, found in golden.batches.items()}
    assert cluster.call("POST", f"/v1/batches/{ids['paused']}/resume", json={}, key=key).status_code == 200
    for role in FINISHED:
        cluster.until(lambda role=role: cluster.batch(ids[role]).status == "completed", f"{role} is completed")
    for role, found in golden.batches.items():
        finished(cluster, found["id"], found["custom_ids"], errors=1 if role == "ended" else 0)
        got = cluster.call("GET", f"/v1/batches/{found['id']}", key=key).json()
        assert got["request_counts"]["total"] == len(found["custom_ids"])
    told = {received.unwrap(secret).data.id for received in receiver.wait_for(4) for secret in [secret_of(cluster)]}
    assert told == {ids[role] for role in ("ended", *FINISHED)}, "what waited is sent, and what has ended since"
    with cluster.db.reading() as session:
        assert row(session, "SELECT * FROM invoices WHERE number = :number", number=golden.invoice) == before
        assert row(session, "SELECT sum(amount_nanos) FROM ledger_entries") == (0,)
    assert audited(empty, cluster.store, batches=len(golden.batches)).invoices == 1


@pytest.fixture(scope="session")
def old_code(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The code of the newest release, out of the repository's history."""
    golden = RELEASES[max(RELEASES)]
    packed = subprocess.check_output(["git", "archive", golden.commit], cwd=ROOT)
    path = tmp_path_factory.mktemp("release")
    with tarfile.open(fileobj=io.BytesIO(packed)) as tar:
        tar.extractall(path, filter="data")
    return path


class Old:
    """Processes and commands of a release, on services."""

    def __init__(self, code: Path, services: Services, model: Path, directory: Path) -> None:
        self._directory = directory
        self._env = {
            **os.environ,
            **environment(services),
            **{name: str(value) for name, value in FAULT_PERIODS.items()},
            "BATCHSVC_MODEL": str(model),
            "PYTHONPATH": str(code),
        }
        self.processes: dict[str, subprocess.Popen[bytes]] = {}

    def command(self, *words: str) -> str:
        """What one of its commands prints."""
        main = [sys.executable, "-P", "-c", "from batchsvc.cli import main; main()"]
        done = subprocess.run([*main, *words], env=self._env, cwd=self._directory, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def start(self, role: str, **changes: object) -> subprocess.Popen[bytes]:
        module = ["batchsvc.app"] if role == "api" else ["workers", role]
        env = self._env | {name: str(value) for name, value in changes.items()}
        with (self._directory / f"old-{role}.log").open("ab") as log:
            process = subprocess.Popen(
                [sys.executable, "-P", "-m", *module], env=env, cwd=self._directory, stdout=log, stderr=log
            )
        self.processes[role] = process
        return process

    def close(self) -> None:
        for process in self.processes.values():
            process.kill()
            process.wait()
        for log in self._directory.glob("old-*.log"):
            print(f"--- {log.name}\n{log.read_text(errors='replace')[-2_000:]}")  # shown if the test fails


@pytest.fixture
def old(old_code: Path, empty: Services, tiny: TinyModel, tmp_path: Path) -> Iterator[Old]:
    made = Old(old_code, empty, tiny.path, tmp_path)
    yield made
    made.close()


@pytest.mark.parametrize("database_url", ["sqlite", "postgresql"], indirect=True)
def test_row_71_old_and_new_processes_work_on_one_batch(
    old: Old, empty: Services, tiny: TinyModel, request: pytest.FixtureRequest
) -> None:
    old.command("migrate")
    key = json.loads(old.command("keys", "create", "old", "--from-env", "--json"))["key"]
    old.command("models", "add", str(tiny.path), "--as", MODEL, "--from-env")
    port = choose_ports(("api",))["api"]
    client = Client(f"http://127.0.0.1:{port}", key)
    api = old.start("api", BATCHSVC_PORT=port)
    old.start("control")
    engine = old.start("engine", BATCHSVC_FAKE_TOKENS_PER_S=150)
    until(client.answers, "the old API answers")
    first = client.submit(lines(600))
    until(lambda: client.done(first) > 10, "the old worker works")
    upgrade(empty)
    seen = client.done(first)
    until(lambda: client.done(first) > seen + 5, "and goes on after the upgrade")
    cluster: Cluster = request.getfixturevalue("cluster")
    cluster.start("control")
    cluster.start("engine", BATCHSVC_FAKE_TOKENS_PER_S=150)
    cluster.serve()
    new = Client(cluster.url, key)
    second, third = client.submit(lines(60)), new.submit(lines(60))
    until(lambda: client.done(second) + client.done(third) > 10, "both versions work")
    engine.kill()  # the new one takes over what it held
    for batch_id in (first, second, third):
        until(lambda batch_id=batch_id: client.get(batch_id)["status"] == "completed", f"{batch_id} is completed")
        assert client.get(batch_id)["request_counts"] == new.get(batch_id)["request_counts"]
    assert api.poll() is None, "the old API serves to the end"
    for batch_id, count in ((first, 600), (second, 60), (third, 60)):
        finished(cluster, batch_id, [f"c{number}" for number in range(1, count + 1)], errors=0)
    audited(empty, cluster.store, batches=3)


class Client:
    """A user of an API, by a key of theirs."""

    def __init__(self, url: str, key: str) -> None:
        self.url = url
        self._headers = {"Authorization": f"Bearer {key}"}

    def answers(self) -> bool:
        try:
            return httpx.get(f"{self.url}/livez", trust_env=False).status_code == 200
        except httpx.HTTPError:
            return False

    def submit(self, lines: list[dict[str, Any]]) -> str:
        data = b"".join(json.dumps(line).encode() + b"\n" for line in lines)
        form = {"files": {"file": ("in.jsonl", data)}, "data": {"purpose": "batch"}}
        file_id = self._answer("POST", "/v1/files", **form)["id"]
        body = {"input_file_id": file_id, "endpoint": "/v1/chat/completions", "completion_window": "24h"}
        return str(self._answer("POST", "/v1/batches", json=body)["id"])

    def get(self, batch_id: str) -> dict[str, Any]:
        return self._answer("GET", f"/v1/batches/{batch_id}")

    def done(self, batch_id: str) -> int:
        counts = self.get(batch_id)["request_counts"]
        return int(counts["completed"] + counts["failed"])

    def _answer(self, method: str, path: str, **arguments: Any) -> dict[str, Any]:
        url = self.url + path
        answer = httpx.request(method, url, headers=self._headers, timeout=60, trust_env=False, **arguments)
        assert answer.status_code == 200, answer.text
        return dict(answer.json())


def lines(count: int) -> list[dict[str, Any]]:
    """Distinct deterministic requests c1, c2, ..."""
    return [
        {
            "custom_id": f"c{number}",
            "method": "POST",
            "url": "/v1/chat/completions",
            "body": {
                "model": MODEL,
                "messages": [{"role": "user", "content": f"Number {number}, please."}],
                "max_tokens": 8,
                "temperature": 0,
                "seed": number,
                "ignore_eos": True,
            },
        }
        for number in range(1, count + 1)
    ]


def until(condition: Callable[[], object], what: str) -> None:
    deadline = time.monotonic() + LIVENESS_S
    while not condition():
        assert time.monotonic() < deadline, f"not within {LIVENESS_S} s: {what}"
        time.sleep(0.05)


def audited(services: Services, store: ObjectStore, *, batches: int) -> Any:
    """The books agree, to the nano-dollar."""
    auditor = Auditor(services.database_url, store)
    report = auditor.everything()
    auditor.close()
    assert not report.num_differences, [str(difference) for difference in report.differences]
    assert report.batches == batches
    return report


def finished(cluster: Cluster, batch_id: str, custom_ids: list[str], *, errors: int) -> None:
    """Each line once, in input order, and the files are what their rows say."""
    with cluster.db.reading() as session:
        batch = session.get_one(Batch, batch_id)
        files = [session.get_one(File, file_id) for file_id in (batch.output_file_id, batch.error_file_id) if file_id]
    every: list[dict[str, Any]] = []
    for file in files:
        data = cluster.store.get(file.s3_key)
        assert (len(data), sha256(data)) == (file.size_bytes, file.sha256)
        found = [json.loads(line) for line in data.splitlines()]
        assert [line["line"] for line in found] == sorted(line["line"] for line in found)
        every += found
    assert sorted((line["line"], line["custom_id"]) for line in every) == list(enumerate(custom_ids, 1))
    assert (batch.total, batch.failed) == (len(custom_ids), errors)


def secret_of(cluster: Cluster) -> str:
    with cluster.db.reading() as session:
        return str(row(session, "SELECT secret FROM webhook_endpoints")[0])


def row(session: Any, sql: str, **values: Any) -> tuple[Any, ...]:
    return tuple(session.execute(text(sql), values).one())


def load(golden: Golden, services: Services, scratch: Path) -> None:
    """The golden directory in a cluster's database and bucket."""
    settings = Settings.from_env(environment(services))
    golden.load(services.database_url, ObjectStore(settings), scratch)


def upgrade(services: Services) -> None:
    """As an operator does it."""
    done = subprocess.run(
        [sys.executable, "-P", "-c", "from batchsvc.cli import main; main()", "db", "upgrade", "--from-env"],
        env={**os.environ, **environment(services)},
        capture_output=True,
        text=True,
        timeout=LIVENESS_S,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("The database went from ")


def environment(services: Services) -> dict[str, str]:
    return {
        "DATABASE_URL": services.database_url,
        "REDIS_URL": services.redis_url,
        "AWS_ENDPOINT_URL_S3": services.s3_endpoint,
        "AWS_ACCESS_KEY_ID": services.s3_access_key,
        "AWS_SECRET_ACCESS_KEY": services.s3_secret_key,
        "BATCHSVC_BUCKET": services.bucket,
    }
