"""`batchsvc models distill`: what it asks before it trains, and what its progress says."""

from __future__ import annotations

import io
import sys
from pathlib import Path

import pytest

from batchsvc.cli.console import Console
from batchsvc.cli.exits import CommandError, Exit
from batchsvc.cli.progress_bar import numbers, shown_phases
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


def test_progress_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    line = {"phase": "train", "done": 120, "total": 800, "loss": 1.2345, "eta_s": 840.0}
    assert numbers(line) == "120 of 800, loss 1.234, 14 min left"
    assert numbers({"done": 3, "total": None, "eta_s": 42.0}) == "3, 42 s left"
    with shown_phases(Console()) as told:
        for value in ({"say": "5 lines."}, line, line | {"done": 121}, line | {"done": 800, "loss": 1.0}):
            told(value)
    said = capsys.readouterr().err.splitlines()
    assert said == ["5 lines.", f"Training: {numbers(line)}", "Training: 800 of 800, loss 1.000, 14 min left"]
