"""A secret never appears in logs, process lists, traces, metrics, error files or answers, whatever goes wrong.

A deployment of real processes in which every secret is a canary: main paths, then each part refused, wrong or gone, and
at the end a search of all that anybody could have read meanwhile.
"""

from __future__ import annotations

import os
import secrets
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import boto3
import httpx
import psutil
import pytest
import redis
from botocore.config import Config

from batchsvc import cli as command_line
from batchsvc.db.session import Database
from batchsvc.settings import Settings
from batchsvc.stack.services import choose_ports
from tests import servers
from tests.e2e.conftest import BATCHSVC, FAST_SETTINGS, LIVENESS_S, CommandLine, line, read_lines, wait_for, write_lines
from tests.faults.own_valkey import OwnValkey
from tests.otlp import Collector, collecting

NOWHERE = "http://127.0.0.1:9"
SECRETS = ("AWS_SECRET_ACCESS_KEY", "BATCHSVC_SECRET_KEY", "BATCHSVC_SPLIT_KEY")


@dataclass
class Watched:
    """A deployment, its secrets by name, and what could be read of it so far."""

    url: str
    env: dict[str, str]
    secrets: dict[str, str]
    folder: Path
    read: dict[str, str] = field(default_factory=dict)
    running: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def note(self, where: str, said: str) -> None:
        self.read[f"{len(self.read)} {where}"] = said

    def call(self, method: str, path: str, key: str, **arguments: Any) -> httpx.Response:
        """A call whose answer must not hold a secret."""
        answer = self.bare(method, path, key, **arguments)
        self.note(f"{method} {path}", f"{answer.headers}\n{answer.text}")
        return answer

    def bare(self, method: str, path: str, key: str, **arguments: Any) -> httpx.Response:
        """A call whose answer is the one that shows a new secret."""
        headers = {"Authorization": f"Bearer {key}"}
        return httpx.request(method, self.url + path, headers=headers, timeout=60, trust_env=False, **arguments)

    def look_at_processes(self) -> None:
        """What `ps` shows to every user of the machine: names and arguments, not environments."""
        me = psutil.Process()
        for process in [me, *me.children(recursive=True)]:
            try:
                self.note(f"ps {process.pid}", " ".join([process.name(), *process.cmdline()]))
            except psutil.Error:  # it ended meanwhile
                continue

    def start(self, *arguments: str, **changes: str) -> subprocess.Popen[bytes]:
        with (self.folder / f"{'-'.join(arguments)}-{len(self.running)}.log").open("wb") as log:
            process = subprocess.Popen([*BATCHSVC, *arguments], env=self.env | changes, stdout=log, stderr=log)
        self.running.append(process)
        return process

    def end(self) -> None:
        for process in self.running:
            process.terminate()
        for process in self.running:
            process.wait(LIVENESS_S)

    def judge(self) -> None:
        """Every secret is in nothing that was read."""
        for log in self.folder.rglob("*.log"):
            self.note(str(log), log.read_text(errors="replace"))
        found = {
            (name, where)
            for name, secret in self.secrets.items()
            for where, said in self.read.items()
            if secret in said
        }
        assert not found
        assert len(self.read) > len(self.secrets), "there was something to read"


@contextmanager
def watched(
    folder: Path, postgres_url: str, s3: servers.S3Server, valkey: OwnValkey, model: str, traces: Collector
) -> Iterator[Watched]:
    port = choose_ports(("api",))["api"]
    database_password = "canary-database-" + secrets.token_hex(8)
    with servers.fresh_database(postgres_url) as url:
        scheme, _, rest = url.partition("://")
        user, _, where = rest.partition("@")
        env = {name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ} | {
            **FAST_SETTINGS,
            "DATABASE_URL": f"{scheme}://{user.partition(':')[0]}:{database_password}@{where}",
            "REDIS_URL": valkey.url,
            "AWS_ENDPOINT_URL_S3": s3.endpoint,
            "AWS_ACCESS_KEY_ID": s3.access_key,
            "AWS_SECRET_ACCESS_KEY": s3.secret_key,
            "BATCHSVC_SECRET_KEY": "canary-sealing-" + secrets.token_hex(20),
            "BATCHSVC_SPLIT_KEY": "canary-split-" + secrets.token_hex(20),
            "BATCHSVC_BUCKET": "t" + secrets.token_hex(8),
            "BATCHSVC_MODEL": model,
            "BATCHSVC_PORT": str(port),
            "BATCHSVC_LOG_LEVEL": "debug",
            "XDG_STATE_HOME": str(folder / "state"),
            "OTEL_EXPORTER_OTLP_ENDPOINT": traces.url,
        }
        known = {
            "DATABASE_URL": database_password,
            "REDIS_URL": valkey.url.partition("://:")[2].partition("@")[0],
            "AWS_SECRET_ACCESS_KEY": s3.secret_key,
            "BATCHSVC_SECRET_KEY": env["BATCHSVC_SECRET_KEY"],
            "BATCHSVC_SPLIT_KEY": env["BATCHSVC_SPLIT_KEY"],
        }
        made = Watched(f"http://127.0.0.1:{port}", env, known, folder)
        try:
            yield made
        finally:
            made.end()


