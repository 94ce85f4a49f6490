"""What a process of the engine says last is a command's answer, or the sentence and exit code of its failure."""

from __future__ import annotations

from pathlib import Path

import pytest

from batchsvc.cli import engine_child
from batchsvc.cli.exits import CommandError, Exit

KILLED = "It was killed: go on with --resume."


@pytest.mark.parametrize(
    ("code", "says", "exit_code"),
    [
        ('print(\'{"error": "No room."}\'); sys.exit(1)', "No room.", Exit.REFUSED),
        ('print(\'{"stopped": "Stopped; go on."}\'); sys.exit(130)', "Stopped; go on.", Exit.INTERRUPTED),
        ("print('{\"done\": 1}', flush=True); os.kill(os.getpid(), 9)", KILLED, Exit.FAILED),
        ("sys.exit(3)", "ended with code 3 and no answer", Exit.FAILED),
    ],
)
def test_how_it_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: str, says: str, exit_code: Exit) -> None:
    (tmp_path / "child_of_test.py").write_text(f"import os, sys\n{code}\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with pytest.raises(CommandError) as raised:
        engine_child.ask("child_of_test", [], lambda line: None, killed=KILLED)
    assert says in raised.value.message and raised.value.code == exit_code


def test_lines_before_the_last_are_progress(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "child_of_test.py").write_text('for n in range(3):\n    print("{\\"n\\": %d}" % n)\n')
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    told: list[int] = []
    assert engine_child.ask("child_of_test", [], lambda line: told.append(line["n"])) == {"n": 2}
    assert told == [0, 1]
