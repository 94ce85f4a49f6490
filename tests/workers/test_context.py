"""Worker processes: where they find the model of a batch, and in which formats they serve one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from batchsvc.accounts import service as accounts
from batchsvc.batches import models
from batchsvc.batches.planning import PlanProgress
from batchsvc.batches.tables import Model
from batchsvc.db import migrate
from batchsvc.db.session import Database
from batchsvc.errors import UnavailableError
from batchsvc.settings import Settings
from engine.config import Formats
from engine.errors import ModelError, QualityError
from engine.load import fetch
from engine.load.meta import read_meta
from engine.load.origin import FILE
from engine.quality import kept
from engine.quality.measure import Reference
from engine.spec.heads_file import Heads, save_heads
from engine.spec.heads_loss import initial_parts
from tests.batchsvc.batches.planned import jsonl, line, make_planned
from tests.engine.quality.made import made_quality
from tests.tiny import make_tiny_model
from workers.context import ControlRun, draft_salt, engine_config, open_engine_run


def test_a_shipped_model_is_located_by_the_process_that_plans(
    sqlite_settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny = make_tiny_model(tmp_path / "tiny")
    monkeypatch.setitem(fetch.KNOWN_MODELS, "shipped", fetch.KNOWN_MODELS["smollm2-135m"])
    monkeypatch.setattr(fetch, "pull", lambda *_: tiny)
    planned = make_planned(sqlite_settings, tiny)
    with planned.db.transaction() as session:
        session.get_one(Model, "tiny").path = "shipped"
    batch_id = planned.add_batch(jsonl(line("a")))
    control = ControlRun(sqlite_settings)
    assert control.planner.plan(batch_id) == PlanProgress.DONE
    control.close()
    assert planned.batch(batch_id).status == "in_progress", planned.batch(batch_id).errors
    planned.db.dispose()


def test_a_format_over_its_limit_serves_only_where_that_is_forced(
    sqlite_settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny = make_tiny_model(tmp_path / "tiny")
    monkeypatch.setattr(kept.platformdirs, "user_cache_path", lambda *_, **__: tmp_path / "cache")
    monkeypatch.setattr(Reference, "compare", lambda self, *_: made_quality(against=self.meta.digest, kl=0.06))
    changes = {"model": str(tiny), "weight_format": "int8", "threads": 1, "kv_bytes": 1 << 20}
    settings = sqlite_settings.model_copy(update=changes)
    migrate.upgrade(settings.database_url)
    db = Database(settings.database_url)
    with db.transaction() as session:
        models.register(session, "tiny", str(tiny), digest=read_meta(tiny).digest, context_tokens=512)
    with pytest.raises(QualityError, match=r"tiny isn't served in int8, where its mean KL is 0\.0600 .*force"):
        open_engine_run(settings)
    run = open_engine_run(settings.model_copy(update={"force_format": True}))
    run.start()
    with db.reading() as session:
        row = session.get_one(Model, "tiny")
        assert (row.weight_format, row.kv_format) == ("int8", "bf16")
        assert row.quality is not None
        assert (row.quality["verdict"], row.quality["weights"]["kl"]) == ("over", 0.06)
    run.drain()
    db.dispose()


def test_a_draft_of_a_project_drafts_for_its_requests_alone(migrated_url: str, tmp_path: Path) -> None:
    database = Database(migrated_url)
    with database.transaction() as session:
        project = accounts.create_project(session, "mine")
        known, salt = project.id, project.salt
    for name, lineage in (("open", {}), ("mine", {"project": known}), ("gone", {"project": "proj_gone"})):
        (tmp_path / name).mkdir()
        (tmp_path / name / FILE).write_text(json.dumps(lineage))
    assert draft_salt(database, tmp_path / "open") is None
    assert draft_salt(database, tmp_path / "mine") == salt
    with pytest.raises(UnavailableError, match="proj_gone, which isn't one of this service's"):
        draft_salt(database, tmp_path / "gone")
    database.dispose()


def test_heads_among_the_files_of_a_model_draft_for_their_project_alone(
    sqlite_settings: Settings, tmp_path: Path
) -> None:
    """Who copies them there need not copy batchsvc.json: heads.json names the project, too."""
    tiny = make_tiny_model(tmp_path / "tiny")
    shape = {"model_digest": read_meta(tiny).digest, "hidden": 64, "vocab_size": 384}
    parts = initial_parts(torch.randn(64, 64), num_heads=1, inner=32, seed=1) | {"ids": torch.arange(64).int()}
    made = Heads(num_heads=1, inner=32, parts=parts, **shape)
    settings = sqlite_settings.model_copy(update={"model": str(tiny), "threads": 1})
    migrate.upgrade(settings.database_url)
    database = Database(settings.database_url)
    with database.transaction() as session:
        project = accounts.create_project(session, "mine")
        known, salt = project.id, project.salt

    def drafts_for() -> str | None:
        return engine_config(settings, database, tiny, Formats("float32", "float32")).draft_salt

    assert drafts_for() is None, "there are no heads"
    save_heads(tiny, made, {"project": None})
    assert drafts_for() is None
    save_heads(tiny, made, {"project": known})
    assert drafts_for() == salt
    save_heads(tiny, made, {"project": "proj_gone"})
    with pytest.raises(UnavailableError, match="proj_gone, which isn't one of this service's"):
        drafts_for()
    save_heads(tiny, made, {})
    with pytest.raises(ModelError, match="doesn't say whose lines have trained the heads"):
        drafts_for()
    save_heads(tiny, made, {"project": known})
    (tiny / FILE).write_text(json.dumps({"project": "proj_other"}))
    with pytest.raises(ModelError, match="names another project"):
        drafts_for()
    database.dispose()
