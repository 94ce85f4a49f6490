"""The money of interactive calls on both databases: held before, charged once, and the same in every book."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from alembic import command
from sqlalchemy import select, text

from batchsvc.accounts import administration
from batchsvc.audit.actor import at_command_line
from batchsvc.batches.reconcile import Report
from batchsvc.batches.reconcile_ledger import compare_books
from batchsvc.batches.reconcile_queries import Reader
from batchsvc.billing import call_service, money_api, queries, service
from batchsvc.billing.call_service import Lack, PricedCall
from batchsvc.billing.month import Month
from batchsvc.billing.tables import UsageHour
from batchsvc.db import migrate
from batchsvc.db.session import Database, database_now_ms
from tests.batchsvc.billing.books import Books

MODEL = "smollm2-135m"
TOKENS = {"input_tokens": 600, "cached_tokens": 512, "output_tokens": 100}
COST = 12_320  # README's example, at the standard tier


@pytest.fixture
def books(migrated_url: str) -> Iterator[Books]:
    made = Books(migrated_url)
    yield made
    made.db.dispose()


def priced(books: Books, name: str, project: str | None = None, endpoint: str = "/v1/chat/completions") -> PricedCall:
    with books.db.reading() as session:
        return call_service.price(
            session,
            f"call_{name}",
            project_id=project or books.project,
            api_key_id="k",
            model_id=MODEL,
            endpoint=endpoint,
        )


def hold(books: Books, name: str, amount: int, life_s: float = 60) -> Lack | None:
    call = priced(books, name)
    return books.db.run(lambda session: call_service.hold(session, call, amount, life_s))


def post(books: Books, call: PricedCall, cost: int = COST) -> bool:
    return books.db.run(lambda session: call_service.post(session, call, **TOKENS, cost_nanos=cost))


def room(books: Books) -> int | None:
    with books.db.transaction() as session:
        return service.room_nanos(session, books.project)


def limit(books: Books, **changes: object) -> None:
    with books.db.transaction() as session:
        administration.change_project(session, at_command_line(), books.project, changes)


def num_differences(books: Books) -> int:
    reader, report = Reader(books.db.url), Report()
    compare_books(reader, report)
    reader.close()
    return report.num_differences


def test_what_a_call_may_cost_is_held_until_it_ends(books: Books) -> None:
    limit(books, budget_nanos=100_000)
    assert hold(books, "a", 60_000) is None and room(books) == 40_000
    assert hold(books, "b", 50_000) == Lack(40_000, 60_000), "it says what is left, and holds nothing"
    assert room(books) == 40_000
    with books.db.reading() as session:
        assert money_api.balance(session, books.project)["room_nanos"] == 40_000
    assert post(books, priced(books, "a")) and room(books) == 100_000 - COST
    assert hold(books, "c", 80_000) is None
    books.db.run(lambda session: call_service.drop_hold(session, "call_c"))
    assert room(books) == 100_000 - COST


def test_a_hold_whose_process_died_expires(books: Books) -> None:
    limit(books, budget_nanos=100_000)
    assert hold(books, "a", 100_000, life_s=-1) is None
    assert room(books) == 100_000 and hold(books, "b", 100_000) is None
    with books.db.reading() as session:
        assert session.execute(text("SELECT id FROM call_holds")).scalars().all() == ["call_b"]


def test_a_hold_goes_on_as_long_as_its_call_says_so_and_never_again(books: Books) -> None:
    limit(books, budget_nanos=100_000)
    hold(books, "a", 60_000, life_s=-1)
    books.db.run(lambda session: call_service.renew_hold(session, "call_a", 60))
    assert room(books) == 40_000
    books.db.run(lambda session: call_service.drop_hold(session, "call_a"))
    books.db.run(lambda session: call_service.renew_hold(session, "call_a", 60))
    assert room(books) == 100_000


def test_calls_at_once_can_not_overspend(books: Books) -> None:
    limit(books, budget_nanos=100_000)
    with ThreadPoolExecutor(4) as pool:
        held = list(pool.map(lambda n: hold(books, str(n), 30_000), range(8)))
    assert held.count(None) == 3 and room(books) == 10_000


def test_a_prepaid_balance_is_spent_by_calls(books: Books) -> None:
    limit(books, is_prepaid=True)
    assert hold(books, "a", 1) == Lack(0, 0)
    books.db.run(lambda session: service.post_topup(session, books.project, 20_000, reason="r", key="t"))
    assert hold(books, "a", 15_000) is None and post(books, priced(books, "a"))
    assert room(books) == 20_000 - COST


def test_a_call_is_charged_once_and_every_book_has_it(books: Books) -> None:
    call = priced(books, "a")
    assert post(books, call) and not post(books, call) and not post(books, call, cost=1)
    with books.db.reading() as session:
        now_ms = database_now_ms(session)
        funds = queries.funds(session, books.project)
        assert (funds.available_nanos, funds.reserved_nanos, funds.month_nanos) == (-COST, 0, COST)
        assert queries.charged_nanos(session, books.project, None) == COST
    month = Month.of(now_ms)
    assert books.used_nanos(month) == books.revenue_nanos(month) == COST
    (movement,) = books.statement(str(month))["movements"]
    assert (movement["kind"], movement["amount_nanos"]) == ("call", -COST)
    assert books.draft(str(month)).net_nanos == COST
    assert num_differences(books) == 0


def test_hours_keep_projects_and_endpoints_apart(books: Books) -> None:
    other = books.add_project("other")
    for number, (project, endpoint) in enumerate(
        [(books.project, "/v1/chat/completions"), (other, "/v1/chat/completions"), (other, "/v1/responses")] * 2
    ):
        post(books, priced(books, str(number), project, endpoint))
    with books.db.reading() as session:
        rows = session.scalars(select(UsageHour).where(UsageHour.batch_id == "")).all()
    found = {(row.project_id, row.endpoint): (row.requests, row.cost_nanos) for row in rows}
    assert len(found) == 3 and sum(requests for requests, _ in found.values()) == 6
    assert all(cost == requests * COST for requests, cost in found.values())
    assert num_differences(books) == 0


def test_an_audit_sees_a_call_whose_books_differ(books: Books) -> None:
    post(books, priced(books, "a"))
    with books.db.transaction() as session:
        queries.insert_usage(
            session,
            {
                "part_id": "call_stray",
                "project_id": books.project,
                "api_key_id": "k",
                "batch_id": queries.NO_BATCH,
                "model": MODEL,
                "tier": "standard",
                "price_version": 1,
                "created_ms": database_now_ms(session),
                "requests": 1,
                **TOKENS,
                "cost_nanos": 5,
            },
        )
    assert num_differences(books) == 1


def test_hours_of_older_usage_survive_the_migration_up_and_down(database_url: str) -> None:
    database = Database(database_url)
    hour = 3_600_000
    insert_usage = text(
        "INSERT INTO usage (part_id, project_id, api_key_id, batch_id, model, tier, endpoint, price_version,"
        " created_ms, requests, input_tokens, cached_tokens, output_tokens, cost_nanos)"
        " VALUES (:id, 'p', 'k', :batch, 'm', 't', 'e', 1, :ms, 1, 2, 0, 3, 4)"
    )
    with database.engine.begin() as connection:
        command.upgrade(migrate._config(connection), "0010")
        for number in range(4):
            connection.execute(insert_usage, {"id": f"q{number}", "batch": f"b{number % 2}", "ms": hour + number})
    migrate.upgrade(database_url)
    of_project = insert_usage.text.replace("'p'", ":project")
    with database.engine.begin() as connection:
        for number, project in enumerate("ppr"):
            given = {"id": f"call_{number}", "project": project, "batch": "", "ms": hour + number}
            connection.execute(text(of_project), given)
        connection.execute(insert_usage, {"id": "q9", "batch": "b1", "ms": hour})
    sums = text("SELECT batch_id, project_id, requests, cost_nanos FROM usage_hours ORDER BY batch_id, project_id")
    batches, calls = [("b0", "p", 2, 8), ("b1", "p", 3, 12)], [("", "p", 2, 8), ("", "r", 1, 4)]
    with database.engine.connect() as connection:
        assert [tuple(row) for row in connection.execute(sums)] == calls + batches
    with database.engine.begin() as connection:
        command.downgrade(migrate._config(connection), "0010")
        assert [tuple(row) for row in connection.execute(sums)] == batches, "whose the calls are has no place there"
        connection.execute(insert_usage, {"id": "q10", "batch": "b2", "ms": hour})
    migrate.upgrade(database_url)
    with database.engine.connect() as connection:
        assert [tuple(row) for row in connection.execute(sums)] == [*calls, *batches, ("b2", "p", 1, 4)]
    database.dispose()


def test_the_migration_reads_no_usage_of_batches(migrated_url: str) -> None:
    """Hours are what they were, were they right or not: their table isn't made again."""
    database = Database(migrated_url)
    with database.engine.begin() as connection:
        command.downgrade(migrate._config(connection), "0010")
        connection.execute(
            text(
                "INSERT INTO usage_hours (batch_id, hour_ms, model, project_id, api_key_id, tier, endpoint,"
                " price_version, requests, input_tokens, cached_tokens, output_tokens, cost_nanos)"
                " VALUES ('b', 0, 'm', 'p', 'k', 't', 'e', 1, 7, 0, 0, 0, 0)"
            )
        )
    migrate.upgrade(migrated_url)
    with database.engine.connect() as connection:
        assert connection.execute(text("SELECT requests, call_group FROM usage_hours")).one() == (7, "")
    database.dispose()
