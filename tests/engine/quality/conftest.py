"""A cache of quality of the test's own, and figures in place of measurements."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from engine.quality import kept
from engine.quality.figures import Quality
from engine.quality.measure import Reference
from tests.engine.quality.made import made_quality

Pretend = Callable[..., list[tuple[str, str, str]]]


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The user's cache directory."""
    monkeypatch.setattr(kept.platformdirs, "user_cache_path", lambda *_, **__: tmp_path / "cache")
    return tmp_path / "cache"


@pytest.fixture
def pretend(cache: Path, monkeypatch: pytest.MonkeyPatch) -> Pretend:
    """Lets formats cost what the test says, by the format that isn't bf16; gives the list of what was measured as
    (base, weights, KV)."""

    def install(**costs: dict[str, object]) -> list[tuple[str, str, str]]:
        measured: list[tuple[str, str, str]] = []

        def compare(self: Reference, _model: str, weight_format: str, kv_format: str) -> Quality:
            measured.append((self.meta.path.name, weight_format, kv_format))
            name = weight_format if kv_format == "bf16" else f"kv_{kv_format}"
            formats = {"weight_format": weight_format, "kv_format": kv_format, "against": self.meta.digest}
            return made_quality(**formats, **costs.get(name, {}))

        monkeypatch.setattr(Reference, "compare", compare)
        return measured

    return install
