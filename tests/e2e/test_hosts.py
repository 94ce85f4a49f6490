"""Three hosts are brought up by nothing but the commands that `deploy systemd` prints, and run a batch together."""

from __future__ import annotations

import itertools
import json
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import psycopg
import pytest

from batchsvc.deploy.probe import main
from tests.e2e.conftest import FAST_SETTINGS, CommandLine, line
from tests.e2e.hosts import Hosts, hosts, may_make_namespaces
from tests.tiny import make_tiny_model

README = Path(__file__).parents[2] / "README.md"
LEASE_S = 4
SETTINGS = {
    **{name: value for name, value in FAST_SETTINGS.items() if name not in ("BATCHSVC_TERM_GRACE_S",)},
    "BATCHSVC_LEASE_S": str(LEASE_S),
    "BATCHSVC_UNIT_LINES": "8",
    "BATCHSVC_MAX_RUNNING": "8",
}


class Deployed:
    """Hosts on which everything runs, and a client of their API."""

    def __init__(self, made: Hosts, cli: CommandLine, *, speed: int) -> None:
        self.hosts = made
        self.model = str(make_tiny_model(made.base / "tiny", context_tokens=2048))
        self._cli, self._flags = cli, made.flags()
        self._values = {**SETTINGS, "BATCHSVC_FAKE_TOKENS_PER_S": str(speed)}
        self.secrets: dict[str, str] = {}
        self.bring_up()
        assert (made.base / "deploy" / "secrets" / "admin_key").stat().st_mode & 0o777 == 0o600
        api = made.names[1]
        key = self.here("keys create app").strip()
        assert main([f"http://{api}:8080/readyz", "60"]) == 0, made.logs()
        self.client = openai.OpenAI(base_url=f"http://{api}:8080/v1", api_key=key, max_retries=10)

    def bring_up(self, **changed: str) -> None:
        """Deploy, the first time or again, with other settings or with the same."""
        self._values |= changed
        folder = self.hosts.base / "deploy"
        flags = [flag for name, value in self._values.items() for flag in ("--set", f"{name}={value}")]
        printed = self._cli(
            *("deploy", "systemd", "--to", folder, "--model", self.model, "--term-grace-s", "3"),
            *(*self._flags, *flags),
        )
        assert printed.code == 0, printed.err
        self.secrets |= {path.name: path.read_text().strip() for path in (folder / "secrets").iterdir()}
        assert not any(secret in printed.out + printed.err for secret in self.secrets.values())
        (self.hosts.base / "up.sh").write_text(printed.out)
        done = self.hosts.run("sh up.sh")
        assert done.returncode == 0, f"{done.stdout}\n{done.stderr}\n{self.hosts.logs()}"
        left = [name for name in self.hosts.names if (self.hosts.base / name / "batchsvc-deploy").exists()]
        assert left == []  # with the secrets that lay there

    def follow_readme(self, before: str, *, only: str = "") -> None:
        """Run the commands of the block that follows these words in README, on our hosts instead of those there."""
        lines = README.read_text(encoding="utf-8").partition(before)[2].splitlines()
        block = itertools.takewhile(bool, itertools.dropwhile(lambda one: not one.startswith("    "), lines))
        script = "\n".join(["set -eu", *(one for one in block if only in one)])
        base, api, user = self.hosts.base, self.hosts.names[1], self._flags[self._flags.index("--user") + 1]
        script = script.replace("-o batchsvc", f"-o {user}").replace(" /backups", f" {base}/backups")
        script = script.replace("/etc/batchsvc/", f"{base}/{api}/etc/")
        script = re.sub(r"10\.0\.0\.(\d)", lambda found: self.hosts.names[int(found[1]) - 1], script)
        done = self.hosts.run(script)
        assert done.returncode == 0, f"{script}\n{done.stdout}\n{done.stderr}\n{self.hosts.logs()}"

    def here(self, command: str) -> str:
        """What a command says on the host of the API, with the deployment's settings."""
        api = self.hosts.names[1]
        done = self.hosts.on(api, f"{self.hosts.base}/{api}/etc/here {command} --from-env")
        assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
        return done.stdout

    def close(self) -> None:
        self.client.close()

    def submit(self, count: int, *, tokens: int) -> str:
        rows = [line(number, self.model, max_tokens=tokens, ignore_eos=True) for number in range(count)]
        data = "".join(json.dumps(row) + "\n" for row in rows).encode()
        file = self.client.files.create(file=("in.jsonl", data), purpose="batch")
        created = self.client.batches.create(
            input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h"
        )
        return created.id

    def wait(self, batch_id: str, *, until: Any = None, limit_s: float = 150) -> Any:
        deadline = time.monotonic() + limit_s
        while True:
            batch = self.client.batches.retrieve(batch_id)
            assert batch.status not in ("failed", "expired", "cancelled"), batch
            if batch.status == "completed" or (until is not None and until(batch)):
                return batch
            assert time.monotonic() < deadline, f"{batch}\n{self.hosts.logs()}"
            time.sleep(0.2)

    def rows(self, batch: Any) -> list[dict[str, Any]]:
        text = self.client.files.content(batch.output_file_id).text
        return [json.loads(row) for row in text.splitlines()]


