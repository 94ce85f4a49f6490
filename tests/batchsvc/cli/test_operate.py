"""What `submit` and `run` send of windows, priorities and quotas, and the operator's commands, on a real database."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator

import pytest

from batchsvc.cli import main
from batchsvc.cli.run import BatchOptions, LineOptions
from batchsvc.settings import Settings
from tests.batchsvc.batches.door import Door

Command = Callable[..., tuple[int, str, str]]


@pytest.fixture
def door(settings: Settings) -> Iterator[Door]:
    made = Door(settings)
    yield made
    made.close()


@pytest.fixture
def admin(door: Door, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    """Runs `batchsvc admin ... --from-env`; gives exit code, standard output and standard error."""
    monkeypatch.setenv("DATABASE_URL", door.settings.database_url)
    monkeypatch.setenv("REDIS_URL", door.settings.redis_url)

    def run(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["batchsvc", "admin", *arguments, "--from-env"])
        with pytest.raises(SystemExit) as ended:
            main()
        said = capsys.readouterr()
        return int(ended.value.code or 0), said.out, said.err

    return run


def test_only_what_is_unusual_is_sent() -> None:
    usual = {"completion_window": "24h", "on_invalid": "fail"}
    assert LineOptions().extensions() == BatchOptions(name="n", model="m").extensions() == usual
    assert BatchOptions(max_cost="1.5").extensions() == {**usual, "max_cost": "1.5"}
    assert BatchOptions(window="1h", priority=-3, on_quota="fail", skip_invalid=True).extensions() == {
        "completion_window": "1h",
        "on_invalid": "skip",
        "priority": -3,
        "on_quota": "fail",
    }


@pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
def test_an_operator_sets_weight_and_quota(door: Door, admin: Command) -> None:
    code, out, _ = admin("project", "p", "--weight", "3", "--quota", "5000")
    assert code == 0 and "weight 3 and quota 5,000 tokens" in out
    code, out, _ = admin("project", "p", "--budget", "12.5", "--prepaid")
    assert code == 0 and "monthly budget $12.50, prepaid" in out
    code, out, _ = admin("project", "p", "--budget", "none", "--postpaid", "--json")
    assert (json.loads(out)["budget_nanos"], json.loads(out)["is_prepaid"]) == (None, False)
    assert admin("project", "p", "--budget", "-1")[0] == 2
    for given, kept in (("90,75", [90, 75]), ("none", []), ("default", None)):
        code, out, _ = admin("project", "p", "--alert", given, "--json")
        assert code == 0 and json.loads(out)["alert_percents"] == kept
    assert admin("project", "p", "--alert", "0")[0] == admin("project", "p", "--alert", "50,,80")[0] == 2
    code, out, _ = admin("project", door.project_id, "--quota", "default", "--json")
    assert code == 0 and json.loads(out)["quota_tokens"] is None and json.loads(out)["weight"] == 3
    code, out, _ = admin("projects")
    assert code == 0 and door.project_id in out and "default" in out
    for arguments, says in (
        (("project", "p"), "--weight, --quota"),
        (("project", "p", "--quota", "many"), "--quota can't be 'many'"),
        (("project", "p", "--quota", "0"), "--quota can't be '0'"),
        (("project", "nobody", "--weight", "2"), "no project nobody"),
    ):
        code, out, err = admin(*arguments)
        assert code in (1, 2) and out == "" and says in err and err.count("\n") == 1


@pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
def test_an_operator_pauses_and_resumes(door: Door, admin: Command) -> None:
    batch_id = door.create(door.client()).json()["id"]
    door.start(batch_id, 1)
    code, out, _ = admin("pause", batch_id)
    assert code == 0 and f"batchsvc admin resume {batch_id}" in out and door.row(batch_id).is_paused
    code, out, _ = admin("resume", batch_id, "--json")
    assert code == 0 and json.loads(out)["pause_reason"] is None and not door.row(batch_id).is_paused
    door.set(batch_id, status="completed", ended_ms=1)
    code, _, err = admin("resume", batch_id)
    assert code == 1 and "completed" in err
    code, _, err = admin("pause", "batch_nope")
    assert code == 1 and "no batch batch_nope" in err
