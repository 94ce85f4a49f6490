"""A cluster for fault tests: the processes of a deployment, forked and tormented by pid, and a client beside them."""

from __future__ import annotations

import contextlib
import hashlib
import os
import random
import secrets
import signal
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any, Literal

import httpx
import orjson
import redis
from sqlalchemy import event, func, select

from batchsvc.accounts import service as accounts
from batchsvc.batches import models, part_file
from batchsvc.batches.tables import Batch, Part, Unit, Worker
from batchsvc.billing import service as billing
from batchsvc.db.session import Database, database_now_ms
from batchsvc.settings import Settings
from batchsvc.stack.services import choose_ports
from batchsvc.store.s3 import ObjectStore
from tests.faults.roles import run_role
from tests.faults.watch import Watch
from tests.servers import SECRET_KEY

Role = Literal["api", "control", "engine"]
LIVENESS_S = 120.0
MODEL = "tiny"
_LOG_TAIL = 3_000
_DULL = {"s3_key", "sha256", "rates", "aliases", "project_id", "api_key_id", "model_digest", "tier", "endpoint"}
FAULT_PERIODS = {
    "BATCHSVC_LEASE_S": 3,
    "BATCHSVC_RENEW_S": 0.5,
    "BATCHSVC_REAPER_S": 0.5,
    "BATCHSVC_POLL_S": 0.3,
    "BATCHSVC_FLUSH_S": 0.3,
    "BATCHSVC_TERM_GRACE_S": 9,
    "BATCHSVC_ENGINE": "fake",
    "BATCHSVC_FAKE_TOKENS_PER_S": 1_000,
    "BATCHSVC_MAX_RUNNING": 8,
    "BATCHSVC_WAITING_REQUESTS": 24,
    "BATCHSVC_UNIT_LINES": 20,
}


@dataclass(frozen=True, kw_only=True)
class Services:
    """Where the three data services are."""

    database_url: str
    redis_url: str
    s3_endpoint: str
    s3_access_key: str
    s3_secret_key: str
    bucket: str


@dataclass(frozen=True, kw_only=True)
class TinyModel:
    """A model that the fake engine serves."""

    path: Path
    digest: str
    context_tokens: int


@dataclass(frozen=True, eq=False)
class Job:
    """A batch, and the lines that were sent for it."""

    id: str
    lines: list[dict[str, Any]]
    canary: str  # stands in every prompt and must never stand in a log


class Process:
    """One process of a cluster. `name` is also its log's."""

    def __init__(self, name: str, role: Role, process: ForkServerProcess, log: Path, url: str = "") -> None:
        self.name, self.role, self.log = name, role, log
        self._process, self._url = process, url

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    @property
    def is_alive(self) -> bool:
        return self._process.is_alive()

    @property
    def code(self) -> int | None:
        """Exit code, negative for a signal; None while it lives."""
        return self._process.exitcode

    def send(self, number: signal.Signals) -> None:
        if self.is_alive:
            os.kill(self.pid, number)

    def kill(self) -> None:
        """-9, and wait until it is gone."""
        self.send(signal.SIGKILL)
        self._process.join(30)
        assert not self.is_alive, f"{self.name} outlived kill -9"

    def stop(self) -> None:
        """SIGSTOP, and wait until all of its threads stand still. See also `Cluster.stop`."""
        self.send(signal.SIGSTOP)
        deadline = time.monotonic() + LIVENESS_S
        while self.is_alive and self._thread_states() != {"T"}:
            assert time.monotonic() < deadline, f"{self.name} doesn't stop"
            time.sleep(0.001)

    def _thread_states(self) -> set[str]:
        states = set()
        for stat in Path(f"/proc/{self.pid}/task").glob("*/stat"):
            with contextlib.suppress(OSError):  # a thread that ends just now
                states.add(stat.read_text().rpartition(")")[2].split()[0])
        return states

    def resume(self) -> None:
        self.send(signal.SIGCONT)

    def term(self) -> None:
        self.send(signal.SIGTERM)

    def wait(self, timeout_s: float = LIVENESS_S) -> int:
        """The exit code, once it has ended."""
        self._process.join(timeout_s)
        assert self.code is not None, f"{self.name} still runs after {timeout_s} s"
        return self.code

    def died(self) -> None:
        """Waits until it is gone by kill -9, its own failpoint's or ours."""
        assert self.wait() == -signal.SIGKILL, f"{self.name} ended with {self.code}, not by kill -9"

    @property
    def signals(self) -> str:
        """Where it serves /livez, /readyz and /metrics; empty: it doesn't yet."""
        told = (line for line in self.text().splitlines() if '"signals.listening"' in line)
        return self._url or next((str(orjson.loads(line)["url"]) for line in told), "")

    def text(self) -> str:
        return self.log.read_text(errors="replace") if self.log.exists() else ""


