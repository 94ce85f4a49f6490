"""Sides that don't doze between turns, and a tiny model of the shape that the fused kernels serve."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine.split import decode, peers, prefill
from tests.tiny import make_tiny_model


@pytest.fixture(scope="session")
def fused_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("models") / "fused", hidden=128, mlp=192, heads=4, kv_heads=2)


@pytest.fixture
def _no_dozing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefill, "_WAIT_S", 0.001)
    monkeypatch.setattr(prefill, "_AGAIN_S", 0.01)
    monkeypatch.setattr(decode, "_WAIT_S", 0.001)
    monkeypatch.setattr(peers, "_AGAIN_S", 0.02)
    monkeypatch.setattr(peers, "_REFUSED_AGAIN_S", 0.1)
