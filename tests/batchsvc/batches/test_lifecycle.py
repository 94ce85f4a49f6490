"""Moves of a batch: only allowed ones happen, each once, and a terminal batch never changes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sqlalchemy import event, insert, text

from batchsvc.accounts import service as accounts
from batchsvc.batches import lifecycle, queries, stuck_queries, switch_queries
from batchsvc.batches.lifecycle import ALLOWED, TERMINAL, UNFINISHED, Status
from batchsvc.batches.tables import Batch
from batchsvc.db import migrate
from batchsvc.db.session import Database


@pytest.fixture(scope="module")
def database(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Database]:
    path: Path = tmp_path_factory.mktemp("lifecycle") / "test.sqlite3"
    migrate.upgrade(f"sqlite:///{path}")
    made = Database(f"sqlite:///{path}")
    with made.transaction() as session:
        project = accounts.create_project(session, "p").id
        session.add(
            Batch(
                id="batch_x",
                project_id=project,
                api_key_id="k",
                endpoint="/v1/chat/completions",
                input_file_id="file-x",
                completion_window="24h",
                tier="batch_24h",
                status=Status.VALIDATING,
                created_ms=1,
                expires_ms=2,
                price_version=1,
            )
        )
    yield made
    made.dispose()


def test_the_table_of_moves_is_whole() -> None:
    assert set(ALLOWED) == set(Status)
    assert {Status.COMPLETED, Status.FAILED, Status.EXPIRED, Status.CANCELLED} == TERMINAL
    for status in Status:
        assert lifecycle.sources(status) == {other for other in Status if status in ALLOWED[other]}
    reached, todo = {Status.VALIDATING}, [Status.VALIDATING]
    while todo:
        for to in ALLOWED[todo.pop()] - reached:
            reached.add(to)
            todo.append(to)
    assert reached == set(Status), "every status can be reached"


@given(st.lists(st.sampled_from(list(Status)), max_size=12))
def test_only_allowed_moves_happen(database: Database, wanted: list[Status]) -> None:
    with database.transaction() as session:
        row = session.get_one(Batch, "batch_x")
        row.status = Status.VALIDATING
        row.in_progress_ms = row.finalizing_ms = row.cancelling_ms = row.ended_ms = None
        session.flush()
        now = Status.VALIDATING
        for step, to in enumerate(wanted, start=1):
            moved = lifecycle.move(session, "batch_x", to, now_ms=step)
            assert moved == (to in ALLOWED[now])
            now = to if moved else now
            session.refresh(row)
            assert row.status == now
            assert (row.ended_ms is not None) == (now in TERMINAL)
        session.rollback()


def test_a_fence_that_moved_on_refuses(database: Database) -> None:
    with database.transaction() as session:
        move = lifecycle.move
        fence = {"plan_epoch": 1}
        assert not move(session, "batch_x", Status.IN_PROGRESS, now_ms=5, fence=fence, values={"total": 9})
        assert session.get_one(Batch, "batch_x").total == 0
        assert move(session, "batch_x", Status.IN_PROGRESS, now_ms=5, fence={"plan_epoch": 0}, values={"total": 9})
        row = session.get_one(Batch, "batch_x")
        session.refresh(row)
        assert (row.status, row.total, row.in_progress_ms) == ("in_progress", 9, 5)
        assert not move(session, "batch_nope", Status.FAILED, now_ms=5)
        session.rollback()


def test_unfinished_batches_are_found_by_their_index(migrated_url: str) -> None:
    """However many have ended: they stay for ever."""
    db, asked = Database(migrated_url), []
    with db.transaction() as session:
        project = accounts.create_project(session, "p").id
        row = {"project_id": project, "api_key_id": "k", "endpoint": "/v1/chat/completions", "input_file_id": "file-x"}
        row |= {"completion_window": "24h", "tier": "batch_24h", "expires_ms": 2, "price_version": 1}
        ended = [{**row, "id": f"batch_{no}", "created_ms": no, "status": Status.COMPLETED} for no in range(3_000)]
        session.execute(insert(Batch), [*ended, {**row, "id": "b", "created_ms": 1, "status": Status.IN_PROGRESS}])
        if not db.is_sqlite:  # whose statistics, which nothing of ours makes, don't know how rare a status is
            session.execute(text("ANALYZE"))
    event.listen(db.engine, "before_cursor_execute", lambda *given: asked.append(given[2:4]))
    with db.reading() as session:
        assert [queries.num_open(session, project, key, UNFINISHED) for key in (None, "k", "other")] == [1, 1, 0]
        assert [batch.id for batch in stuck_queries.unfinished(session)] == ["b"]
        assert switch_queries.unfinished(session, "d", 5) == []
    explain = "EXPLAIN QUERY PLAN" if db.is_sqlite else "EXPLAIN"
    questions = [(statement, given) for statement, given in asked if "FROM batches" in statement]
    assert len(questions) == 5
    with db.reading() as session:
        for statement, given in questions:
            plan = str(session.connection().exec_driver_sql(f"{explain} {statement}", given).all())
            is_of_project = db.is_sqlite and "ix_batches_listing" in plan
            assert "ix_batches_status" in plan or is_of_project, plan
    db.dispose()
