"""Groups of options: a command that takes one has its options, in place and with their defaults."""

from __future__ import annotations

import sys
from typing import Annotated

import pytest
import typer
from typer.testing import CliRunner

from batchsvc.cli.options import AdminOptions, grouped


def test_a_group_stands_for_its_options() -> None:
    seen: list[object] = []
    own = typer.Typer()

    @own.command()
    @grouped
    def look(
        name: Annotated[str, typer.Argument()],
        *,
        times: Annotated[int, typer.Option("--times")] = 1,
        server: AdminOptions,
    ) -> None:
        """Look."""
        seen.append((name, times, server))

    assert CliRunner().invoke(own, ["x", "--from-env", "--json", "--times", "3"]).exit_code == 0
    assert CliRunner().invoke(own, ["y"]).exit_code == 0
    assert seen == [("x", 3, AdminOptions(from_env=True, as_json=True)), ("y", 1, AdminOptions())]
    shown = CliRunner().invoke(own, ["--help"]).output
    places = [shown.index(option) for option in ("--times", "--data-dir", "--url", "--api-key", "--json", "--from-env")]
    assert places == sorted(places)


def test_a_half_named_server_is_refused(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    from batchsvc.cli import main

    monkeypatch.setattr(sys, "argv", ["batchsvc", "pause", "batch_1", "--url", "http://127.0.0.1:9"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2 and "--api-key is missing" in capsys.readouterr().err
