"""What an operator types in an incident, and how a deployment is printed: what the words do, and what they say."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from batchsvc.cli import main
from batchsvc.settings import Settings
from tests.batchsvc.batches.door import MODEL, Door

Command = Callable[..., tuple[int, str, str]]


@pytest.fixture
def door(settings: Settings) -> Iterator[Door]:
    made = Door(settings)
    yield made
    made.close()


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    """Runs `batchsvc ...`; gives exit code, standard output and standard error."""

    def run(*arguments: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["batchsvc", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            main()
        said = capsys.readouterr()
        return int(ended.value.code or 0), said.out, said.err

    return run


@pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
def test_claims_and_batches_are_stopped_and_let_go_on(
    door: Door, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DATABASE_URL", door.settings.database_url)
    monkeypatch.setenv("REDIS_URL", door.settings.redis_url)

    def says(*words: object) -> str:
        code, out, err = command(*words, "--from-env")
        assert code == 0, err
        return out

    assert says("claims", "list") == "No claims are paused.\n"
    assert "new disks" in says("claims", "pause", "--reason", "new disks")
    says("claims", "pause", "--model", MODEL)
    listed = says("claims", "list")
    assert "(`batchsvc claims resume` ends that)" in listed and f"claims resume --model {MODEL}`" in listed
    says("claims", "resume", "--model", MODEL)
    assert says("claims", "resume") == "No claims are paused.\n"
    code, out, err = command("claims", "resume", "--from-env")
    assert (code, out, err.count("\n")) == (1, "", 1), "a pause that isn't there"

    batch_id = door.create(door.client()).json()["id"]
    door.start(batch_id, 1)
    assert batch_id in says("batches", "pause", batch_id, "--reason", "its owner asked")
    assert door.row(batch_id).is_paused
    stuck = says("batches", "stuck", "--minutes", 0)
    assert f"{batch_id} (" in stuck and "its owner asked" in stuck and f"batches resume {batch_id}" in stuck
    assert json.loads(says("batches", "stuck", "--json"))["data"][0]["id"] == batch_id
    assert "its owner asked" in says("batches", "why", batch_id)
    says("batches", "resume", batch_id)
    assert not door.row(batch_id).is_paused
    for words, sentence in (
        (("batches", "pause", "batch_nope"), "no batch batch_nope"),
        (("batches", "why", "batch_nope"), "no batch batch_nope"),
        (("claims", "pause", "--model", "nothing"), "nothing"),
        (("workers", "drain", "nobody"), "nobody"),
    ):
        code, out, err = command(*words, "--from-env")
        assert (code, out, err.count("\n")) == (1, "", 1) and sentence in err, err


@pytest.mark.parametrize(
    ("kind", "written", "flags"),
    [
        ("systemd", "*/batchsvc-api.service", ("--hosts", "10.0.0.1,10.0.0.2,10.0.0.3")),
        ("compose", "compose.yaml", ()),
        ("k8s", "batchsvc.yaml", ()),
    ],
)
def test_a_deployment_is_printed_as_a_script_without_its_secrets(
    kind: str, written: str, flags: tuple[str, ...], command: Command, tmp_path: Path
) -> None:
    folder = tmp_path / "deploy"
    code, out, err = command("deploy", kind, "--to", folder, "--model", "smollm2-135m", *flags)
    assert code == 0, err
    assert list(folder.rglob(Path(written).name)) and "Its secrets are made once" in err
    subprocess.run(["sh", "-n", "-c", out], check=True)
    assert out.startswith("set -eu\n")
    secrets = [path.read_text().strip() for path in (folder / "secrets").iterdir()]
    assert secrets and not [secret for secret in secrets if secret in out + err]
