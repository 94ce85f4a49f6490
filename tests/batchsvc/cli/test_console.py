"""What goes where: one document on standard output with --json, and paint on a terminal only where it is welcome."""

from __future__ import annotations

import sys

import pytest

from batchsvc.cli.console import Console, is_live


@pytest.mark.parametrize(
    ("is_terminal", "env", "expected"),
    [
        (True, {}, True),
        (False, {}, False),
        (True, {"NO_COLOR": "1"}, False),
        (True, {"NO_COLOR": ""}, True),  # no-color.org: only when not empty
        (True, {"TERM": "dumb"}, False),
    ],
)
def test_the_bar_is_for_terminals_without_no_color(
    is_terminal: bool, env: dict[str, str], expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: is_terminal, raising=False)
    assert is_live(env) is expected


def test_json_leaves_standard_output_to_the_document(capsys: pytest.CaptureFixture[str]) -> None:
    for as_json in (False, True):
        console = Console(as_json=as_json)
        console.say("progress")
        console.out("text")
        console.fields({"Name": "value"})
        console.result({"id": "batch_é"})
        said = capsys.readouterr()
        assert said.err == "progress\n"
        assert said.out == ('{\n  "id": "batch_é"\n}\n' if as_json else "text\nName  value\n")