@pytest.fixture
def loopback() -> Iterator[Hosts]:
    with hosts(3, in_namespaces=False) as made:
        yield made


def test_three_hosts_come_up_by_the_printed_commands_and_run_a_batch(
    loopback: Hosts, cli: CommandLine, request: pytest.FixtureRequest
) -> None:
    deployed = Deployed(loopback, cli, speed=100_000)
    request.addfinalizer(deployed.close)
    batch = deployed.wait(deployed.submit(40, tokens=8))
    rows = deployed.rows(batch)
    assert [row["custom_id"] for row in rows] == [f"r{number}" for number in range(40)]
    assert batch.usage.output_tokens == 320
    data, api, worker = loopback.names
    key = loopback.base / "deploy" / "secrets" / "admin_key"
    first = key.read_text()
    assert "batchsvc-postgres.service" in loopback.restarted()[data]
    (loopback.base / worker / "batchsvc-deploy").mkdir()  # as a run leaves it that ended early
    deployed.bring_up(BATCHSVC_LEASE_S=str(LEASE_S + 1))  # over what runs
    assert loopback.restarted() == {
        data: [],  # none of its files changed
        api: ["batchsvc-migrate.service", "batchsvc-api.service", "batchsvc-control.service"],
        worker: ["batchsvc-engine@0.service"],
    }
    assert key.read_text() == first
    assert main([f"http://{api}:8080/readyz", "60"]) == 0, loopback.logs()
    assert deployed.rows(deployed.client.batches.retrieve(batch.id)) == rows
    shown = deployed.here("config show --json")
    told = {row["name"]: row for row in json.loads(shown)["settings"]}
    assert told["DATABASE_URL"]["source"] == "file"
    assert told["BATCHSVC_LEASE_S"]["value"] == LEASE_S + 1
    kept = list(loopback.base.glob("*/run/*.log"))
    text = "".join(path.read_text(errors="replace") for path in kept) + shown
    assert not any(secret in text for secret in deployed.secrets.values())


@pytest.mark.faults
@pytest.mark.timeout(600)
def test_hosts_are_restored_by_the_commands_of_readme(
    loopback: Hosts, cli: CommandLine, request: pytest.FixtureRequest
) -> None:
    """From a backup that was made in mid-batch: what came after it is gone, and that batch ends once more, once."""
    deployed = Deployed(loopback, cli, speed=300)
    request.addfinalizer(deployed.close)
    ended = deployed.wait(deployed.submit(16, tokens=8))
    rows = deployed.rows(ended)
    half_id = deployed.submit(96, tokens=120)
    deployed.wait(half_id, until=lambda batch: batch.request_counts.completed >= 8)
    deployed.here("claims pause --reason backup")  # else the batch could end before the backup does
    deployed.follow_readme("\nUpgrade, with the flags", only=" ssh ")
    assert deployed.client.batches.retrieve(half_id).status == "in_progress", "else the backup was made too late"
    deployed.here("claims resume")
    later_id = deployed.submit(8, tokens=8)
    deployed.wait(later_id)
    deployed.wait(half_id)
    loopback.restarted()
    deployed.follow_readme(" Restore, onto these hosts")
    data, api, worker = loopback.names
    assert loopback.restarted() == {
        data: [],
        api: ["batchsvc-api.service", "batchsvc-control.service"],
        worker: ["batchsvc-engine@0.service"],
    }
    assert main([f"http://{api}:8080/readyz", "60"]) == 0, loopback.logs()
    with pytest.raises(openai.NotFoundError):
        deployed.client.batches.retrieve(later_id)
    assert deployed.rows(deployed.client.batches.retrieve(ended.id)) == rows
    deployed.here("claims resume")  # the pause was in the backup, too
    half = deployed.wait(half_id)
    assert [row["custom_id"] for row in deployed.rows(half)] == [f"r{number}" for number in range(96)]
    assert half.usage.output_tokens == 96 * 120
    deployed.here("reconcile --all")


