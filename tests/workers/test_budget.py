"""Lines are given to the engine only as money allows: nothing is overspent, and nothing that fits is left out."""

from __future__ import annotations

import time
from collections.abc import Iterator
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchsvc.accounts import administration
from batchsvc.audit.actor import at_command_line
from batchsvc.batches import budget_queries
from batchsvc.batches.lifecycle import Status
from batchsvc.billing import queries as ledger
from batchsvc.billing import service as billing
from batchsvc.settings import Settings
from engine.fake import FakeEngine
from tests import servers
from tests.workers.conftest import FAST, RATES, World, open_world
from tests.workers.test_engine_run import completed, finalized, until, worker
from workers.allowance import Allowance
from workers.translate import OpenRow

INPUT_NANOS = 30 + 2  # three tokens at 10, and one cached at 2.5: half a nano-dollar is rounded to the even 32


def most(max_tokens: int) -> int:
    return INPUT_NANOS + 40 * max_tokens


@pytest.fixture
def money(migrated_url: str, redis_url: str, s3_server: servers.S3Server, bucket: str) -> Iterator[World]:
    """On both databases, with the triggers that keep balances."""
    settings = Settings.from_env(
        {
            "DATABASE_URL": migrated_url,
            "REDIS_URL": redis_url,
            "AWS_ENDPOINT_URL_S3": s3_server.endpoint,
            "AWS_ACCESS_KEY_ID": s3_server.access_key,
            "AWS_SECRET_ACCESS_KEY": s3_server.secret_key,
            "BATCHSVC_BUCKET": bucket,
        }
    ).model_copy(update=FAST)
    yield from open_world(settings)


def test_a_batch_spends_no_more_than_max_cost_and_no_line_that_fits_is_left_out(money: World) -> None:
    limit = 40 * most(20) // 2  # the fake engine's answers are half as long as they may be, so about as much is needed
    batch_id = money.add_batch(
        num_lines=60, unit_lines=10, max_tokens=40, reserved_nanos=limit // 2, max_cost_nanos=limit
    )
    with (
        worker(money, FakeEngine(None, max_running=8), name="a"),
        worker(money, FakeEngine(None, max_running=8), name="b"),
    ):
        until(completed(money, batch_id), "all lines")
    finalized(money, batch_id, Status.COMPLETED)
    batch, errors = money.batch(batch_id), money.result(batch_id, "error")
    assert 0 < batch.over_budget == len(errors) < 60
    assert all(line["error"]["code"] == "budget_exceeded" and line["response"] is None for line in errors)
    assert limit - most(40) < batch.cost_nanos <= limit, "what is left is less than any line may cost"
    with money.db.reading() as session:
        funds = ledger.funds(session, batch.project_id)
        assert (funds.available_nanos, funds.reserved_nanos) == (-batch.cost_nanos, 0)


def test_of_lines_that_are_computed_once_as_many_run_as_there_is_money_for(sqlite_world: World) -> None:
    """Three lines share a row: one prompt is computed, three answers are billed, and each is admitted by itself."""
    first, other = most(4), 10 + 40 * 4  # another one finds the whole prompt cached: four tokens at 2.5
    for most_nanos, least in ((first - 1, 0), (first, 1), (first + 2 * other - 1, 2), (first + 2 * other, 3)):
        batch_id = sqlite_world.add_batch(
            num_lines=3, unit_lines=3, fold=3, reserved_nanos=0, max_tokens=4, max_cost_nanos=most_nanos
        )
        with worker(sqlite_world, FakeEngine(None, max_running=1)):
            until(completed(sqlite_world, batch_id), "all lines")
        finalized(sqlite_world, batch_id, Status.COMPLETED)
        batch = sqlite_world.batch(batch_id)
        assert batch.completed >= least and batch.completed + batch.over_budget == 3
        assert batch.cost_nanos <= most_nanos and (least or not batch.completed)
        rest = most_nanos - batch.cost_nanos
        assert batch.completed == 3 or rest < (other if batch.completed else first), "whatever fits has run"


def test_a_batch_of_a_prepaid_project_waits_for_money_and_goes_on(money: World) -> None:
    batch_id = money.add_batch(num_lines=12, unit_lines=4, reserved_nanos=0)
    project_id = money.batch(batch_id).project_id
    with money.db.transaction() as session:
        administration.change_project(session, at_command_line(), project_id, {"is_prepaid": True})

    def topup(nanos: int, key: str) -> None:
        money.db.run(lambda s: billing.post_topup(s, project_id, nanos, reason="test", key=key))

    def available() -> int:
        with money.db.reading() as session:
            return ledger.funds(session, project_id).available_nanos

    def is_waiting() -> bool:
        return not money.batch(batch_id).has_budget and not any(unit.owner for unit in money.units(batch_id))

    topup(most(4) + 5, "first")
    with worker(money):
        until(is_waiting, "the money is spent")
        done = money.batch(batch_id).completed
        assert 1 <= done < 12 and available() >= 0
        time.sleep(0.3)
        assert money.batch(batch_id).completed == done, "nothing runs on"
        topup(12 * most(4), "second")
        assert money.db.run(lambda s: budget_queries.admit(s, batch_id))
        until(completed(money, batch_id), "all lines")
    finalized(money, batch_id, Status.COMPLETED)
    assert money.batch(batch_id).over_budget == 0
    assert available() == 13 * most(4) + 5 - money.batch(batch_id).cost_nanos


