"""A data directory whose stack doesn't run is copied and restored: its object store runs alone meanwhile."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from batchsvc.accounts import service as accounts
from batchsvc.cli.app import app
from batchsvc.db.session import Database
from batchsvc.files.tables import File
from batchsvc.stack.datadir import DataDir, InUseError
from batchsvc.stack.store_alone import store_alone
from batchsvc.store import keys
from batchsvc.store.s3 import ObjectStore
from tests.e2e.conftest import processes_of


def run(*words: object) -> Result:
    return CliRunner().invoke(app, [str(word) for word in words])


def test_a_stopped_data_directory_moves_with_its_keys(migrated_sqlite: Path, tmp_path: Path) -> None:
    here, there = DataDir.at(tmp_path / "here"), DataDir.at(tmp_path / "there")
    here.create()
    shutil.copy(migrated_sqlite, here.database)
    here.write_json("ports.json", {"control": 23_456})
    here.write_secret("api_key", "the key of a user")
    db = Database(here.database_url)
    with db.transaction() as session:
        project = accounts.create_project(session, "p")
    key = keys.input_file(project.id, "file-x")
    with store_alone(here) as settings:
        store = ObjectStore(settings)
        store.ensure_bucket()
        etag = store.put(key, b"input")
        with pytest.raises(InUseError), store_alone(here):
            raise AssertionError("one at a time")
    assert here.read_json("ports.json")["control"] == 23_456, "workers keep their ports"
    with db.transaction() as session:
        names = {"purpose": "batch", "filename": "in.jsonl", "sha256": "x", "size_bytes": 5, "created_ms": 1}
        session.add(File(id="file-x", project_id=project.id, s3_key=key, etag=etag, **names))
    db.dispose()
    made = run("backup", tmp_path / "b", "--data-dir", here.root, "--include-secrets", "--json")
    assert made.exit_code == 0, (made.output, made.exception)
    assert json.loads(made.stdout)["num_objects"] == 1
    back = run("restore", tmp_path / "b", "--data-dir", there.root)
    assert back.exit_code == 0, (back.output, back.exception)
    assert there.api_key.read_text() == "the key of a user\n"
    own, old = ((directory.secrets / "secret_key").read_text().strip() for directory in (there, here))
    assert own.endswith(f",{old}"), "its own key seals, both open"
    assert "isn't empty" in str(run("restore", tmp_path / "b", "--data-dir", there.root).exception)
    with store_alone(there) as settings:
        assert ObjectStore(settings).get(key) == b"input"
    assert not processes_of(here) and not processes_of(there), "no store stays behind"
