"""Values come from variables, from files that variables name, or from an env file; what only looks so is named."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchsvc.setting_errors import masked
from batchsvc.setting_sources import Origin, env_file, gathered, nearest, unknown
from batchsvc.settings import SECRETS, Settings, SettingsError

BASE = {"DATABASE_URL": "sqlite:///x.db", "REDIS_URL": "redis://127.0.0.1/0"}
KNOWN = Settings.known_variables()


@pytest.mark.parametrize("name", SECRETS)
def test_every_secret_may_come_from_a_file_but_not_from_both(name: str, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("redis://h" if name == "REDIS_URL" else "sqlite:///y.db" if "DATABASE" in name else "s" * 40)
    others = {key: value for key, value in BASE.items() if key != name}
    found = gathered({**others, f"{name}_FILE": str(secret)}, SECRETS)
    assert found.values[name] == secret.read_text()
    assert found.origins[name] == Origin("file", str(secret))
    Settings.from_env({**others, f"{name}_FILE": str(secret)})
    with pytest.raises(SettingsError, match=f"{name} and {name}_FILE are both set: keep one of them") as refused:
        Settings.from_env({**others, name: secret.read_text(), f"{name}_FILE": str(secret)})
    assert "ssss" not in refused.value.message


def test_a_file_that_holds_no_secret_is_named_with_what_is_wrong(tmp_path: Path) -> None:
    empty, binary = tmp_path / "empty", tmp_path / "binary"
    empty.write_text("\n")
    binary.write_bytes(b"\xff\xfe")
    for path, says in ((empty, "which is empty"), (binary, "it isn't text"), (tmp_path, "Is a directory")):
        with pytest.raises(SettingsError, match=f"^DATABASE_URL_FILE .*{says}") as refused:
            Settings.from_env({"DATABASE_URL_FILE": str(path), "REDIS_URL": "redis://h"})
        assert str(path) in refused.value.message
        assert "is not set" not in refused.value.message


def test_an_env_file_is_read_as_systemd_and_docker_do(tmp_path: Path) -> None:
    path = tmp_path / "batchsvc.env"
    path.write_text("# a comment\n; another\n\nA=1\n  B = two words \nC=\"it's quoted\"\nD='x'\nE=a=b#c\nF=\n")
    assert env_file(path) == {"A": "1", "B": "two words", "C": "it's quoted", "D": "x", "E": "a=b#c", "F": ""}
    path.write_text("A=1\nexport B=2\n")
    with pytest.raises(ValueError, match="line 2: this is not NAME=VALUE"):
        env_file(path)
    with pytest.raises(ValueError, match="can't be read: No such file"):
        env_file(tmp_path / "none")


def test_a_misspelt_setting_is_named_with_its_nearest() -> None:
    env = {
        **BASE,
        "BATCHSVC_LEASES": "3",
        "BATCHSVC_API_SERVICE_HOST": "10.0.0.1",
        "BATCHSVC_FAILPOINTS": "x",
        "HOME": "/",
    }
    found = unknown(env, KNOWN)
    assert found["BATCHSVC_LEASES"] == "BATCHSVC_LEASE_S"
    assert set(found) == {"BATCHSVC_LEASES", "BATCHSVC_API_SERVICE_HOST"}
    assert nearest("BATCHSVC_QQQQQQ", KNOWN) is None
    assert Settings.strangers({"BATCHSVC_PROT": "1"}) == [
        "BATCHSVC_PROT is no setting, and has no effect: perhaps BATCHSVC_PORT is meant."
    ]
    Settings.from_env(env)  # it stops nothing: a process of another version may know it


@given(st.sampled_from(sorted(KNOWN)), st.integers(0, 100), st.sampled_from("ABCXYZ_"))
def test_one_wrong_letter_finds_the_setting_again(name: str, at: int, letter: str) -> None:
    short = name.removeprefix("BATCHSVC_")
    if name == short or len(short) < 6:
        return
    place = at % len(short)
    assert nearest(f"BATCHSVC_{short[:place]}{letter}{short[place + 1 :]}", KNOWN) is not None


def test_a_secret_is_masked_wherever_it_stands() -> None:
    assert masked("hunter2") == "***"
    assert (
        masked("postgresql://me:hunter2@h:5/x?sslmode=verify-full") == "postgresql://me:***@h:5/x?sslmode=verify-full"
    )
    assert masked("redis://:hun@ter2@h/0") == "redis://:***@h/0"
    assert masked("postgresql:///x?user=a&password=hunter2&sslpassword=hunter2") == (
        "postgresql:///x?user=a&password=***&sslpassword=***"
    )
    assert masked("sqlite:///a/b.db") == "sqlite:///a/b.db"
