"""Fixtures of planning: the tiny model once a session, a planner on real parts a test."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from batchsvc.settings import Settings
from tests.batchsvc.batches.planned import CONTEXT_TOKENS, Planned, make_planned
from tests.tiny import make_tiny_model


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("tiny") / "model", context_tokens=CONTEXT_TOKENS)


@pytest.fixture
def planned(settings: Settings, tiny_model: Path) -> Iterator[Planned]:
    made = make_planned(settings, tiny_model)
    yield made
    made.db.dispose()
