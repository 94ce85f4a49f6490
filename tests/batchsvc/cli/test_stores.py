"""`batchsvc admin stores` on a real database: what is registered, and that its secret is told to nobody."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from sqlalchemy import select

from batchsvc.files.tables import TenantStore
from batchsvc.sealing import Seals
from tests.batchsvc.batches.door import Door
from tests.batchsvc.cli.test_operate import Command, admin, door  # noqa: F401  fixtures
from tests.servers import SECRET_KEY

SECRET = "very-secret-1"
pytestmark = pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)


@pytest.fixture
def secret(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("BATCHSVC_SECRET_KEY", SECRET_KEY)
    path = tmp_path / "secret"
    path.write_text(f"{SECRET}\n")
    return str(path)


def kept(row: TenantStore) -> str:
    return Seals.of(SECRET_KEY).opened(row.sealed_secret or "", f"the store {row.id}")


def test_an_operator_registers_lists_and_removes(door: Door, admin: Command, secret: str) -> None:  # noqa: F811
    keys = ("--access-key", "AK", "--secret-file", secret)
    code, out, err = admin("stores", "add", "p", "s3://bucket/in", *keys, "--endpoint", "https://s3.example")
    assert code == 0 and "may reach s3://bucket/in/" in out, err
    code, out, _ = admin("stores", "add", "p", "s3://bucket/in/", *keys, "--region", "eu-west-1", "--json")
    made = json.loads(out)
    assert (made["uri"], made["region"], made["endpoint"]) == ("s3://bucket/in/", "eu-west-1", None)
    code, out, err = admin("stores", "list")
    assert code == 0 and made["id"] in out and "AWS" in out and "AK" in out
    with door.db.reading() as session:
        (row,) = session.scalars(select(TenantStore))
        assert (row.secret_key, row.access_key) == ("", "AK")
        assert SECRET not in (row.sealed_secret or "") and kept(row) == SECRET
    assert SECRET not in out + err
    code, out, _ = admin("stores", "remove", made["id"])
    assert code == 0 and out == f"{made['id']} is removed.\n"
    assert admin("stores", "remove", made["id"])[0] == 1
    assert json.loads(admin("stores", "list", "--json")[1])["data"] == []


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (("p", "s3://bucket/../x"), 1, "uri: "),
        (("p", "bucket/x"), 1, "s3://bucket/key"),
        (("nobody", "s3://bucket/x"), 1, "no project nobody"),
        (("p", "s3://batchsvc/in"), 1, "the bucket of this service itself"),
        (("p", "s3://bucket/x", "--endpoint", "http://h/path"), 1, "without a path"),
        (("p", "s3://bucket/x", "--region", "Ö"), 2, "region"),
    ],
)
def test_what_can_not_be_registered_is_said(
    door: Door,  # noqa: F811
    admin: Command,  # noqa: F811
    secret: str,
    arguments: tuple[str, ...],
    code: int,
    says: str,
) -> None:
    found, _, err = admin("stores", "add", *arguments, "--access-key", "AK", "--secret-file", secret)
    assert found == code and says in err and SECRET not in err


def test_the_secret_comes_from_a_file_or_standard_input(
    door: Door,  # noqa: F811
    admin: Command,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO(f"{SECRET}\n"))
    code, _, err = admin("stores", "add", "p", "s3://bucket", "--access-key", "AK", "--secret-file", "-")
    assert code == 1 and "BATCHSVC_SECRET_KEY" in err, "nothing that could open it again"
    monkeypatch.setenv("BATCHSVC_SECRET_KEY", SECRET_KEY)
    monkeypatch.setattr("sys.stdin", io.StringIO(f"{SECRET}\n"))
    assert admin("stores", "add", "p", "s3://bucket", "--access-key", "AK", "--secret-file", "-")[0] == 0
    with door.db.reading() as session:
        assert kept(session.scalars(select(TenantStore)).one()) == SECRET
    empty = tmp_path / "empty"
    empty.touch()
    for name in (str(empty), str(tmp_path / "none")):
        code, _, err = admin("stores", "add", "p", "s3://bucket", "--access-key", "AK", "--secret-file", name)
        assert code == 2 and name in err