def test_wrong_settings_and_crashes_of_commands_tell_no_secret(
    cli: CommandLine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The part of the test below that needs no deployment."""
    known = {name: f"canary-{secrets.token_hex(20)}" for name in ("DATABASE_URL", "REDIS_URL", *SECRETS)}
    env = {
        "DATABASE_URL": f"postgresql://u:{known['DATABASE_URL']}@127.0.0.1:9/x",
        "REDIS_URL": f"redis://:{known['REDIS_URL']}@127.0.0.1:9/0",
        "AWS_ENDPOINT_URL_S3": NOWHERE,
        "AWS_ACCESS_KEY_ID": "AKCANARY",
        **{name: known[name] for name in SECRETS},
        "XDG_STATE_HOME": str(tmp_path / "state"),
    }
    there = Watched("", env, known, tmp_path)
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    _wrong_settings(there, cli, monkeypatch)
    _crashes_of_commands(there)
    there.judge()


@pytest.mark.slow
def test_no_secret_appears_anywhere(
    cli: CommandLine,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    postgres_url: str,
    s3_server: servers.S3Server,
    tiny_model: str,
) -> None:
    valkey = OwnValkey(tmp_path)
    valkey.start()
    try:
        with collecting() as traces, watched(tmp_path, postgres_url, s3_server, valkey, tiny_model, traces) as there:
            for name, value in there.env.items():
                monkeypatch.setenv(name, value)
            _bring_up(there, cli, tiny_model)
            _main_paths(there, cli, tmp_path)
            _refusals(there, cli)
            _parts_gone(there, valkey)
            _wrong_settings(there, cli, monkeypatch)
            _starts_that_fail(there)
            _crashes_of_commands(there)
            there.look_at_processes()
            there.end()
            assert any("request.served" in log.read_text(errors="replace") for log in tmp_path.rglob("*.log"))
            there.note("traces", "".join(body.decode("latin-1") for body in traces.bodies))
            assert traces.spans, "there was something to trace"
            there.judge()
    finally:
        valkey.kill()


def _bring_up(there: Watched, cli: CommandLine, model: str) -> None:
    assert cli("migrate").code == 0
    for name, flags in (("key", ()), ("admin key", ("--admin",))):
        there.secrets[name] = cli("keys", "create", name, "--from-env", *flags).out.strip()
    assert cli("models", "add", model, "--as", "tiny", "--from-env").code == 0
    for role in ("api", "control", "engine"):
        there.start("serve", role)
    wait_for(lambda: _is_ready(there), "the API ready")


def _main_paths(there: Watched, cli: CommandLine, folder: Path) -> None:
    key, admin = there.secrets["key"], there.secrets["admin key"]
    there.secrets["store's secret"] = "canary-store-" + secrets.token_hex(8)
    store = {"project": "default", "uri": "s3://tenants/in/", "endpoint": "http://127.0.0.1:9", "region": "us-east-1"}
    body = {**store, "access_key": "AKTENANT", "secret_key": there.secrets["store's secret"]}
    assert there.call("POST", "/v1/admin/stores", admin, json=body).status_code == 200
    hook = {"name": "night", "url": f"{NOWHERE}/hook", "event_types": ["batch.completed"]}
    made = there.bare("POST", "/v1/webhook_endpoints", key, json=hook)
    assert made.status_code == 200, made.text
    there.secrets["webhook's secret"] = made.json()["signing_secret"]
    rotated = there.bare("POST", f"/v1/admin/keys/{key[3:11]}/rotate", admin, json={})
    there.secrets["rotated key"] = rotated.json()["key"]
    monkey = ("--url", f"{there.url}/v1")
    source = write_lines(folder / "in.jsonl", [line(1, "tiny"), line(2, "tiny"), line(3, "tiny", n="many")])
    ran = cli("run", source, "-o", folder / "out.jsonl", *monkey, "--api-key", key)
    assert ran.code == 3, ran.err
    there.note("batchsvc run", ran.out + ran.err)
    there.note("output", str(read_lines(folder / "out.jsonl")))
    for path in ("/v1/files", "/v1/batches", "/v1/models", "/v1/webhook_endpoints", "/openapi.json"):
        assert there.call("GET", path, key).status_code == 200
    for batch in there.call("GET", "/v1/batches", key).json()["data"]:
        there.call("GET", f"/v1/files/{batch['error_file_id']}/content", key)
    for path in ("/v1/admin/keys", "/v1/admin/stores", "/v1/admin/workers", "/v1/organization/audit_logs"):
        assert there.call("GET", path, admin).status_code == 200
    for path in ("/metrics", "/readyz", "/livez"):
        assert there.call("GET", path, key).status_code == 200
    for command in ("config show", "audit --from-env", "keys list --from-env", "admin stores list --from-env"):
        said = cli(*command.split())
        assert said.code == 0, said.err
        there.note(command, said.out + said.err)
    there.look_at_processes()


def _refusals(there: Watched, cli: CommandLine) -> None:
    key, admin = there.secrets["key"], there.secrets["admin key"]
    for wrong in (key[:-1] + ("0" if key[-1] != "0" else "1"), key.upper(), "Basic " + key):
        assert there.call("GET", "/v1/models", wrong).status_code == 401
    assert there.call("GET", "/v1/admin/keys", key).status_code == 403
    for said in ({"api_key": key}, [key], {"input_file_id": key}):
        assert there.call("POST", "/v1/batches", key, json=said).status_code in (400, 404)
    assert there.call("POST", "/v1/batches", key, content=f'{{"a": "{key}').status_code == 400
    body = {"project": "default", "uri": "s3://x/", "endpoint": 5, "secret_key": there.secrets["store's secret"]}
    assert there.call("POST", "/v1/admin/stores", admin, json=body).status_code == 400
    batch = {"input_file_id": "s3://tenants/in/x.jsonl", "endpoint": "/v1/chat/completions", "completion_window": "24h"}
    assert there.call("POST", "/v1/batches", key, json=batch).status_code >= 400, "its store isn't there"
    for command in (
        ("list", "--url", f"{NOWHERE}/v1", "--api-key", key),
        ("show", "batch_none", "--url", there.url + "/v1", "--api-key", key),
    ):
        refused = cli(*command)
        assert refused.code != 0
        there.note(command[0], refused.out + refused.err)


def _parts_gone(there: Watched, valkey: OwnValkey) -> None:
    """Redis dies under the running processes, which say so and go on."""
    key = there.secrets["rotated key"]
    valkey.kill()
    call = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}
    assert there.call("POST", "/v1/chat/completions", key, json=call).status_code == 503
    assert there.call("GET", "/readyz", key).json()["parts"]["redis"] != "ok"
    assert there.call("GET", "/v1/models", key).status_code == 200


def _wrong_settings(there: Watched, cli: CommandLine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each with its secret in what is wrong: the sentence names the setting alone."""
    database, queue = there.secrets["DATABASE_URL"], there.secrets["REDIS_URL"]
    there.secrets["half a BATCHSVC_SECRET_KEY"] = half = there.secrets["BATCHSVC_SECRET_KEY"][:20]
    for name, value in (
        ("DATABASE_URL", f"postgresql://u:{database}@127.0.0.1:9/x"),
        ("DATABASE_URL", f"mysql://u:{database}@127.0.0.1/x"),
        ("DATABASE_URL", f"postgresql://u:{database}@127.0.0.1:port/x"),
        ("REDIS_URL", f"http://:{queue}@127.0.0.1:9"),
        ("BATCHSVC_SECRET_KEY", half),
    ):
        with monkeypatch.context() as wrong:
            wrong.setenv(name, value)
            refused = cli("migrate")
        assert refused.code == 1, f"{name}: {refused}"
        there.note(f"a wrong {name}", refused.out + refused.err)


def _starts_that_fail(there: Watched) -> None:
    """API processes that begin, and find out then that a secret is wrong."""
    queue, port = there.secrets["REDIS_URL"], choose_ports(("api",))["api"]
    for name, value in (
        ("REDIS_URL", f"redis://:{queue}@127.0.0.1:port/0"),
        ("AWS_SECRET_ACCESS_KEY", there.secrets["AWS_SECRET_ACCESS_KEY"] + "x"),
    ):
        api = there.start("serve", "api", BATCHSVC_PORT=str(port), **{name: value})
        wait_for(lambda api=api: api.poll() is not None or _is_alive(port), "it says what it has to say")
        api.terminate()
        api.wait(LIVENESS_S)


def _crashes_of_commands(there: Watched) -> None:
    """The file with the details of a crash holds what the client libraries say, and these know the passwords."""
    settings = Settings.from_env(there.env)
    nowhere = Database(f"postgresql://u:{there.secrets['DATABASE_URL']}@127.0.0.1:9/x")
    lost = redis.Redis.from_url(settings.redis_url, socket_connect_timeout=1)
    store = boto3.client(
        "s3",
        endpoint_url=settings.s3_endpoint,
        aws_access_key_id=settings.s3_access_key,
        aws_secret_access_key=settings.s3_secret_key,
        region_name="us-east-1",
        config=Config(retries={"total_max_attempts": 1}),
    )

    def ask() -> None:
        with nowhere.reading() as session:
            session.connection()

    def look() -> None:
        store.get_object(Bucket="no-such-bucket", Key="none")

    for crash in (ask, lost.ping, look):
        try:
            crash()
        except Exception as error:  # whatever the library raises is what a crash would write
            said = command_line._log(error)
            details = Path(said.removeprefix("the details are in ").rstrip("."))
            there.note(f"error file of {type(error).__name__}", details.read_text(encoding="utf-8"))
            details.unlink()
        else:
            raise AssertionError("it answers")


def _is_ready(there: Watched) -> bool:
    return _answers(f"{there.url}/readyz")


def _is_alive(port: int) -> bool:
    return _answers(f"http://127.0.0.1:{port}/livez")


def _answers(url: str) -> bool:
    try:
        return httpx.get(url, trust_env=False).status_code == 200
    except httpx.HTTPError:
        return False
