"""`config show` tells value, source and meaning of every setting, hides secrets, and names what is wrong."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from batchsvc.setting_sources import Origin
from batchsvc.settings import Settings
from batchsvc.stack.datadir import DataDir
from tests.e2e.conftest import CommandLine, cli

__all__ = ["cli"]
SECRET = "hunter2-hunter2-hunter2-hunter2-hunter2"


@pytest.fixture(autouse=True)
def _deployment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith(("BATCHSVC_", "AWS_")):
            monkeypatch.delenv(name)
    monkeypatch.setenv("DATABASE_URL", f"postgresql://me:{SECRET}@db/x")
    monkeypatch.setenv("REDIS_URL", "redis://queue/0")


def rows_of(shown: Any) -> dict[str, dict[str, Any]]:
    return {row["name"]: row for row in shown["settings"]}


def test_each_source_is_told(cli: CommandLine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    key = tmp_path / "key"
    key.write_text(SECRET)
    dotenv = tmp_path / "batchsvc.env"
    dotenv.write_text("BATCHSVC_LEASE_S=60\nBATCHSVC_PORT=9001\n")
    monkeypatch.setenv("BATCHSVC_PORT", "9000")
    monkeypatch.setenv("BATCHSVC_MODEL", "m")
    monkeypatch.setenv("BATCHSVC_SECRET_KEY_FILE", str(key))
    shown = cli("config", "show", "--env-file", dotenv, "--json")
    assert shown.code == 0, shown.err
    rows = rows_of(shown.json)
    assert len(rows) == len(Settings.model_fields)
    told = {name: (row["value"], row["source"], row["place"]) for name, row in rows.items()}
    assert told["BATCHSVC_LEASE_S"] == (60, "env file", str(dotenv))
    assert told["BATCHSVC_PORT"] == (9001, "env file", str(dotenv))
    assert told["BATCHSVC_MODEL"] == ("m", "environment", None)
    assert told["BATCHSVC_SECRET_KEY"] == ("***", "file", str(key))
    assert told["BATCHSVC_HOST"] == ("127.0.0.1", "default", None)
    assert told["DATABASE_URL"] == ("postgresql://me:***@db/x", "environment", None)
    assert all(row["meaning"] for row in rows.values())
    assert SECRET not in shown.out + shown.err
    as_text = cli("config", "show", "--env-file", dotenv)
    lines = {line.split()[0]: line for line in as_text.out.splitlines()}
    assert lines["BATCHSVC_LEASE_S"].split("  ")[0] == "BATCHSVC_LEASE_S"
    assert f"env file {dotenv}" in lines["BATCHSVC_LEASE_S"]
    assert "how long a unit stays with a silent worker" in lines["BATCHSVC_LEASE_S"]
    assert SECRET not in as_text.out + as_text.err


def test_wrong_and_unknown_settings_are_told_beside_the_others(
    cli: CommandLine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BATCHSVC_PORT", "70000")
    monkeypatch.setenv("BATCHSVC_LEASES", "5")
    monkeypatch.delenv("REDIS_URL")
    shown = cli("config", "show", "--from-env", "--json")
    assert shown.code == 1
    rows = rows_of(shown.json)
    assert rows["BATCHSVC_PORT"]["value"] == "70000"
    assert rows["BATCHSVC_PORT"]["problem"].startswith("BATCHSVC_PORT can't be '70000': it must be at most 65,535")
    assert rows["REDIS_URL"]["source"] == "missing"
    assert rows["BATCHSVC_HOST"]["value"] == "127.0.0.1"
    assert shown.json["unknown"] == [{"name": "BATCHSVC_LEASES", "nearest": "BATCHSVC_LEASE_S"}]
    told = cli("config", "show", "--from-env", "port").err.splitlines()
    assert told[0] == "batchsvc: BATCHSVC_LEASES is no setting, and has no effect: perhaps BATCHSVC_LEASE_S is meant."
    assert [line.split()[1] for line in told[1:]] == ["REDIS_URL", "BATCHSVC_PORT"]


def test_only_some_settings_are_shown_where_they_are_named(cli: CommandLine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BATCHSVC_PORT", "9000")
    names = [line.split()[0] for line in cli("config", "show", "--from-env", "lease", "term_grace").out.splitlines()]
    assert names == ["setting", "BATCHSVC_LEASE_S", "BATCHSVC_TERM_GRACE_S"]
    changed = cli("config", "show", "--from-env", "--changed").out.splitlines()
    assert [line.split()[0] for line in changed] == ["setting", "DATABASE_URL", "REDIS_URL", "BATCHSVC_PORT"]


def test_a_place_without_settings_is_told_in_a_sentence(cli: CommandLine, tmp_path: Path) -> None:
    assert "No stack has run in" in cli("config", "show", "--data-dir", tmp_path).err
    assert cli("config", "show", "--data-dir", tmp_path, "--from-env").code == 2
    assert "can't be read: No such file" in cli("config", "show", "--env-file", tmp_path / "none").err
    assert list(tmp_path.iterdir()) == []  # looking made nothing


def test_a_stack_that_does_not_run_shows_what_it_would_start_with(
    cli: CommandLine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    directory = DataDir(tmp_path / "d")
    directory.create()
    directory.write_json("ports.json", {"api": 8111, "valkey": 8112, "s3": 8113})
    monkeypatch.setenv("BATCHSVC_LEASE_S", "40")
    monkeypatch.setenv("BATCHSVC_MODEL", "hf:a/b")
    shown = json.loads(cli("config", "show", "--data-dir", directory.root, "--json").out)
    told = {row["name"]: (row["value"], row["source"]) for row in shown["settings"]}
    assert told["DATABASE_URL"] == (directory.database_url, "stack")
    assert told["REDIS_URL"] == ("redis://:***@127.0.0.1:8112/0", "stack")
    assert told["BATCHSVC_LEASE_S"] == (40, "environment")
    assert told["BATCHSVC_MODEL"] == ("hf:a/b", "environment")
    assert told["BATCHSVC_HOST"] == ("127.0.0.1", "default")
    assert shown["problems"] == []


def test_an_origin_reads_as_words() -> None:
    assert str(Origin("file", "/x")) == "file /x"
    assert str(Origin("environment")) == "environment"
