"""`batchsvc models distill`: what it asks before it trains, and what its progress says."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from batchsvc.accounts import service as accounts
from batchsvc.cli import engine_child
from batchsvc.cli.admin import DatabaseAdmin
from batchsvc.cli.console import Console
from batchsvc.cli.distill_data import Data, fetched, found_data, project_id, store, tell_left
from batchsvc.cli.exits import CommandError, Exit
from batchsvc.cli.progress_bar import numbers, shown_phases
from batchsvc.db.session import Database
from tests.tiny import make_tiny_model


def refused(monkeypatch: pytest.MonkeyPatch, *, stdin: io.StringIO | None = None, **given: object) -> CommandError:
    """What the command says of these arguments, where nobody can be asked unless there is a `stdin`."""
    monkeypatch.setattr(sys, "argv", ["batchsvc"])
    monkeypatch.setattr(sys, "stdin", stdin or io.StringIO(""))
    from batchsvc.cli.models import app

    argv = [part for name, value in given.items() for part in (f"--{name.replace('_', '-')}", str(value))]
    with pytest.raises(CommandError) as raised:
        app(["distill", *[part for part in argv if part != "True"]], standalone_mode=False)
    return raised.value


def test_a_licence_is_shown_and_must_be_confirmed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    teacher = make_tiny_model(tmp_path / "teacher")
    (teacher / "LICENSE").write_text("Teach freely.")
    asked = {"teacher": teacher, "student": "layers:1", "data": tmp_path / "none.jsonl", "out": tmp_path / "made"}
    error = refused(monkeypatch, **asked)
    assert error.code == Exit.USAGE and "--accept-licence" in error.message
    shown = capsys.readouterr().err
    assert "Teach freely." in shown and "comes under a licence that its files don't name." in shown
    error = refused(monkeypatch, **asked, accept_licence=True)
    assert error.code == Exit.USAGE and "is neither a file nor a batch" in error.message
    (tmp_path / "made").mkdir()
    assert "exists already" in refused(monkeypatch, **asked, accept_licence=True).message


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(("answer", "is_accepted"), [("y\n", True), ("n\n", False), ("\n", False)])
def test_at_a_terminal_it_is_asked_whether_the_licence_allows_it(
    answer: str, is_accepted: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = {"teacher": make_tiny_model(tmp_path / "teacher"), "student": "layers:1", "data": tmp_path / "none.jsonl"}
    error = refused(monkeypatch, **asked, out=tmp_path / "made", stdin=Terminal(answer))
    accepted, declined = "is neither a file nor a batch", "wasn't accepted, so nothing was trained"
    assert error.code == Exit.USAGE and (accepted if is_accepted else declined) in error.message
    assert [path.name for path in tmp_path.iterdir()] == ["teacher"]


def test_options_are_checked_before_a_batch_is_fetched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = {"teacher": make_tiny_model(tmp_path / "teacher"), "student": "heads:2", "data": "batch_1"}
    asked |= {"out": tmp_path / "made", "accept_licence": True, "data_dir": tmp_path / "none"}
    for changes, says in (
        ({"holdout": 1}, "--holdout can't be 1"),
        ({"kl": "reverse"}, "--kl has no effect on heads"),
        ({"pack_tokens": 512}, "--pack-tokens has no effect on heads"),
        ({"resume": True}, "There is no unfinished run"),
        ({"project": "mine"}, "A batch has its own project"),
        ({"data": "msgbatch_1"}, "is a batch of messages"),
    ):
        assert says in refused(monkeypatch, **(asked | changes)).message
    assert sorted(path.name for path in tmp_path.iterdir()) == ["teacher"], "nothing was started, nothing fetched"
    (tmp_path / "made.distill").mkdir()
    (tmp_path / "made.distill" / "run.json").write_text("{}")
    assert "holds an unfinished run" in refused(monkeypatch, **asked).message


def test_fetched_lines_are_private_and_go_where_no_run_has_begun(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target, work = tmp_path / "made", tmp_path / "made.distill"
    found = Data(work / "input.jsonl", batch="batch_1", project="proj_1")
    store(found.file, iter([b"{}", b"\n"]))
    assert (work.stat().st_mode & 0o777, found.file.stat().st_mode & 0o777) == (0o700, 0o600)
    (work / "run.json").write_text("{}")
    tell_left(found, target, Console())
    assert found.file.read_bytes() == b"{}\n"
    assert f"The lines of batch_1 stay in {work}, for you alone" in capsys.readouterr().err
    (work / "run.json").unlink()
    tell_left(found, target, Console())
    assert not work.exists() and not capsys.readouterr().err


class Chain:
    """A server that has a batch of three lines, and a retry of the one that failed there."""

    def __init__(self) -> None:
        self.batches = {
            "batch_1": {"output_file_id": "said", "error_file_id": "failed", "parent_batch_id": None},
            "batch_2": {"output_file_id": "again", "error_file_id": None, "parent_batch_id": "batch_1"},
        }
        self.files = {
            "in": b'{"custom_id":"a"}\n{"custom_id":"b"}\n{"custom_id":"c"}\n',
            "said": b'{"line":1,"custom_id":"a"}\n{"line":3,"custom_id":"c"}\n',
            "failed": b'{"line":2,"custom_id":"b","error":{}}\n',
            "again": b'{"line":2,"custom_id":"b"}\n',
        }
        self.read: list[str] = []

    def batch(self, batch_id: str) -> dict[str, Any]:
        known = {"id": batch_id, "status": "completed", "input_file_id": "in", "project_id": "proj_1"}
        return known | self.batches[batch_id]

    @contextmanager
    def content(self, file_id: str) -> Iterator[Iterator[bytes]]:
        self.read.append(file_id)
        yield iter([self.files[file_id]])


def test_a_retry_brings_the_answers_of_the_whole_chain(tmp_path: Path) -> None:
    server: Any = Chain()
    found = fetched(server, "batch_2", tmp_path / "work")
    assert (found.batch, found.project) == ("batch_2", "proj_1")
    assert found.file.read_bytes() == server.files["in"]
    (results,) = found.results
    rows = [json.loads(row) for row in results.read_text().splitlines()]
    assert rows == [{"line": line, "custom_id": custom_id} for line, custom_id in ((1, "a"), (2, "b"), (3, "c"))]
    server.files["in"] = b"PAR1" + bytes(9)
    with pytest.raises(CommandError, match="isn't plain JSONL"):
        fetched(server, "batch_2", tmp_path / "work")
    assert not (tmp_path / "work").exists()


def test_a_run_that_goes_on_uses_what_it_has_of_its_batch(tmp_path: Path) -> None:
    """No server is asked: the batch may be deleted by now."""
    server: Any = Chain()
    nobody: Any = None
    work, target = tmp_path / "made.distill", tmp_path / "made"
    found = fetched(server, "batch_1", work)
    (work / "run.json").write_text(json.dumps({"batch": "batch_1", "project": "proj_1"}))
    assert found_data("batch_1", [], target, None, nobody) == found
    with pytest.raises(CommandError, match="holds a run of batch_1: give the same"):
        found_data("batch_2", [], target, None, nobody)
    (work / "run.json").write_text("[1")
    with pytest.raises(CommandError, match="can't be read"):
        found_data("batch_1", [], target, None, nobody)


def test_files_are_of_the_project_that_is_named(tmp_path: Path, migrated_url: str) -> None:
    database = Database(migrated_url)
    with database.transaction() as session:
        known = accounts.create_project(session, "mine").id
    admin = DatabaseAdmin(database)
    assert [project_id(spelled, admin) for spelled in ("mine", known)] == [known, known]
    with pytest.raises(CommandError, match="no project other here"):
        project_id("other", admin)
    database.dispose()


def test_progress_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    line = {"phase": "train", "done": 120, "total": 800, "loss": 1.2345, "eta_s": 840.0}
    assert numbers(line) == "120 of 800, loss 1.234, 14 min left"
    assert numbers({"done": 3, "total": None, "eta_s": 42.0}) == "3, 42 s left"
    with shown_phases(Console()) as told:
        for value in ({"say": "5 lines."}, line, line | {"done": 121}, line | {"done": 800, "loss": 1.0}):
            told(value)
    said = capsys.readouterr().err.splitlines()
    assert said == ["5 lines.", f"Training: {numbers(line)}", "Training: 800 of 800, loss 1.000, 14 min left"]


@pytest.mark.parametrize(("student", "smaller"), [("layers:1", "--pack-tokens"), ("heads:1", "--draft-vocab")])
def test_of_a_training_that_was_killed_it_says_what_takes_less(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, student: str, smaller: str
) -> None:
    (tmp_path / "in.jsonl").touch()

    def killed(_module: str, argv: list[str], _told: object, *, killed: str) -> None:
        raise CommandError(killed)

    monkeypatch.setattr(engine_child, "ask", killed)
    asked = {"teacher": make_tiny_model(tmp_path / "teacher"), "student": student, "data": tmp_path / "in.jsonl"}
    error = refused(monkeypatch, **asked, out=tmp_path / "made", accept_licence=True)
    assert f"a smaller {smaller} takes less" in error.message