def test_a_limit_that_is_set_while_units_run_binds_them_too(money: World) -> None:
    batch_id = money.add_batch(num_lines=40, unit_lines=20, max_tokens=20, reserved_nanos=0)
    project_id = money.batch(batch_id).project_id
    with worker(money, FakeEngine(None, max_running=2, tokens_per_s=150)):
        until(lambda: money.batch(batch_id).completed > 0, "a first part")
        assert not any(unit.is_metered for unit in money.units(batch_id))
        with money.db.transaction() as session:
            administration.change_project(session, at_command_line(), project_id, {"is_prepaid": True})
        until(lambda: not money.batch(batch_id).has_budget, "it waits for money")
        until(lambda: not any(unit.owner for unit in money.units(batch_id)), "its units are given back")
        assert money.batch(batch_id).completed < 40
        spent = money.batch(batch_id).cost_nanos
        money.db.run(lambda s: billing.post_topup(s, project_id, spent + 50 * most(20), reason="t", key="t"))
        assert money.db.run(lambda s: budget_queries.admit(s, batch_id))
        until(completed(money, batch_id), "all lines")
    finalized(money, batch_id, Status.COMPLETED)
    with money.db.reading() as session:
        assert ledger.funds(session, project_id).available_nanos >= 0


def test_without_limits_nobody_asks_for_money(sqlite_world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    monkeypatch.setattr(budget_queries, "grant", lambda *args, **kwargs: asked.append(args[1]))
    batch_id = sqlite_world.add_batch(reserved_nanos=0)
    with worker(sqlite_world):
        until(completed(sqlite_world, batch_id), "all lines")
    finalized(sqlite_world, batch_id, Status.COMPLETED)
    assert not asked and sqlite_world.batch(batch_id).reserved_nanos == sqlite_world.batch(batch_id).cost_nanos


@given(
    st.lists(st.tuples(st.integers(0, 12), st.integers(0, 12), st.booleans(), st.integers(1, 3)), max_size=12),
    st.integers(0, 2000),
)
def test_what_runs_and_what_ended_never_exceeds_the_grant(rows: list[tuple[int, int, bool, int]], granted: int) -> None:
    unit = SimpleNamespace(rates={"tier": RATES})
    prompt, lengths, ending = np.zeros(4, np.int32), {}, {}
    made = []
    for no, (max_tokens, length, ends, lines) in enumerate(rows):
        row = SimpleNamespace(
            prompt_ids=prompt, cached_tokens=lambda member: 4 if member else 1, most_output_tokens=max_tokens
        )
        members = tuple((no * 3 + member, member) for member in range(lines))
        made.append(OpenRow(request_id=f"r{no}", row=row, members=members))
        lengths[f"r{no}"], ending[f"r{no}"] = min(length, max_tokens), ends

    def costs(row: OpenRow) -> int:
        output = 40 * lengths[row.request_id.partition("+")[0]]
        return sum((10 if member else INPUT_NANOS) + output for _, member in row.members)

    allowance = Allowance(unit, made)
    allowance.granted_nanos = granted
    running: dict[str, OpenRow] = {}
    spent, waiting, ran = 0, made, 0
    while True:
        for row in waiting:
            if allowance.admit(row):
                running[row.request_id] = row
        assert spent + sum(map(allowance.most_nanos, running.values())) <= granted
        ended = next((name for name in running if ending.get(name)), None) or next(iter(running), None)
        if ended is None:
            if (cut := allowance.split()) is None:
                break
            waiting = [cut[0]]
            continue
        row = running.pop(ended)
        spent, ran = spent + costs(row), ran + len(row.members)
        allowance.ended(ended, costs(row))
        waiting = allowance.unpark()
    assert spent <= granted
    ask = allowance.ask(len(allowance.parked))
    left = list(allowance.parked.values())
    assert ran + sum(len(row.members) for row in left) == sum(lines for *_, lines in rows), "each line is in one row"
    first = [(10 if row.members[0][1] else INPUT_NANOS) + 40 * row.row.most_output_tokens for row in left]
    assert all(spent + nanos > granted for nanos in first), "whatever fits has run"
    total = spent + sum(map(allowance.most_nanos, left))
    assert ask == (total, spent if left else 0, spent + min(first) if left else 0)
