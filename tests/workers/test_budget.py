"""Lines are given to the engine only as money allows: nothing is overspent, and nothing that fits is left out."""

from __future__ import annotations

import time
from collections.abc import Iterator
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchsvc.accounts import service as accounts
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


def test_a_folded_row_costs_what_its_lines_cost(sqlite_world: World) -> None:
    """Three lines share a row: one prompt is computed, three answers are billed, and all or none is admitted."""
    row_nanos = most(4) + 2 * (10 + 40 * 4)
    batch_id = sqlite_world.add_batch(num_lines=6, unit_lines=6, fold=3, reserved_nanos=0, max_cost_nanos=row_nanos - 1)
    with worker(sqlite_world):
        until(completed(sqlite_world, batch_id), "all lines")
    assert sqlite_world.batch(batch_id).over_budget == 6
    batch_id = sqlite_world.add_batch(num_lines=6, unit_lines=6, fold=3, reserved_nanos=0, max_cost_nanos=row_nanos)
    with worker(sqlite_world):
        until(completed(sqlite_world, batch_id), "all lines")
    finalized(sqlite_world, batch_id, Status.COMPLETED)
    assert sqlite_world.batch(batch_id).completed >= 3


def test_a_batch_of_a_prepaid_project_waits_for_money_and_goes_on(money: World) -> None:
    batch_id = money.add_batch(num_lines=12, unit_lines=4, reserved_nanos=0)
    project_id = money.batch(batch_id).project_id
    with money.db.transaction() as session:
        accounts.change_project(session, project_id, {"is_prepaid": True})

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


def test_without_limits_nobody_asks_for_money(sqlite_world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    monkeypatch.setattr(budget_queries, "grant", lambda *args, **kwargs: asked.append(args[1]))
    batch_id = sqlite_world.add_batch(reserved_nanos=0)
    with worker(sqlite_world):
        until(completed(sqlite_world, batch_id), "all lines")
    finalized(sqlite_world, batch_id, Status.COMPLETED)
    assert not asked and sqlite_world.batch(batch_id).reserved_nanos == sqlite_world.batch(batch_id).cost_nanos


@given(st.lists(st.tuples(st.integers(0, 12), st.integers(0, 12), st.booleans()), max_size=12), st.integers(0, 2000))
def test_what_runs_and_what_ended_never_exceeds_the_grant(rows: list[tuple[int, int, bool]], granted: int) -> None:
    unit = SimpleNamespace(rates={"tier": RATES})
    prompt = np.zeros(4, np.int32)
    made = {}
    for no, (max_tokens, length, ends) in enumerate(rows):
        row = SimpleNamespace(prompt_ids=prompt, cached_tokens=lambda _: 1, max_tokens=max_tokens)
        made[f"r{no}"] = (
            SimpleNamespace(request_id=f"r{no}", row=row, members=((no, 0),)),
            INPUT_NANOS + 40 * min(length, max_tokens),
            ends,
        )
    allowance = Allowance(unit, [row for row, _, _ in made.values()])
    allowance.granted_nanos = granted
    running, spent, waiting = {}, 0, [row for row, _, _ in made.values()]
    while waiting or running:
        for row in waiting:
            if allowance.admit(row):
                running[row.request_id] = allowance.most_nanos(row)
        assert spent + sum(running.values()) <= granted
        ended = next((request_id for request_id in running if made[request_id][2]), None) or next(iter(running), None)
        if ended is None:
            break
        del running[ended]
        spent += made[ended][1]
        allowance.ended(ended, made[ended][1])
        waiting = allowance.unpark()
    assert spent <= granted
    ask = allowance.ask(len(allowance.parked))
    left = [allowance.most_nanos(row) for row in allowance.parked.values()]
    assert all(spent + nanos > granted for nanos in left), "whatever fits has run"
    assert ask == (spent + sum(left), spent if left else 0, spent + min(left) if left else 0)
