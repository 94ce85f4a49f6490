"""How a task ends is counted; a defect stays with it, and what is away is passed on."""

from __future__ import annotations

import pytest
from structlog.testing import capture_logs

from batchsvc import counters
from batchsvc.dispatch import PLAN_TASK
from batchsvc.errors import UnavailableError
from tests.workers.conftest import World
from tests.workers.test_reaper import Line, reaper
from workers.reaper import Reaper
from workers.tasks import guarded


def counted() -> dict[str, float]:
    return {outcome: counters.TASK_RUNS.labels(PLAN_TASK, outcome)._value.get() for outcome in counters.TASK_OUTCOMES}


def test_how_a_task_ends_is_counted() -> None:
    def away(_: str) -> None:
        raise UnavailableError("The store is away.")

    def defect(_: str) -> None:
        raise KeyError("a tenant's word")

    before = counted()
    guarded(PLAN_TASK, str)("batch_1")
    with pytest.raises(UnavailableError):
        guarded(PLAN_TASK, away)("batch_1")
    with capture_logs() as logged:
        guarded(PLAN_TASK, defect)("batch_1")
    assert counted() == {outcome: num + 1 for outcome, num in before.items()}
    assert [entry["event"] for entry in logged] == ["task.crashed"]
    assert "tenant" not in str(logged)


def test_a_defect_of_one_batch_costs_no_other_its_turn(sqlite_world: World) -> None:
    """Without Redis the reaper does the work itself: of all that are due, and then all that comes after it."""
    world = sqlite_world
    planned = []
    for _ in range(2):
        planned.append(world.add_batch(num_lines=2, unit_lines=2))
        world.set_units(planned[-1], state="pending")
        world.set_batch(planned[-1], status="validating")
    did: list[str] = []

    def plan(batch_id: str) -> None:
        did.append(batch_id)
        raise IndexError("what nobody expected")

    here: Reaper = reaper(world, Line(length=None), guarded(PLAN_TASK, plan))
    ticked_s = here.ticked_s
    here.tick()
    assert sorted(did) == sorted(planned) and here.ticked_s > ticked_s
