"""`batchsvc admin delete` and `admin retention` on a real database; what `batchsvc delete` asks a server for."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from sqlalchemy import select

from batchsvc import ids
from batchsvc.accounts import service as accounts
from batchsvc.audit.tables import AuditRow
from batchsvc.cli import deletion
from batchsvc.cli.exits import CommandError
from batchsvc.cli.options import ServerOptions
from batchsvc.files import service as files
from batchsvc.files.tables import File, RetentionDefault
from tests.batchsvc.batches.door import Door
from tests.batchsvc.cli.test_operate import Command, admin, door  # noqa: F401  fixtures

pytestmark = pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)


def test_an_operator_sets_how_long_files_live(door: Door, admin: Command) -> None:  # noqa: F811
    code, out, err = admin("retention", "p")
    assert code == 0 and "inputs live as long as BATCHSVC_FILE_TTL_S says" in out, err
    code, out, _ = admin("retention", "p", "--inputs", "12h", "--outputs", "7d")
    assert code == 0 and "inputs live 12 hours, results 7 days" in out
    code, out, _ = admin("retention", "p", "--inputs", "default", "--json")
    assert (json.loads(out)["input_seconds"], json.loads(out)["output_seconds"]) == (None, 604_800)
    assert "inputs live as long as" in admin("retention", "p")[1]
    with door.db.reading() as session:
        (row,) = session.scalars(select(RetentionDefault))
        assert (row.input_life_s, row.output_life_s) == (None, 604_800)
        noted = session.scalars(select(AuditRow).where(AuditRow.action == "retention.updated")).all()
        assert [one.actor_kind for one in noted] == ["cli", "cli"]


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (("nobody", "--inputs", "7d"), 1, "no project nobody"),
        (("p", "--inputs", "7"), 2, "'7' is no life of a file"),
        (("p", "--outputs", "0d"), 2, "hours or days, such as 12h or 7d"),
        (("p", "--outputs", "99999d"), 2, "output_seconds"),
    ],
)
def test_a_wrong_life_is_refused(door: Door, admin: Command, arguments: Any, code: int, says: str) -> None:  # noqa: F811
    found, _, err = admin("retention", *arguments)
    assert found == code and says in err


def test_an_operator_deletes_somebodys_file(door: Door, admin: Command) -> None:  # noqa: F811
    with door.db.transaction() as session:
        project_id = accounts.existing_project(session, "p").id
        file = files.add_upload(
            session, file_id=ids.file_id(), project_id=project_id, filename="a.jsonl", s3_key="in/p/a", etag="",
            sha256="", size_bytes=1, life_s=3600,
        )  # fmt: skip
    assert admin("delete", file.id, "--input")[0] == 1
    code, out, err = admin("delete", file.id)
    assert code == 0 and f"{file.id} is deleted" in out and project_id in out, err
    code, _, err = admin("delete", file.id)
    assert code == 1 and "it was deleted on" in err
    code, _, err = admin("delete", "file-nobody")
    assert code == 1 and "There is no file or batch file-nobody." in err
    with door.db.reading() as session:
        assert session.get_one(File, file.id).deleted_ms is not None
        (noted,) = session.scalars(select(AuditRow).where(AuditRow.action == "resource.deleted"))
        assert (noted.target_id, noted.project_id) == (file.id, project_id)


class _Server(ServerOptions):
    """Remembers the paths that a command deletes."""

    paths: list[str] = []  # noqa: RUF012  of the test

    @contextmanager
    def opened(self, **_: Any) -> Iterator[Any]:
        class Client:
            def delete(self, path: str) -> dict[str, Any]:
                _Server.paths.append(path)
                return {"id": path.rsplit("/", 1)[-1], "deleted": True}

        yield type("Session", (), {"client": Client()})()


def test_delete_asks_by_the_kind_of_the_id(database_url: str, capsys: pytest.CaptureFixture[str]) -> None:
    run = deletion.delete.__wrapped__  # type: ignore[attr-defined]
    for object_id, with_input in (("file-1", False), ("batch_1", False), ("batch_1", True), ("msgbatch_1", False)):
        run(object_id=object_id, with_input=with_input, server=_Server())
    assert _Server.paths == ["/files/file-1", "/batches/batch_1", "/batches/batch_1?input=true", "/batches/msgbatch_1"]
    assert "file-1 is deleted" in capsys.readouterr().out
    for object_id, with_input, says in (("file-1", True, "--input is for a batch"), ("quote_1", False, "no id of a")):
        with pytest.raises(CommandError, match=says):
            run(object_id=object_id, with_input=with_input, server=_Server())
