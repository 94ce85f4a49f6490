"""Usage rows and their sums by hour say the same on both databases, and questions go through the indexes."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
from alembic import command
from sqlalchemy import insert, inspect, select, text
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.exc import IntegrityError

from batchsvc.accounts.tables import Project
from batchsvc.batches.tables import Batch
from batchsvc.billing import usage_queries, usage_service
from batchsvc.billing.line_items import Usage
from batchsvc.billing.tables import UsageHour, UsageRow
from batchsvc.billing.usage import Kind
from batchsvc.db import migrate
from batchsvc.db.session import Database
from batchsvc.errors import InvalidRequestError

HOUR_MS, DAY_MS = 3_600_000, 86_400_000
START_MS = 1_790_000_000_000 // DAY_MS * DAY_MS
SUMS = ("requests", "input_tokens", "cached_tokens", "output_tokens", "cost_nanos")


@pytest.fixture
def db(database_url: str) -> Iterator[Database]:
    migrate.upgrade(database_url)
    database = Database(database_url)
    yield database
    database.dispose()


def row(part: str, batch: int, created_ms: int, **changes: Any) -> dict[str, Any]:
    values = {
        "part_id": part,
        "project_id": f"p{batch % 3}",
        "api_key_id": f"k{batch % 5}",
        "batch_id": f"b{batch}",
        "model": f"m{batch % 4}",
        "tier": "batch_24h",
        "endpoint": "/v1/embeddings" if batch % 7 == 0 else "/v1/chat/completions",
        "price_version": 1 + batch % 2,
        "created_ms": created_ms,
        "requests": 2,
        "input_tokens": 10,
        "cached_tokens": 4,
        "output_tokens": 3,
        "cost_nanos": 100,
    }
    return values | changes


def random_rows(seed: int, number: int) -> list[dict[str, Any]]:
    dice = random.Random(seed)
    rows = []
    for i in range(number):
        sign = dice.choice((1, 1, 1, -1))
        input_tokens = dice.randrange(5000)
        # near the edges of hours and days as often as anywhere
        edge = START_MS + dice.randrange(-5, 200) * HOUR_MS + dice.choice((-1, 0, 1))
        at = dice.choice((edge, START_MS + dice.randrange(200 * HOUR_MS)))
        tokens = {
            "requests": dice.randrange(512),
            "input_tokens": input_tokens,
            "cached_tokens": dice.randrange(input_tokens + 1),
            "output_tokens": dice.randrange(5000),
            "cost_nanos": dice.randrange(10**12),
        }
        rows.append(row(f"part{i}", dice.randrange(12), at, **{name: sign * n for name, n in tokens.items()}))
    return rows


@pytest.mark.parametrize("seed", [1, 2])
def test_hours_are_the_sums_of_their_rows(db: Database, seed: int) -> None:
    rows = random_rows(seed, 600)
    for at in range(0, len(rows), 100):
        with db.transaction() as session:
            session.execute(insert(UsageRow), rows[at : at + 100])
    with db.transaction() as session:
        session.execute(insert(UsageRow), [row("undone", 1, START_MS)])
        session.rollback()
    with db.transaction() as session:  # the same part again is nothing, in both tables
        again = {"postgresql": postgresql.insert, "sqlite": sqlite.insert}[session.get_bind().dialect.name](UsageRow)
        session.execute(again.values(rows[:5]).on_conflict_do_nothing(index_elements=["part_id"]))
    expected: dict[tuple[str, int], Usage] = {}
    for item in rows:
        key = (item["batch_id"], item["created_ms"] // HOUR_MS * HOUR_MS)
        expected[key] = expected.get(key, Usage()) + Usage(**{name: item[name] for name in SUMS})
    with db.reading() as session:
        found = session.scalars(select(UsageHour)).all()
        sums = {(h.batch_id, h.hour_ms): Usage(**{name: getattr(h, name) for name in SUMS}) for h in found}
        assert sums == expected
        for hour in found:
            batch = int(hour.batch_id[1:])
            like = row("x", batch, 0)
            names = ("project_id", "api_key_id", "model", "tier", "endpoint", "price_version")
            assert [getattr(hour, name) for name in names] == [like[name] for name in names]


def test_any_question_is_answered_as_if_every_row_were_read(db: Database) -> None:
    """The rollup can't be told from the rows, whatever hours the question begins and ends in."""
    rows, dice = random_rows(3, 500), random.Random(4)
    with db.transaction() as session:
        session.execute(insert(UsageRow), rows)
    for _ in range(40):
        start_s = START_MS // 1000 + dice.randrange(-10_000, 600_000)
        end_s = start_s + dice.choice((1, 60, 3_599, 3_600, 90_000, 500_000)) + dice.randrange(3)
        width, width_s = dice.choice((("1m", 60), ("1h", 3_600), ("1d", 86_400)))
        given = [("start_time", str(start_s)), ("end_time", str(end_s)), ("bucket_width", width)]
        given += [("group_by[]", "model"), ("group_by[]", "api_key_id"), ("project_ids[]", "p1"), ("project_ids", "p2")]
        with db.reading() as session:
            page = usage_service.answer(session, Kind.COMPLETIONS, [*given, ("limit", "24")])
        found = {
            (bucket["start_time"], result["model"], result["api_key_id"]): (
                result["input_tokens"],
                result["cost_nanos"],
            )
            for bucket in page["data"]
            for result in bucket["results"]
        }
        until_s = page["data"][-1]["end_time"]
        tokens: Counter[tuple[int, str, str]] = Counter()
        cost: Counter[tuple[int, str, str]] = Counter()
        for item in rows:
            at_ms = item["created_ms"]
            is_asked = start_s * 1000 <= at_ms < until_s * 1000 and item["project_id"] in ("p1", "p2")
            if is_asked and item["endpoint"] != "/v1/embeddings":
                key = (max(at_ms // 1000 // width_s * width_s, start_s), item["model"], item["api_key_id"])
                tokens[key] += item["input_tokens"]
                cost[key] += item["cost_nanos"]
        assert found == {key: (tokens[key], cost[key]) for key in tokens}


def test_more_cached_tokens_than_input_is_refused(db: Database) -> None:
    for input_tokens, cached_tokens in ((10, 11), (10, -1), (-10, -11), (-10, 1), (0, 1)):
        tokens = {"input_tokens": input_tokens, "cached_tokens": cached_tokens}
        with pytest.raises(IntegrityError), db.transaction() as session:
            session.execute(insert(UsageRow), [row("part", 1, START_MS, **tokens)])
    with db.reading() as session:
        assert session.scalars(select(UsageRow)).all() == session.scalars(select(UsageHour)).all() == []


def test_usage_of_the_version_before_is_counted_and_goes_on_being_counted(database_url: str) -> None:
    """An old worker, which knows no hours, still inserts while the new version starts."""
    database = Database(database_url)
    old = {name: n for name, n in row("part1", 1, START_MS).items() if name not in ("endpoint", "price_version")}
    add = text(f"INSERT INTO usage ({', '.join(old)}) VALUES ({', '.join(':' + name for name in old)})")
    with database.engine.begin() as connection:
        command.upgrade(migrate._config(connection), "0002")
        batch = {"id": "b1", "project_id": "p", "endpoint": "/v1/embeddings", "price_version": 7, "metadata": None}
        connection.execute(
            text("INSERT INTO projects (id, name, salt, weight, created_ms) VALUES ('p', 'p', 's', 1, 0)")
        )
        columns = {column["name"]: column for column in inspect(connection).get_columns("batches")}
        for name, column in columns.items():
            if name not in batch and not column["nullable"]:
                batch[name] = {int: 0, str: "", bool: False}[column["type"].python_type]
        names = ", ".join(batch)
        connection.execute(
            text(f"INSERT INTO batches ({names}) VALUES ({', '.join(':' + name for name in batch)})"), batch
        )
        connection.execute(add, [old, {**old, "part_id": "part2", "created_ms": START_MS + 1}])
    migrate.upgrade(database_url)
    with database.transaction() as session:
        session.execute(add, {**old, "part_id": "part3", "created_ms": START_MS + 2})
    with database.reading() as session:
        (hour,) = session.scalars(select(UsageHour)).all()
        assert (hour.batch_id, hour.hour_ms, hour.endpoint, hour.price_version) == ("b1", START_MS, "/v1/embeddings", 7)
        assert (hour.requests, hour.input_tokens, hour.cost_nanos) == (6, 30, 300)
    database.dispose()


def test_metadata_of_batches_are_a_group(db: Database) -> None:
    teams = {"b1": {"team": "red", "it's": "1"}, "b2": {"team": "blue"}, "b3": None, "b4": {"team": "red"}, "b5": {}}
    with db.transaction() as session:
        session.add(Project(id="p", name="p", salt="s", created_ms=0))
        session.flush()
        for batch_id, metadata in teams.items():
            session.add(
                Batch(
                    id=batch_id,
                    project_id="p",
                    api_key_id="k",
                    endpoint="/v1/chat/completions",
                    input_file_id="f",
                    completion_window="24h",
                    tier="batch_24h",
                    metadata_json=metadata,
                    status="completed",
                    created_ms=0,
                    expires_ms=0,
                    price_version=1,
                )
            )
        session.execute(insert(UsageRow), [row(f"part{i}", i, START_MS, cost_nanos=10**i) for i in range(1, 6)])
    given = [("start_time", str(START_MS // 1000)), ("limit", "1")]

    def amounts(group: str) -> dict[Any, int]:
        with db.reading() as session:
            (bucket,) = usage_service.answer(session, Kind.COSTS, [*given, ("group_by[]", group)])["data"]
            return {result[group]: result["amount_nanos"] for result in bucket["results"]}

    assert amounts("metadata.team") == {"red": 10 + 10_000, "blue": 100, None: 101_000}
    assert amounts("metadata.it's") == {"1": 10, None: 111_100}
    for unheard in ('metadata."', 'metadata.a"b', "metadata.a\\b"):  # SQLite's paths have no way to say these
        with pytest.raises(InvalidRequestError, match="group_by can't be"):
            amounts(unheard)
    with db.reading() as session:
        (bucket,) = usage_service.answer(session, Kind.COSTS, [*given, ("group_by[]", "batch_id")])["data"]
    assert [(r["batch_id"], r["metadata"]) for r in bucket["results"]] == [
        ("b1", teams["b1"]),
        ("b2", teams["b2"]),
        ("b3", None),
        ("b4", teams["b4"]),
        ("b5", None),
    ]


def test_questions_go_through_their_index(db: Database) -> None:
    with db.transaction() as session:  # two and a half years of usage, of which a month is asked for
        rows = [row(f"part{i}", i % 50, START_MS + i * 7 * HOUR_MS) for i in range(3_000)]
        session.execute(insert(UsageRow), rows)
    with db.transaction() as session:
        session.execute(text("ANALYZE"))
    at = START_MS + 400 * DAY_MS
    for whole_hours, length_ms, width_ms, index in (
        (True, 31 * DAY_MS, DAY_MS, "ix_usage_hours_time"),
        (False, HOUR_MS, 60_000, "ix_usage_created"),
    ):
        with db.reading() as session:
            query = usage_queries.query_of(whole_hours, at, at + length_ms, width_ms, ["model"])
            compiled = query.compile(session.get_bind(), compile_kwargs={"literal_binds": True})
            explain = "EXPLAIN QUERY PLAN" if db.is_sqlite else "EXPLAIN"
            plan = "\n".join(str(line) for line in session.execute(text(f"{explain} {compiled}")).all())
        assert index in plan and "Seq Scan" not in plan and "SCAN usage" not in plan, plan
