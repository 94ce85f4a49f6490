"""Formats are measured against float32, verdicts are kept, and `auto` follows them."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine import quality
from engine.config import Formats
from engine.kernels.int8 import Int8Error
from engine.quality import MOST_KL, Quality, measure, resolve_formats

INT8, BF16 = Formats("int8", "int8"), Formats("bf16", "bf16")
GOOD = Quality(weight_format="int8", kv_format="int8", kl=MOST_KL / 2, top1=0.95, perplexity=1.001, is_fused=True)


@pytest.fixture
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(quality.platformdirs, "user_cache_path", lambda *_, **__: tmp_path)
    return tmp_path


def test_int8_stays_within_its_limits_on_the_default_model(default_model: Path) -> None:
    found = measure(str(default_model), "int8", "int8")
    assert found.is_good, found
    assert 0 < found.kl < MOST_KL
    assert found.top1 > 0.9


def test_a_verdict_is_measured_once(tiny_model: Path, kept: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measured: list[str] = []

    def pretend(_model: str, weight_format: str, _kv_format: str) -> Quality:
        measured.append(weight_format)
        return GOOD

    monkeypatch.setattr(quality, "measure", pretend)
    said: list[str] = []
    for _ in range(2):
        assert resolve_formats(str(tiny_model), "auto", "auto", said.append) == (INT8, GOOD)
    assert measured == ["int8"]
    assert len(said) == 1
    for file in (kept / "quality").iterdir():
        file.write_text("{}")
    assert resolve_formats(str(tiny_model), "auto", "auto", said.append) == (INT8, GOOD)
    assert measured == ["int8", "int8"], "a damaged verdict is measured again"


@pytest.mark.parametrize(
    ("changes", "says"), [({"kl": 0.02}, "0.0200"), ({"perplexity": 1.02}, "1.0200"), ({"is_fused": False}, "")]
)
def test_auto_is_bf16_where_int8_costs_too_much_or_brings_nothing(
    tiny_model: Path, kept: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, object], says: str
) -> None:
    values = {name: getattr(GOOD, name) for name in GOOD.__dataclass_fields__} | changes
    monkeypatch.setattr(quality, "measure", lambda *_: Quality(**values))
    said: list[str] = []
    assert resolve_formats(str(tiny_model), "auto", "auto", said.append) == (BF16, None)
    assert says in said[-1]


def test_a_format_that_was_asked_for_is_not_measured(tiny_model: Path) -> None:
    for weight_format in ("bf16", "float32", "int8"):
        kv_format = "float32" if weight_format == "float32" else "bf16"
        found = resolve_formats(str(tiny_model), weight_format, "auto", pytest.fail)
        assert found == (Formats(weight_format, kv_format), None)
        asked = resolve_formats(str(tiny_model), weight_format, "int8", pytest.fail)
        assert asked == (Formats(weight_format, "int8"), None)


def test_auto_is_bf16_where_it_cannot_be_measured(
    tiny_model: Path, kept: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    monkeypatch.setattr(quality, "available_bytes", lambda: 1000)
    assert resolve_formats(str(tiny_model), "auto", "auto", said.append) == (BF16, None)
    assert "too little memory" in said[-1]
    monkeypatch.undo()
    monkeypatch.setattr(quality, "_kept", lambda *_: None)

    def broken(*_: str) -> Quality:
        raise Int8Error("torch multiplies wrongly.")

    monkeypatch.setattr(quality, "measure", broken)
    assert resolve_formats(str(tiny_model), "auto", "auto", said.append) == (BF16, None)
    assert said[-1].endswith("torch multiplies wrongly.")
