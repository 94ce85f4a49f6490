"""What goes on after a stop is told the same by --help and by README."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from batchsvc.cli import stops
from batchsvc.cli.app import app

README = Path(__file__).resolve().parents[3] / "README.md"


def test_readme_has_the_table() -> None:
    text = README.read_text(encoding="utf-8")
    for row in stops.readme_rows():
        assert row in text, f"README lacks the row: {row}"


@pytest.mark.parametrize("command", [[], ["cancel"], ["pause"], ["resume"], ["retry"], ["continue"]])
def test_help_has_the_table(command: list[str]) -> None:
    shown = CliRunner().invoke(app, [*command, "--help"]).output
    said = " ".join(shown.split())
    assert "After a stop:" in said
    for stop in stops.TABLE:
        assert " ".join(stop.state.split()) in said
