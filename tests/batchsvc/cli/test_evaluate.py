"""`batchsvc models eval`: the command, its process and what it says, on a tiny model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from batchsvc.cli import formats
from batchsvc.cli.evaluate import evaluate
from batchsvc.cli.exits import CommandError, Exit
from tests.tiny import make_tiny_model


@pytest.fixture
def tiny(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return make_tiny_model(tmp_path / "tiny")


def test_a_model_is_evaluated(tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    evaluate([str(tiny)], formats="int8", kv="bf16", out=tmp_path / "out", as_json=True)
    said = capsys.readouterr()
    report = json.loads(said.out)
    assert "Measuring tiny in int8, KV in bf16." in said.err
    (row,) = report["rows"]
    assert (row["model"], row["against"], row["of"]) == ("tiny", "tiny", "weights")
    assert row["verdict"] in ("within", "over")
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"quality.json", "quality.md", "quality.svg"}


def test_a_short_text_is_one_sentence(tiny: Path, tmp_path: Path) -> None:
    (tmp_path / "short.txt").write_text("Too short.", "utf-8")
    with pytest.raises(CommandError, match=r"Of .*short\.txt, \d+ tokens can be read; quality is measured on 256") as e:
        evaluate([str(tiny)], text=tmp_path / "short.txt")
    assert e.value.code == Exit.REFUSED


def test_formats_in_a_few_words() -> None:
    part = {"format": "w4a16", "kl": 0.2121, "verdict": "over"}
    row = {"quality": {"verdict": "over", "weights": part, "kv": {"format": "bf16", "kl": None}}}
    assert formats.told(row) == "w4a16 (mean KL 0.2121), KV bf16: over the limits of quality, forced"
    assert formats.verdict(row) == "over"
    assert formats.told({"quality": None}) == formats.verdict({}) == ""
