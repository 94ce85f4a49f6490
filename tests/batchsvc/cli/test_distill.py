"""`batchsvc models distill`: what it asks before it trains, and what its progress says."""

from __future__ import annotations

import io
import sys
from pathlib import Path

import pytest

from batchsvc.accounts import service as accounts
from batchsvc.cli.admin import DatabaseAdmin
from batchsvc.cli.console import Console
from batchsvc.cli.distill_data import Data, project_id, store, tell_left
from batchsvc.cli.exits import CommandError, Exit
from batchsvc.cli.progress_bar import numbers, shown_phases
from batchsvc.db.session import Database
from tests.tiny import make_tiny_model


def refused(monkeypatch: pytest.MonkeyPatch, **given: object) -> CommandError:
    """What the command says of these arguments, where nobody can be asked."""
    monkeypatch.setattr(sys, "argv", ["batchsvc"])
    monkeypatch.setattr(sys, "stdin", io.StringIO(""))
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


def test_options_are_checked_before_a_batch_is_fetched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = {"teacher": make_tiny_model(tmp_path / "teacher"), "student": "heads:2", "data": "batch_1"}
    asked |= {"out": tmp_path / "made", "accept_licence": True, "data_dir": tmp_path / "none"}
    for changes, says in (
        ({"holdout": 1}, "--holdout can't be 1"),
        ({"kl": "reverse"}, "--kl has no effect on heads"),
        ({"resume": True}, "There is no unfinished run"),
        ({"project": "mine"}, "A batch has its own project"),
    ):
        assert says in refused(monkeypatch, **asked, **changes).message
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