@pytest.mark.faults
@pytest.mark.timeout(600)
def test_secrets_are_rotated_by_removing_their_files(
    loopback: Hosts, cli: CommandLine, request: pytest.FixtureRequest
) -> None:
    """Those of the data services and the admin key, in mid-batch: what is half done ends, with the new ones; the old
    ones open nothing."""
    deployed = Deployed(loopback, cli, speed=20)
    request.addfinalizer(deployed.close)
    half_id = deployed.submit(96, tokens=50)  # four minutes, unless engines become faster
    deployed.wait(half_id, until=lambda batch: batch.request_counts.completed >= 8)
    folder, before = loopback.base / "deploy" / "secrets", dict(deployed.secrets)
    old_admin = (folder / "admin_key").read_text().strip()
    for name in ("postgres_password", "valkey_password", "s3_access_key", "s3_secret_key", "s3_jwt_key", "admin_key"):
        (folder / name).unlink()
    deployed.bring_up()
    assert {name for name in before if deployed.secrets[name] == before[name]} == {"secret_key", "split_key"}
    data, api, _ = loopback.names
    assert main([f"http://{api}:8080/readyz", "60"]) == 0, loopback.logs()
    assert deployed.client.batches.retrieve(half_id).status == "in_progress", "else no unit was running meanwhile"
    deployed.bring_up(BATCHSVC_FAKE_TOKENS_PER_S="3000")
    assert main([f"http://{api}:8080/readyz", "60"]) == 0, loopback.logs()
    half = deployed.wait(half_id)
    assert [row["custom_id"] for row in deployed.rows(half)] == [f"r{number}" for number in range(96)]
    assert half.usage.output_tokens == 96 * 50
    ready = httpx.get(f"http://{api}:8080/readyz").json()
    assert set(ready["parts"].values()) == {"ok"}, ready
    for path in (loopback.base / data / "etc" / "secrets").iterdir():
        assert not any(secret in path.read_text() for secret in set(before.values()) - set(deployed.secrets.values()))
    with pytest.raises(psycopg.OperationalError, match="password authentication failed"):
        psycopg.connect(before["database_url"])
    new_admin = (folder / "admin_key").read_text().strip()
    assert _opens(api, old_admin) and _opens(api, new_admin), "a new one ends no other"
    listed = json.loads(deployed.here("admin-keys list --json"))["data"]
    assert {row["id"] for row in listed} >= {old_admin[3:11], new_admin[3:11]}
    deployed.here(f"admin-keys delete {old_admin[3:11]}")
    assert not _opens(api, old_admin) and _opens(api, new_admin)


def _opens(api: str, key: str) -> bool:
    """Whether a key is one of operators."""
    headers = {"Authorization": f"Bearer {key}"}
    status = httpx.get(f"http://{api}:8080/v1/admin/workers", headers=headers, trust_env=False).status_code
    assert status in (200, 401)
    return status == 200


@pytest.mark.faults
@pytest.mark.timeout(600)
def test_a_batch_ends_though_a_worker_host_lost_its_network(cli: CommandLine, request: pytest.FixtureRequest) -> None:
    """Four hosts in namespaces of their own, two of them with a worker: one's cable is pulled in mid-batch for good;
    then the other's, for longer than a lease, while nobody else is left."""
    if not may_make_namespaces():
        pytest.skip("network namespaces need root; the same hosts on loopback are tested above")
    with hosts(4, in_namespaces=True) as made:
        deployed = Deployed(made, cli, speed=300)
        request.addfinalizer(deployed.close)
        third, fourth = made.names[2:]
        batch_id = deployed.submit(96, tokens=20)
        deployed.wait(batch_id, until=lambda batch: batch.request_counts.completed >= 16)
        made.link(third, is_up=False)
        batch = deployed.wait(batch_id)
        assert len(deployed.rows(batch)) == 96
        assert batch.usage.output_tokens == 96 * 20
        second_id = deployed.submit(64, tokens=20)
        deployed.wait(second_id, until=lambda batch: batch.request_counts.completed >= 8)
        made.link(fourth, is_up=False)
        time.sleep(2 * LEASE_S)
        before = deployed.client.batches.retrieve(second_id).request_counts.completed
        time.sleep(LEASE_S)
        assert deployed.client.batches.retrieve(second_id).request_counts.completed == before  # nobody is left
        made.link(fourth, is_up=True)
        second = deployed.wait(second_id)
        assert len(deployed.rows(second)) == 64
        assert second.usage.output_tokens == 64 * 20
