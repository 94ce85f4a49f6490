"""Deadlines at risk and spent limits: noted once, as the state stands, where somebody listens."""

from __future__ import annotations

import pytest

from batchsvc.accounts import administration
from batchsvc.audit.actor import at_command_line
from batchsvc.batches.estimate import Habits
from batchsvc.batches.offpeak import Night
from batchsvc.billing import service as billing
from batchsvc.billing.limits import month_no
from batchsvc.billing.tables import Balance
from batchsvc.db.session import database_now_ms
from batchsvc.webhooks import notices
from tests.batchsvc.webhooks.conftest import Hooks


def note(hooks: Hooks) -> int:
    return notices.note(hooks.db, Night(), Habits())


def limit(hooks: Hooks, **changes: object) -> None:
    hooks.db.run(lambda session: administration.change_project(session, at_command_line(), hooks.project_id, changes))


def charge(hooks: Hooks, month_nanos: int, *, available_nanos: int = 0, months_ago: int = 0) -> None:
    """What the ledger says, as its trigger would have written it."""
    with hooks.db.transaction() as session:
        month = month_no(database_now_ms(session)) - months_ago
        row = session.get(Balance, hooks.project_id) or Balance(project_id=hooks.project_id, reserved_nanos=0)
        row.available_nanos, row.month, row.month_nanos = available_nanos, month, month_nanos
        session.add(row)


def percents(hooks: Hooks) -> list[tuple[str, int]]:
    """Of all events; which came first isn't kept where two came in one millisecond."""
    return sorted((event.data["limit"], event.data["percent"]) for event in hooks.events())


def test_a_batch_that_will_be_late_is_told_of_once(hooks: Hooks) -> None:
    late = {"latest_start_ms": 1, "est_tokens": 1000}  # it should have begun, and nobody runs it
    hooks.add_batch(**late)
    assert note(hooks) == 0, "nobody listens"
    hooks.add_endpoint(types=["batch.completed"])
    assert note(hooks) == 0
    hooks.add_endpoint(types=["batch.at_risk"])
    hooks.add_batch()
    batch_id = hooks.add_batch(**late)
    assert note(hooks) == 2 and note(hooks) == 0
    assert {event.type for event in hooks.events()} == {"batch.at_risk"}
    assert batch_id in {event.data["id"] for event in hooks.events()}


def test_shares_of_a_budget_are_told_of_once_a_month(hooks: Hooks) -> None:
    hooks.add_endpoint(types=["spend.alert"])
    charge(hooks, 10**9, months_ago=1)
    assert note(hooks) == 0, "there is no limit"
    limit(hooks, budget_nanos=2 * 10**9)
    assert note(hooks) == 1 and note(hooks) == 0
    charge(hooks, 999_999_999)
    assert note(hooks) == 0, "it is another month"
    charge(hooks, 10**9)
    assert note(hooks) == 1 and note(hooks) == 0
    charge(hooks, 2 * 10**9)
    assert note(hooks) == 2 and note(hooks) == 0
    assert percents(hooks) == [("budget", 50), ("budget", 50), ("budget", 80), ("budget", 100)]
    in_order = sorted(hooks.events(), key=lambda event: (event.data["month"], event.data["percent"]))
    first, last = in_order[0].data, in_order[-1].data
    assert first["month"] < last["month"] and last["id"] == hooks.project_id
    assert (last["spent_nanos"], last["limit_nanos"]) == (2 * 10**9, 2 * 10**9)


def test_a_project_chooses_its_shares(hooks: Hooks) -> None:
    hooks.add_endpoint(types=["spend.alert"])
    limit(hooks, budget_nanos=100, alert_percents=[])
    charge(hooks, 95)
    assert note(hooks) == 0
    limit(hooks, alert_percents=[90, 10])
    assert note(hooks) == 2 and percents(hooks) == [("budget", 10), ("budget", 90)]


def test_a_prepaid_balance_that_runs_out_is_told_of(hooks: Hooks) -> None:
    hooks.add_endpoint(types=["spend.alert"])
    limit(hooks, is_prepaid=True)
    charge(hooks, 49, available_nanos=51)
    assert note(hooks) == 0
    charge(hooks, 85, available_nanos=15)
    assert note(hooks) == 2 and percents(hooks) == [("prepaid", 50), ("prepaid", 80)]


def test_a_batch_near_its_max_cost_is_told_of(hooks: Hooks) -> None:
    hooks.add_endpoint(types=["spend.alert"])
    batch_id = hooks.add_batch(max_cost_nanos=1000, cost_nanos=799)
    hooks.add_batch(max_cost_nanos=1000, cost_nanos=499)
    hooks.add_batch(cost_nanos=10**6)
    assert note(hooks) == 1
    (event,) = hooks.events()
    assert event.data == {
        "id": batch_id,
        "limit": "max_cost",
        "percent": 50,
        "spent_nanos": 799,
        "limit_nanos": 1000,
    }


def test_what_the_ledger_charges_is_what_alerts_see(hooks: Hooks) -> None:
    """The whole way once: a top-up of a prepaid project stands in the balance that alerts are worked out from."""
    limit(hooks, is_prepaid=True)
    with hooks.db.transaction() as session:
        billing.post_topup(session, hooks.project_id, 500, reason="r", key="k")
        now = database_now_ms(session)
    with hooks.db.reading() as session:
        (found,) = billing.month_spending(session, [hooks.project_id])
    assert (found.limit, found.spent_nanos, found.limit_nanos) == ("prepaid", 0, 500)
    assert found.month == pytest.approx(month_no(now), abs=1)
