"""The commands of projects, keys, service accounts, limits and the audit log, over a server and on its database."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator

import pytest

from batchsvc.cli import main
from tests.contract.conftest import Api, api, server, sqlite_api  # noqa: F401  the server that contract tests use

Command = Callable[..., tuple[int, str, str]]


@pytest.fixture(params=["server", "database"])
def command(
    request: pytest.FixtureRequest,
    api: Api,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> Iterator[Command]:
    """Runs `batchsvc ...`; gives exit code, standard output and standard error."""
    if request.param == "server":
        where = ["--url", f"{api.url}/v1", "--api-key", api.admin_key]
    else:
        monkeypatch.setenv("DATABASE_URL", api.settings.database_url)
        monkeypatch.setenv("REDIS_URL", api.settings.redis_url)
        where = ["--from-env"]

    def run(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["batchsvc", *arguments, *where])
        with pytest.raises(SystemExit) as ended:
            main()
        said = capsys.readouterr()
        return int(ended.value.code or 0), said.out, said.err

    return run


def told(command: Command, *arguments: str) -> object:
    """The document that a command prints."""
    code, out, err = command(*arguments, "--json")
    assert code == 0, err
    return json.loads(out)


pytestmark = pytest.mark.parametrize("server", ["sqlite"], indirect=True)


def test_a_project_is_made_renamed_limited_and_archived(command: Command, api: Api) -> None:  # noqa: F811
    made = told(command, "projects", "create", "shop")
    assert made["status"] == "active"
    assert told(command, "projects", "rename", made["id"], "shop-2")["name"] == "shop-2"
    limited = told(
        command, "limits", "set", made["id"], "--requests-per-minute", "60", "--open-batches", "5", "--stored-bytes",
        "2GB",
    )  # fmt: skip
    assert (limited["requests_per_minute"], limited["max_open_batches"], limited["max_stored_bytes"]) == (
        60,
        5,
        2_000_000_000,
    )
    code, out, _ = command("limits", "show")
    assert code == 0 and "2,000,000,000" in out and "the setting's" in out
    assert told(command, "limits", "set", made["id"], "--open-batches", "none")["max_open_batches"] is None
    account = told(command, "service-accounts", "create", made["id"], "robot", "--expires", "30d")
    second = told(command, "service-accounts", "key", made["id"], account["id"], "--scope", "files:read")
    assert second["scopes"] == ["api.files.read"]
    code, out, _ = command("service-accounts", "list", made["id"])
    assert code == 0 and account["id"] in out
    assert told(command, "service-accounts", "delete", made["id"], account["id"])["deleted"]
    assert api.call("GET", "/v1/models", account["api_key"]["value"]).status_code == 401
    assert told(command, "projects", "archive", made["id"])["status"] == "archived"
    assert made["id"] not in command("projects", "list")[1]
    assert made["id"] in command("projects", "list", "--archived")[1]
    rows = [row["type"] for row in told(command, "audit", "--project", made["id"], "--since", "1h")["data"]]
    assert rows[0] == "project.archived" and rows[-1] == "project.created" and "rate_limit.updated" in rows


def test_a_key_is_made_changed_rotated_and_revoked(command: Command, api: Api) -> None:  # noqa: F811
    made = told(
        command, "keys", "create", "loader", "--project", api.project_id, "--scope", "files", "--scope", "batches:read",
        "--expires", "90d",
    )  # fmt: skip
    assert made["scopes"] == ["api.batches.read", "api.files.write"]
    assert api.call("GET", "/v1/batches", made["key"]).status_code == 200
    assert api.call("POST", "/v1/batches", made["key"], json={}).status_code == 403
    changed = told(command, "keys", "update", made["id"], "--all-scopes", "--expires", "never")
    assert (changed["scopes"], changed["expires_at"]) == ([], None)
    assert told(command, "limits", "set", "--key", made["id"], "--requests-per-minute", "6000")
    code, out, err = command("keys", "rotate", made["id"], "--overlap", "1h")
    fresh = out.strip()
    assert code == 0 and "replaces it" in err
    assert api.call("GET", "/v1/models", fresh).headers["x-ratelimit-limit-requests"] == "6000", "it has its limits"
    assert api.call("GET", "/v1/models", made["key"]).status_code == 200, "the overlap"
    code, _, err = command("keys", "rotate", made["id"])
    assert code == 1 and "was rotated before" in err
    rows = {row["id"]: row for row in told(command, "keys", "list")["data"]}
    assert rows[made["id"]]["replaced_by"] == fresh[3:11]
    code, out, _ = command("keys", "rotate", fresh[3:11], "--overlap", "0s")
    assert api.call("GET", "/v1/models", fresh).json()["error"]["code"] == "expired_api_key", "no overlap"
    last = out.strip()
    assert told(command, "keys", "revoke", last[3:11])["revoked_at"]
    assert api.call("GET", "/v1/models", last).status_code == 401
    said = command("audit", "--target", made["id"])[1] + command("audit", "--json")[1]
    assert made["key"] not in said and fresh not in said and last not in said
    assert "replaced_by=" in said and "overlap_seconds=3600" in said


def test_an_admin_key_is_made_and_deleted(command: Command, api: Api) -> None:  # noqa: F811
    made = told(command, "admin-keys", "create", "auditor", "--read-only", "--expires", "1d")
    assert api.call("GET", "/v1/organization/audit_logs", made["value"]).status_code == 200
    assert api.call("POST", "/v1/organization/projects", made["value"], json={"name": "x"}).status_code == 403
    assert made["id"] in command("admin-keys", "list")[1]
    assert told(command, "admin-keys", "delete", made["id"])["deleted"]
    assert made["id"] not in command("admin-keys", "list")[1]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("keys", "create", "x", "--expires", "soon"), "--expires can't be 'soon'"),
        (("keys", "create", "x", "--scope", "everything"), "There is no scope 'everything'"),
        (("keys", "create", "x", "--admin", "--scope", "files"), "An admin key is unrestricted"),
        (("keys", "create", "x", "--expires", "0s"), "expires_in_seconds"),
        (("keys", "update", "nobody0"), "Name what to change"),
        (("keys", "update", "nobody0", "--expires", "1d"), "There is no key nobody0"),
        (("keys", "update", "nobody0", "--all-scopes", "--scope", "files"), "exclude each other"),
        (("keys", "revoke", "nobody0"), "There is no key nobody0"),
        (("limits", "set", "--requests-per-minute", "5"), "Name a project"),
        (("limits", "set", "test"), "Name a limit"),
        (("limits", "set", "test", "--requests-per-minute", "0"), "requests_per_minute"),
        (("limits", "set", "test", "--requests-per-minute", "many"), "--requests-per-minute can't be 'many'"),
        (("limits", "set", "test", "--stored-bytes", "5 potatoes"), "--stored-bytes can't be"),
        (("projects", "archive", "nobody"), "There is no project nobody"),
        (("projects", "create", " "), "name must be 1 to 128"),
        (("audit", "--since", "yesterday"), "--since can't be 'yesterday'"),
    ],
)
def test_a_wrong_argument_is_one_sentence(command: Command, arguments: tuple[str, ...], says: str) -> None:
    code, out, err = command(*arguments)
    assert code in (1, 2, 4) and out == "" and says in err and err.count("\n") == 1, err


def test_keys_of_a_new_project_name_it_in_the_log(command: Command, api: Api) -> None:  # noqa: F811
    """A project that is made by the way is told of, too; and the actor is a key, or whoever sits here."""
    made = told(command, "keys", "create", "first", "--project", "made by the way")
    rows = told(command, "audit", "--project", made["project_id"])["data"]
    assert [row["type"] for row in rows] == ["api_key.created", "project.created"]
    actor = rows[0]["actor"]
    if actor["type"] == "api_key":
        assert actor["api_key"]["id"] == api.admin_key[3:11] and actor["api_key"]["ip_address"] == "127.0.0.1"
    else:
        assert "@" in actor["session"]["user"]["id"]
    told(command, "projects", "archive", "made by the way")
