"""A control process finds a batch's model in its own cache, wherever the cache of the operator lies."""

from __future__ import annotations

from pathlib import Path

import pytest

from batchsvc.batches.planning import PlanProgress
from batchsvc.batches.tables import Model
from batchsvc.settings import Settings
from engine.load import fetch
from tests.batchsvc.batches.planned import jsonl, line, make_planned
from tests.tiny import make_tiny_model
from workers.context import ControlRun


def test_a_shipped_model_is_located_by_the_process_that_plans(
    sqlite_settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny = make_tiny_model(tmp_path / "tiny")
    monkeypatch.setitem(fetch.KNOWN_MODELS, "shipped", fetch.KNOWN_MODELS["smollm2-135m"])
    monkeypatch.setattr(fetch, "_pull", lambda *_: tiny)
    planned = make_planned(sqlite_settings, tiny)
    with planned.db.transaction() as session:
        session.get_one(Model, "tiny").path = "shipped"
    batch_id = planned.add_batch(jsonl(line("a")))
    control = ControlRun(sqlite_settings)
    assert control.planner.plan(batch_id) == PlanProgress.DONE
    control.close()
    assert planned.batch(batch_id).status == "in_progress", planned.batch(batch_id).errors
    planned.db.dispose()
