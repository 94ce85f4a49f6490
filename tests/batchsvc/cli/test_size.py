"""`models size` as it is typed: the textbook's table, JSON of any config.json, and one sentence for what can't be."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from batchsvc.cli import main

TEXTBOOK = ("--model", "llama-70b", "--context", "128k", "--concurrency", "8")


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["batchsvc", "models", "size", *arguments])
    with pytest.raises(SystemExit) as ended:
        main()
    return int(ended.value.code or 0)


@pytest.fixture
def config(tmp_path: Path) -> Path:
    fields = {"model_type": "llama", "hidden_size": 1024, "num_hidden_layers": 10, "num_attention_heads": 16}
    fields |= {"num_key_value_heads": 4, "head_dim": 64, "intermediate_size": 2816, "vocab_size": 32000}
    fields |= {"tie_word_embeddings": True, "max_position_embeddings": 8192}
    (tmp_path / "config.json").write_text(json.dumps(fields))
    return tmp_path


def document(capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_the_textbook_is_answered_as_a_table(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, *TEXTBOOK, "--weights", "16") == 0
    rows = {line[:15].strip(): line[15:].strip() for line in capsys.readouterr().out.splitlines()}
    assert rows["weights"].startswith("140.0 GB")
    assert rows["KV"].startswith("343.6 GB")
    assert rows["total"] == "483.6 GB"
    assert rows["cards"] == "7 x H100 (80 GB)"
    assert rows["tensor parallel"].startswith("8 x H100")
    assert rows["decode ceiling"].startswith("388 tokens/s")
    assert rows["cost"].startswith("$12.531 ")
    assert "a default (--price)" in rows["cost"]
    assert rows["largest batch"].startswith("9 ")


def test_any_configuration_is_answered_as_json(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], config: Path
) -> None:
    asked = ("--model", str(config), "--context", "8,192", "--concurrency", "100", "--json")
    assert run(monkeypatch, *asked, "--card", "l4", "--price", "0.5") == 0
    found = document(capsys)
    assert found["parameters"] == 145_511_424
    assert found["weight_bytes"] == 2 * (145_511_424 + 32_000 * 1024), "the head is a second copy of the embedding"
    assert found["kv_bytes"] == 10 * 2 * 4 * 64 * 2 * 8192 * 100
    assert found["total_bytes"] == found["weight_bytes"] + found["kv_bytes"]
    assert (found["cards"], found["fits"], found["tensor_parallel"], found["ways_out"]) == (1, True, 1, [])
    assert found["card"]["price_nanos_per_hour"] == 500_000_000
    assert not found["card"]["is_default_price"]
    assert found["at_concurrency"]["concurrency"] == 100
    assert run(monkeypatch, *asked, "--weights", "4", "--group", "32", "--zero-points", "--kv", "8") == 0
    small = document(capsys)
    assert small["weight_format"] == "int4 (groups of 32 with zero points)"
    assert small["kv_bytes"] == found["kv_bytes"] // 2
    assert small["kv_scale_bytes"] == small["kv_bytes"] // 64 * 4
    assert small["total_bytes"] < found["total_bytes"]


def test_weights_in_files_are_told_and_counted(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], config: Path
) -> None:
    (config / "model.safetensors").write_bytes(bytes(123_456_000))
    assert run(monkeypatch, "--model", str(config)) == 0
    head = "0.066 GB of it the head, a second copy of the embedding"
    assert f"0.357 GB  bf16, {head}, 0.123 GB as its files have them" in capsys.readouterr().out
    assert run(monkeypatch, "--model", str(config), "--weights", "stored", "--json") == 0
    found = document(capsys)
    assert found["stored_bytes"] == found["weight_bytes"] == 123_456_000


def test_what_does_not_fit_says_what_would(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(monkeypatch, *TEXTBOOK, "--cards", "1", "--weights", "8", "--context", "8k", "--json") == 1
    told = capsys.readouterr()
    found = json.loads(told.out)
    assert not found["fits"]
    assert found["at_concurrency"] is None
    assert [way["kind"] for way in found["ways_out"]] == ["format", "concurrency", "context", "cards"]
    assert told.err.count("\n") == 1
    assert "more than fits on 1 x H100 (80 GB); what would fit: weights in int4" in told.err
    assert "3 sequences of 8,192 tokens (78.1 GB)" in told.err
    assert run(monkeypatch, *TEXTBOOK, "--context", "1g", "--card", "l4") == 1
    assert "a card with more memory would" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments",
    [
        ("--context", "0"),
        ("--context", "-5"),
        ("--context", "nan"),
        ("--context", "1.5"),
        ("--context", "99999999999999999999"),
        ("--concurrency", "0"),
        ("--concurrency", "1e9"),
        ("--concurrency", "nan"),
        ("--cards", "0"),
        ("--cards", "999999999"),
        ("--price", "0"),
        ("--price", "-1"),
        ("--price", "nan"),
        ("--price", "1e30"),
        ("--group", "4096"),
        ("--weights", "5"),
        ("--weights", "stored"),
        ("--kv", "4"),
        ("--card", "abacus"),
    ],
    ids=lambda arguments: " ".join(arguments),
)
def test_a_number_that_cannot_be_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], config: Path, arguments: tuple[str, str]
) -> None:
    assert run(monkeypatch, "--model", str(config), *arguments) == 2
    told = capsys.readouterr()
    assert told.out == ""
    assert told.err.count("\n") == 1
    assert arguments[1][:40] in told.err or "--weights" in told.err


def test_a_model_that_cannot_be_counted_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], config: Path
) -> None:
    assert run(monkeypatch, "--model", str(config / "absent")) == 4
    assert "There is no model" in capsys.readouterr().err
    (config / "config.json").write_text('{"model_type": "llama", "hidden_size": -1}')
    assert run(monkeypatch, "--model", str(config)) == 4
    assert "num_hidden_layers" in capsys.readouterr().err
    (config / "hostile.gguf").write_bytes(b"GGUF\3\0\0\0" + b"\xff" * 64)
    assert run(monkeypatch, "--model", str(config / "hostile.gguf")) == 4
    assert "more than it can hold" in capsys.readouterr().err


def test_longer_contexts_than_the_model_was_made_for_are_said(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], config: Path
) -> None:
    assert run(monkeypatch, "--model", str(config), "--context", "16k") == 0
    assert "was made for contexts of up to 8,192 tokens" in capsys.readouterr().err


def test_it_loads_no_torch() -> None:
    code = (
        "import sys; sys.argv = 'batchsvc models size --model llama-70b'.split(); from batchsvc.cli import main\n"
        "try: main()\n"
        "except SystemExit: pass\n"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=60, check=False).returncode == 0


def test_a_draft_is_counted_beside_the_model(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], config: Path, tmp_path: Path
) -> None:
    small = tmp_path / "small"
    small.mkdir()
    fields = json.loads((config / "config.json").read_text()) | {"num_hidden_layers": 2}
    (small / "config.json").write_text(json.dumps(fields))
    found = {}
    for name, more in (("alone", ()), ("both", ("--draft", str(small)))):
        assert run(monkeypatch, "--model", str(config), "--json", *more) == 0
        found[name] = document(capsys)
    layer = 1024 * (2 * 16 * 64 + 2 * 4 * 64) + 3 * 1024 * 2816 + 2 * 1024
    assert found["both"]["draft_bytes"] == 2 * (2 * layer + 2 * 32000 * 1024 + 1024)
    assert found["both"]["total_bytes"] - found["alone"]["total_bytes"] == found["both"]["draft_bytes"]
    assert run(monkeypatch, "--model", str(config), "--draft", str(small)) == 0
    assert "weights that propose tokens" in capsys.readouterr().out
    assert run(monkeypatch, "--model", str(config), "--draft", str(tmp_path / "none")) == 4
    assert "There is no model" in capsys.readouterr().err
