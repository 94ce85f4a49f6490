"""`batchsvc models quantize`: the command, its process and what it says, on a tiny model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from batchsvc.cli.exits import CommandError, Exit
from batchsvc.cli.quantize import Layout, Method, quantize
from engine.load.quantization import stored_format
from tests.tiny import make_tiny_model


def test_a_model_is_quantized_and_can_be_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, target, calib = make_tiny_model(tmp_path / "model"), tmp_path / "small", tmp_path / "calib.jsonl"
    calib.write_text(json.dumps({"messages": [{"role": "user", "content": "Where is my order?"}]}) + "\n", "utf-8")
    quantize(str(model), Method.GPTQ, group=32, calib=calib, out=target, save_as=Layout.GPTQ, as_json=True)
    said = capsys.readouterr()
    done = json.loads(said.out)
    assert done["path"] == str(target)
    assert done["calibration_tokens"] > 0
    assert "Layer 2 of 2 is quantized." in said.err
    assert stored_format(target) == "w4a16"


def test_a_bad_line_is_named(tmp_path: Path) -> None:
    model, calib = make_tiny_model(tmp_path / "model"), tmp_path / "calib.jsonl"
    calib.write_text('{"text": "fine and good"}\n{"no": "text"}\n', "utf-8")
    with pytest.raises(CommandError, match=r"Line 2 of calib\.jsonl has no text") as caught:
        quantize(str(model), Method.AWQ, group=32, calib=calib, out=tmp_path / "small")
    assert caught.value.code == Exit.REFUSED
    assert not (tmp_path / "small").exists()
