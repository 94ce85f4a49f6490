"""The command itself: quick to import, free of torch, and never a traceback."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import platformdirs
import pytest

from batchsvc.cli import doctor, main
from batchsvc.cli.exits import TABLE


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["batchsvc", *arguments])
    with pytest.raises(SystemExit) as ended:
        main()
    return int(ended.value.code or 0)


def test_help_loads_neither_torch_nor_a_database_nor_a_client() -> None:
    code = (
        "import sys; sys.argv = ['batchsvc', '--help']; from batchsvc.cli import main\n"
        "try: main()\n"
        "except SystemExit: pass\n"
        "sys.exit(sum(m in sys.modules for m in ('torch', 'sqlalchemy', 'httpx', 'boto3', 'fastapi', 'celery')))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_help_shows_the_whole_table(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(monkeypatch, "--help") == 0
    shown = capsys.readouterr().out
    for code, text in TABLE.items():
        assert f"{code.value:>3}  {text}" in shown


def test_version(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(monkeypatch, "--version") == 0
    assert capsys.readouterr().out.startswith("batchsvc 0.")


def test_a_surprise_is_one_sentence_and_a_file(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    def surprise(*_: object) -> None:
        raise ZeroDivisionError("never seen before")

    monkeypatch.setattr(doctor, "_python", surprise)
    monkeypatch.setattr(platformdirs, "user_log_path", lambda *_, **__: tmp_path)
    assert run(monkeypatch, "doctor", "--data-dir", str(tmp_path / "d")) == 1
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    details = next(tmp_path.glob("batchsvc-error-*.log"))
    assert str(details) in said
    assert "never seen before" in details.read_text()
