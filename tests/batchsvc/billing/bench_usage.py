"""How long usage by day and model takes over 2,000,000 usage rows on PostgreSQL: prints the figures, asserts no speed.

    python -m tests.batchsvc.billing.bench_usage [--rows N]

The rows are those of 20,000 batches, 100 parts each, spread over the 31 days that are asked for. The sums by hour are
filled at once, as a trigger would row by row, and compared with the rows. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from typing import Any

from sqlalchemy import text
from sqlalchemy.orm import Session

from batchsvc.billing import usage_queries, usage_service
from batchsvc.billing.usage import Kind
from batchsvc.db import migrate
from batchsvc.db.session import Database
from tests import servers

DAY_S, DAYS, REPEATS = 86_400, 31, 5
START_S = 1_760_000_000 // DAY_S * DAY_S
PARTS = 100  # of a batch
FILL = """
INSERT INTO usage (part_id, project_id, api_key_id, batch_id, model, tier, endpoint, price_version, created_ms,
                   requests, input_tokens, cached_tokens, output_tokens, cost_nanos)
SELECT 'part_' || n, 'proj_' || b % 20, 'key_' || b % 50, 'batch_' || b, 'model-' || b % 12, 'batch_24h',
       '/v1/chat/completions', 1, CAST(:start AS bigint) + (b * 7919 % :starts) * 1000 + n % :parts * 60000,
       500, 20000 + n % 997, 9000 + n % 499, 15000 + n % 1009, 1000000 + n % 99991
FROM (SELECT n, n / :parts AS b FROM generate_series(CAST(0 AS bigint), :rows - 1) AS n) AS numbered
"""
ROLL_UP = """
INSERT INTO usage_hours (hour_ms, batch_id, project_id, api_key_id, model, tier, endpoint, price_version,
                         requests, input_tokens, cached_tokens, output_tokens, cost_nanos)
SELECT created_ms / 3600000 * 3600000, batch_id, project_id, api_key_id, model, tier, endpoint, price_version,
       SUM(requests), SUM(input_tokens), SUM(cached_tokens), SUM(output_tokens), SUM(cost_nanos)
FROM usage GROUP BY created_ms / 3600000, batch_id, project_id, api_key_id, model, tier, endpoint, price_version
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=2_000_000)
    rows = parser.parse_args().rows
    with servers.start_postgres() as maintenance, servers.fresh_database(maintenance) as url:
        migrate.upgrade(url)
        database = Database(url)
        begin = time.perf_counter()
        _fill(database, rows)
        print(f"{rows:,} usage rows in {time.perf_counter() - begin:.1f} s", flush=True)
        print(json.dumps(_measured(database, rows)))
        database.dispose()


def _fill(database: Database, rows: int) -> None:
    with database.transaction() as session:
        session.execute(text("SET LOCAL statement_timeout = 0"))
        session.execute(text("ALTER TABLE usage DISABLE TRIGGER usage_by_hour"))
        starts = (DAYS * DAY_S) - PARTS * 60
        session.execute(text(FILL), {"start": START_S * 1000, "starts": starts, "parts": PARTS, "rows": rows})
        session.execute(text(ROLL_UP))
        session.execute(text("ALTER TABLE usage ENABLE TRIGGER usage_by_hour"))
    with database.engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        connection.execute(text("SET statement_timeout = 0"))
        connection.execute(text("VACUUM ANALYZE usage, usage_hours"))


def _measured(database: Database, rows: int) -> dict[str, Any]:
    month = [("start_time", str(START_S)), ("end_time", str(START_S + DAYS * DAY_S)), ("limit", str(DAYS))]
    day = [("start_time", str(START_S + 9 * DAY_S)), ("end_time", str(START_S + 10 * DAY_S))]
    minutes = [*day, ("bucket_width", "1m"), ("limit", "1440")]

    def asked(kind: Kind, arguments: list[tuple[str, str]], *groups: str) -> Callable[[Session], Any]:
        given = [*arguments, *(("group_by[]", group) for group in groups)]
        return lambda session: usage_service.answer(session, kind, given)

    def by_rows(session: Session) -> Any:
        """The same from the rows themselves, which the hours are compared with."""
        edges = (START_S * 1000, (START_S + DAYS * DAY_S) * 1000)
        return list(session.execute(usage_queries.query_of(False, *edges, DAY_S * 1000, ["model"])).all())

    figures: dict[str, Any] = {"rows": rows, "days": DAYS}
    for name, question in (
        ("usage_by_day_and_model_ms", asked(Kind.COMPLETIONS, month, "model")),
        ("costs_by_day_and_line_item_ms", asked(Kind.COSTS, month, "line_item")),
        ("a_day_by_minute_and_model_ms", asked(Kind.COMPLETIONS, minutes, "model")),
        ("without_hours_ms", by_rows),
    ):
        times = []
        for _ in range(REPEATS):
            with database.reading() as session:
                begin = time.perf_counter()
                answer = question(session)
                times.append((time.perf_counter() - begin) * 1000)
        figures[name] = round(statistics.median(times), 1)
        print(f"{name}: median {statistics.median(times):.0f}, first {times[0]:.0f}", flush=True)
        if name.startswith("usage"):
            found = sum(r["cost_nanos"] for bucket in answer["data"] for r in bucket["results"])
    with database.reading() as session:
        assert found == session.scalar(text("SELECT SUM(cost_nanos) FROM usage")), "the hours differ from the rows"
        figures["hours"] = session.scalar(text("SELECT count(*) FROM usage_hours"))
    return figures


if __name__ == "__main__":
    main()
