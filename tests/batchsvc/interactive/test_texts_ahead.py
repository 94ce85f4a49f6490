"""Texts of models are read before their first call, once however many ask, and nobody is held up by those that aren't
here."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from batchsvc.batches import models, texts_here, worker_queries
from batchsvc.db.session import Database
from batchsvc.interactive import texts_ahead
from batchsvc.interactive.texts_ahead import TextsAhead
from engine.text import TextModel, load_text
from tests.batchsvc.interactive.conftest import LIVENESS_S, call_settings, opened, until
from tests.tiny import make_tiny_model


class Reading:
    """Counts what is read, and stops reading while it is told to."""

    def __init__(self) -> None:
        self.paths: list[str] = []
        self.goes = threading.Event()
        self.goes.set()

    def __call__(self, path: Path) -> TextModel:
        self.paths.append(str(path))
        self.goes.wait(LIVENESS_S)
        return load_text(path)


@pytest.fixture
def reading(monkeypatch: pytest.MonkeyPatch) -> Iterator[Reading]:
    texts_here._texts.clear()
    made = Reading()
    monkeypatch.setattr(texts_here, "load_text", made)
    monkeypatch.setattr(texts_ahead, "_EVERY_S", 0.05)
    yield made
    made.goes.set()
    texts_here._texts.clear()


def test_an_api_reads_the_texts_of_models_before_a_call_does(
    sqlite_url: str, calls_redis: str, tiny: Path, tmp_path: Path, reading: Reading
) -> None:
    with opened(call_settings(sqlite_url, calls_redis), tiny) as place:
        until(lambda: reading.paths == [str(tiny)], "the model that was there is read")
        later = make_tiny_model(tmp_path / "later", seed=9)
        register(place.db, "later", later)
        until(lambda: reading.paths == [str(tiny), str(later)], "so is one that came later")
        assert place.post(model="later").json()["error"]["code"] == "no_worker", "its prompt was read"
        assert place.post().json()["error"]["code"] == "no_worker"
        assert len(reading.paths) == 2, "by nobody once more"


def test_an_api_is_ready_and_ends_while_it_reads(
    sqlite_url: str, calls_redis: str, tiny: Path, reading: Reading, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(texts_ahead, "_END_S", 0.1)
    reading.goes.clear()
    with opened(call_settings(sqlite_url, calls_redis), tiny) as place:
        until(lambda: reading.paths, "it reads")
        said = place.http.get(f"{place.url}/readyz").json()
        assert {said["parts"]["database"], said["parts"]["redis"]} == {"ok"}, "the store isn't there in this test"
        with ThreadPoolExecutor(4) as pool:
            answers = [pool.submit(place.post) for _ in range(4)]
            assert not any(answer.done() for answer in answers)
            reading.goes.set()
            assert {answer.result(LIVENESS_S).json()["error"]["code"] for answer in answers} == {"no_worker"}
        assert reading.paths == [str(tiny)], "all waited for the same"
        reading.goes.clear()


def test_models_that_can_not_be_read_are_tried_once_and_the_others_all_the_same(
    sqlite_url: str, tiny: Path, tmp_path: Path, reading: Reading
) -> None:
    db = Database(sqlite_url)
    broken, other = tmp_path / "broken", make_tiny_model(tmp_path / "other", seed=11)
    broken.mkdir()
    register(db, "tiny", tiny)
    with db.transaction() as session:
        models.register(session, "gone", "/nowhere/at/all", digest="1" * 64, context_tokens=9)
        models.register(session, "broken", str(broken), digest="2" * 64, context_tokens=9)
        models.register(session, "replaced", str(other), digest="3" * 64, context_tokens=9)
    ahead = TextsAhead(db)
    for _ in range(3):
        ahead.look()
    assert sorted(reading.paths) == sorted(map(str, (broken, other, tiny)))
    db.dispose()


def test_no_more_are_read_ahead_than_are_kept_and_those_of_workers_first(
    sqlite_url: str, tmp_path: Path, reading: Reading
) -> None:
    db = Database(sqlite_url)
    paths = [make_tiny_model(tmp_path / f"m{seed}", seed=seed) for seed in range(6)]
    for path in paths:
        register(db, path.name, path)
    with db.transaction() as session:
        worker_queries.register(session, "h:1:w", load_text(paths[0]).meta.digest)
    ahead = TextsAhead(db)
    for _ in range(2):
        ahead.look()
    assert reading.paths[0] == str(paths[0]) and len(reading.paths) == texts_here.MOST_TEXTS
    db.dispose()


def test_a_database_that_is_away_is_asked_again(tmp_path: Path, reading: Reading) -> None:
    db = Database(f"sqlite:///{tmp_path / 'no' / 'such.sqlite3'}")
    ahead = TextsAhead(db)
    ahead.start()
    ahead.look()
    assert not reading.paths and ahead._thread is not None and ahead._thread.is_alive()
    ahead.close()
    assert not ahead._thread.is_alive()
    db.dispose()


def register(db: Database, name: str, path: Path) -> None:
    meta = load_text(path).meta
    with db.transaction() as session:
        models.register(session, name, str(path), digest=meta.digest, context_tokens=meta.context_tokens)