@dataclass(eq=False)
class Cluster:
    """See tests/faults/__init__.py."""

    services: Services
    model: TinyModel
    directory: Path
    rng: random.Random
    spawn: Callable[..., ForkServerProcess]
    settings_env: dict[str, Any] = field(default_factory=dict)
    processes: list[Process] = field(default_factory=list)
    jobs: list[Job] = field(default_factory=list)
    secrets: list[str] = field(default_factory=list)
    watches: dict[str, Watch] = field(default_factory=dict)
    judged: set[str] = field(default_factory=set)
    url: str = ""

    def __post_init__(self) -> None:
        self.env = self._environment()
        self.settings = Settings.from_env(self.env)
        self.db, self.store = Database(self.settings.database_url), ObjectStore(self.settings)
        if not self.db.is_sqlite:
            event.listen(self.db.engine, "connect", _be_patient)
        self.store.ensure_bucket()
        self.witness = Path(self.env["BATCHSVC_FAKE_WITNESS"])
        self.project_id, self.key = self.add_project("tests")
        self.secrets += [self.services.s3_secret_key, self.redis_password]
        registration = {"path": str(self.model.path), "digest": self.model.digest}
        context_tokens = self.model.context_tokens
        with self.db.transaction() as session:
            billing.seed_prices(session)
            models.register(session, MODEL, **registration, context_tokens=context_tokens)
        self.http = httpx.Client(timeout=60, trust_env=False)

    def with_services(self, **changes: str) -> Cluster:
        """Another cluster like this one, fresh, on other services; the caller closes it."""
        directory = self.directory / secrets.token_hex(3)
        directory.mkdir()
        return Cluster(
            replace(self.services, **changes), self.model, directory, self.rng, self.spawn, dict(self.settings_env)
        )

    # ---- processes

    def start(self, role: Role, *, failpoints: str = "", **changes: Any) -> Process:
        """A new process. It may not be ready yet; whoever needs that waits for what it does."""
        env = self.env | {name: str(value) for name, value in changes.items()}
        if failpoints:
            env["BATCHSVC_FAILPOINTS"] = failpoints
        if role == "api":
            port = choose_ports(("api",))["api"]
            env["BATCHSVC_PORT"], self.url = str(port), f"http://127.0.0.1:{port}"
        name = f"{role}-{sum(process.role == role for process in self.processes) + 1}"
        log = self.directory / f"{name}.log"
        child = self.spawn(target=run_role, args=(role, env, str(log), str(self.directory)), daemon=True)
        child.start()
        process = Process(name, role, child, log, self.url if role == "api" else "")
        self.processes.append(process)
        return process

    def serve(self, **arguments: Any) -> Process:
        """An API process that answers."""
        process = self.start("api", **arguments)
        self.until(lambda: not process.is_alive or self._answers(), "the API answers")
        assert process.is_alive, process.text()[-_LOG_TAIL:]
        return process

    def stop(self, process: Process) -> None:
        """Stop a process at a moment when it doesn't write: SQLite would wait for it as long as it stands still."""
        with self.db.transaction() as session:
            database_now_ms(session)  # whoever begins to write is alone in this
            process.stop()

    def alive(self, role: Role | None = None) -> list[Process]:
        return [process for process in self.processes if process.is_alive and role in (None, process.role)]

    def close(self) -> None:
        """End what still runs. Nobody is asked nicely: a test of a nice end says so itself."""
        for watch in self.watches.values():
            watch.stop()
        for process in self.alive():
            process.kill()
        self.http.close()
        self.db.dispose()

    def show_logs(self) -> None:
        """Prints what a failed test left: batches, units and the ends of the logs."""
        for job in self.jobs:
            with self.db.reading() as session:
                for table, which in ((Batch, Batch.id == job.id), (Unit, Unit.batch_id == job.id)):
                    for row in session.execute(select(table.__table__).where(which)).mappings():
                        print({name: value for name, value in row.items() if value and name not in _DULL})
        for process in self.processes:
            said = "".join(line for line in process.text().splitlines(True) if "request.served" not in line)
            print(f"--- {process.name} (pid {process.pid}, code {process.code})\n{said[-_LOG_TAIL:]}")

    def passed(self, failpoint: str) -> int:
        """How often an armed failpoint acted, in all processes."""
        log = Path(self.env["BATCHSVC_FAILPOINTS_LOG"])
        notes = log.read_text().splitlines() if log.exists() else []
        return sum(note.split()[1] == failpoint for note in notes)

    # ---- the client

    def add_project(self, name: str) -> tuple[str, str]:
        """A tenant and its key."""
        with self.db.transaction() as session:
            project = accounts.create_project(session, name)
            _, key = accounts.create_key(session, project.id, "test")
        self.secrets.append(key)
        return project.id, key

    def call(self, method: str, path: str, *, key: str | None = None, **arguments: Any) -> httpx.Response:
        """One call of the API; starts an API process if there is none."""
        if not self.url:
            self.serve()
        headers = {"Authorization": f"Bearer {key or self.key}", **arguments.pop("headers", {})}
        return self.http.request(method, self.url + path, headers=headers, **arguments)

    def lines(self, count: int, *, max_tokens: int = 8, canary: str = "", **body: Any) -> list[dict[str, Any]]:
        """Distinct deterministic chat requests c1, c2, ..."""
        return [
            {
                "custom_id": f"c{number}",
                "method": "POST",
                "url": "/v1/chat/completions",
                "body": {
                    "model": MODEL,
                    "messages": [{"role": "user", "content": f"{canary} {number}".strip()}],
                    "max_tokens": max_tokens,
                    "temperature": 0,
                    "seed": number,
                    "ignore_eos": True,
                    **body,
                },
            }
            for number in range(1, count + 1)
        ]

    def upload(self, lines: Iterable[dict[str, Any]], *, key: str | None = None) -> str:
        """The id of a new input file."""
        data = b"\n".join(orjson.dumps(line) for line in lines) + b"\n"
        form = {"files": {"file": ("in.jsonl", data)}, "data": {"purpose": "batch"}}
        answer = self.call("POST", "/v1/files", key=key, **form)
        assert answer.status_code == 200, answer.text
        return str(answer.json()["id"])

    def create(
        self, file_id: str, *, key: str | None = None, headers: dict[str, str] | None = None, **body: Any
    ) -> httpx.Response:
        """The raw answer to a create call."""
        full = {"input_file_id": file_id, "endpoint": "/v1/chat/completions", "completion_window": "24h", **body}
        return self.call("POST", "/v1/batches", key=key, headers=headers or {}, json=full)

    def submit(self, count: int, *, max_tokens: int = 8, lines: list[dict[str, Any]] | None = None, **body: Any) -> Job:
        """Upload and create; from now on a client watches the batch."""
        canary = "canary" + secrets.token_hex(6)
        lines = lines or self.lines(count, max_tokens=max_tokens, canary=canary)
        answer = self.create(self.upload(lines), **body)
        assert answer.status_code == 200, answer.text
        return self.adopt(answer.json()["id"], lines, canary)

    def adopt(self, batch_id: str, lines: list[dict[str, Any]], canary: str = "") -> Job:
        """A batch that was created by other means; from now on a client watches it."""
        job = Job(batch_id, lines, canary)
        self.jobs.append(job)
        self.watches[batch_id] = Watch(lambda: self.url, self.key, batch_id)
        return job

    def get(self, job: Job | str) -> dict[str, Any]:
        """The batch as the API shows it."""
        answer = self.call("GET", f"/v1/batches/{job if isinstance(job, str) else job.id}")
        assert answer.status_code == 200, answer.text
        return dict(answer.json())

    def cancel(self, job: Job) -> httpx.Response:
        return self.call("POST", f"/v1/batches/{job.id}/cancel")

    # ---- what there is to see

    def batch(self, job: Job | str) -> Batch:
        with self.db.reading() as session:
            return session.get_one(Batch, job if isinstance(job, str) else job.id)

    def units(self, job: Job) -> list[Unit]:
        with self.db.reading() as session:
            return list(session.scalars(select(Unit).where(Unit.batch_id == job.id).order_by(Unit.no, Unit.id)))

    def parts(self, job: Job) -> list[Part]:
        with self.db.reading() as session:
            return list(session.scalars(select(Part).where(Part.batch_id == job.id).order_by(Part.created_ms)))

    def counted_lines(self, job: Job) -> set[int]:
        """Numbers of the lines that count so far: what stands in the objects of the registered parts."""
        parts = (part_file.decode(self.store.get(part.s3_key)) for part in self.parts(job))
        return {line.line_no for part in parts for line in part}

    def objects(self, job: Job, kind: str) -> set[str]:
        """Keys of a batch's stored objects: unit, part, window or out."""
        return {key for key, _ in self.store.list_keys(f"batch/{job.id}/{kind}/")}

    def num_done(self, job: Job) -> int:
        """Lines that count so far."""
        batch = self.batch(job)
        return batch.completed + batch.failed

    def holds(self, process: Process, job: Job | None = None) -> list[Unit]:
        """The units that a worker has leased."""
        mine = (Unit.state == "leased", Unit.owner.contains(f":{process.pid}:"))
        with self.db.reading() as session:
            units = session.scalars(select(Unit).where(*mine))
            return [unit for unit in units if job is None or unit.batch_id == job.id]

    def silence_s(self) -> float:
        """How long ago the last heartbeat of the most silent worker was, by the database's clock."""
        with self.db.reading() as session:
            oldest = session.scalar(select(func.min(Worker.beat_ms)))
            return (database_now_ms(session) - int(oldest or 0)) / 1000

    def change_batch(self, job: Job, *, unless_ended: bool = False, **values: Any) -> None:
        """Set columns of the row, as an operator's hand or a clock would."""
        with self.db.transaction() as session:
            row = session.get_one(Batch, job.id, with_for_update=True)
            if unless_ended and row.ended_ms is not None:
                return
            for name, value in values.items():
                setattr(row, name, value)

    # ---- waiting

    def until(self, condition: Callable[[], object], what: str, timeout_s: float = LIVENESS_S) -> None:
        deadline = time.monotonic() + timeout_s
        while not condition():
            assert time.monotonic() < deadline, f"not within {timeout_s} s: {what}"
            time.sleep(0.02)

    def wait(self, job: Job, *statuses: str, timeout_s: float = LIVENESS_S) -> str:
        """Waits until the batch has one of these statuses, and returns it."""
        self.until(lambda: self.batch(job).status in statuses, f"{job.id} is {' or '.join(statuses)}", timeout_s)
        return str(self.batch(job).status)

    # ---- Redis

    @property
    def redis_password(self) -> str:
        return self.services.redis_url.partition("://:")[2].partition("@")[0]

    def wipe_redis(self) -> None:
        with redis.Redis.from_url(self.services.redis_url) as client:
            client.flushall()

    def _answers(self) -> bool:
        try:
            return self.http.get(f"{self.url}/livez").status_code == 200
        except httpx.HTTPError:
            return False

    def _environment(self) -> dict[str, str]:
        base = {name: value for name, value in os.environ.items() if not name.startswith(("BATCHSVC_", "AWS_"))}
        ours = {
            "DATABASE_URL": self.services.database_url,
            "REDIS_URL": self.services.redis_url,
            "AWS_ENDPOINT_URL_S3": self.services.s3_endpoint,
            "AWS_ACCESS_KEY_ID": self.services.s3_access_key,
            "AWS_SECRET_ACCESS_KEY": self.services.s3_secret_key,
            "BATCHSVC_SECRET_KEY": SECRET_KEY,
            "BATCHSVC_BUCKET": self.services.bucket,
            "BATCHSVC_MODEL": self.model.path,
            "BATCHSVC_FAKE_WITNESS": self.directory / "witness.jsonl",
            "BATCHSVC_FAILPOINTS_LOG": self.directory / "failpoints.log",
            **FAULT_PERIODS,
            **self.settings_env,
        }
        return base | {name: str(value) for name, value in ours.items()}


def _be_patient(connection: Any, _record: object) -> None:
    """The test looks on from a busy machine: its own transactions may be slow."""
    connection.execute("SET idle_in_transaction_session_timeout = 0")
    connection.commit()


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
