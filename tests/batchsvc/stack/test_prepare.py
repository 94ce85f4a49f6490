"""A prepared data directory has its schema, prices, keys and models; preparing it again changes nothing."""

from __future__ import annotations

from pathlib import Path

import pytest

from batchsvc.accounts import service as accounts
from batchsvc.batches import models
from batchsvc.billing import service as billing
from batchsvc.db.session import Database
from batchsvc.errors import UnavailableError
from batchsvc.stack.datadir import DataDir
from batchsvc.stack.prepare import located, prepare_database, prepare_model, registered_path
from engine.load import fetch
from tests.tiny import make_tiny_model


def test_preparing_twice_is_preparing_once(tmp_path: Path) -> None:
    directory = DataDir(tmp_path / "d")
    directory.create()
    database = Database(directory.database_url)
    prepare_database(directory, database)
    first = (directory.api_key.read_text(), directory.admin_key.read_text())
    prepare_database(directory, database)
    assert (directory.api_key.read_text(), directory.admin_key.read_text()) == first
    with database.reading() as session:
        user, admin = (accounts.caller(session, text.strip()) for text in first)
        assert (user.is_admin, admin.is_admin) == (False, True)
        assert user.project_id == admin.project_id
        assert len(accounts.list_keys(session)) == 2
        assert billing.current_version(session) > 0
    database.dispose()


def test_a_lost_database_gets_new_keys(tmp_path: Path) -> None:
    directory = DataDir(tmp_path / "d")
    directory.create()
    directory.write_secret("api_key", "sk_of_a_database_that_is_gone")
    database = Database(directory.database_url)
    prepare_database(directory, database)
    with database.reading() as session:
        accounts.caller(session, directory.api_key.read_text().strip())
    database.dispose()


def test_models_are_found_by_name_and_alias(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = DataDir(tmp_path / "d")
    directory.create()
    assert registered_path(directory, "x") is None
    database = Database(directory.database_url)
    prepare_database(directory, database)
    tiny = str(make_tiny_model(tmp_path / "tiny"))
    prepare_model(database, tiny, lambda _: None)
    database.run(lambda session: models.alias(session, "gpt", tiny))
    assert registered_path(directory, "gpt") == registered_path(directory, tiny) == tiny
    monkeypatch.setitem(fetch.KNOWN_MODELS, "shipped", fetch.KNOWN_MODELS["smollm2-135m"])
    for fetched_by in ("pull", "_from_hub"):
        monkeypatch.setattr(fetch, fetched_by, lambda *_: Path(tiny))
    for name in ("shipped", "hf:some/model"):
        prepare_model(database, name, lambda _: None)
        assert registered_path(directory, name) == name, "another machine has its own cache"
        assert located(name, lambda _: None).registration("mine")["path"] == name
    with pytest.raises(UnavailableError, match="nowhere"):
        prepare_model(database, "nowhere", lambda _: None)
    database.dispose()
