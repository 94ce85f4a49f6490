"""A planner may be killed, overtaken or cancelled at any point: what is left is one plan, or none."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
from sqlalchemy import update

from batchsvc.batches import lifecycle, planning
from batchsvc.batches.lifecycle import Status
from batchsvc.batches.planning import PlanProgress
from batchsvc.batches.reading import PlanContext
from batchsvc.batches.tables import Batch, Part, Unit, Window
from batchsvc.db.session import database_now_ms
from engine.text import TextModel
from tests.batchsvc.batches.planned import PROJECT, Planned, jsonl, line

DATA = jsonl(line("a"), line("a2"), b"nonsense\n", line("b", "other", best_of=2), line("c", "third", seed=1), line("c"))


class _KilledError(BaseException):
    """The end of a process: no handler for errors may see it."""


class Interrupted:
    """Passes calls on to `target`; the call number `at` (over all of these) raises, before or after its effect."""

    def __init__(self, target: Any, names: set[str], count: list[int], at: int, is_after: bool, error: Any) -> None:
        self._target, self._names = target, names
        self._count, self._at, self._is_after, self._error = count, at, is_after, error

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._target, name)
        if name not in self._names:
            return found

        def call(*args: Any, **kwargs: Any) -> Any:
            self._count[0] += 1
            is_it = self._count[0] == self._at
            if is_it and not self._is_after:
                raise self._error
            result = found(*args, **kwargs)
            if is_it:
                raise self._error
            return result

        return call


def interrupted(planned: Planned, at: int, is_after: bool, error: BaseException) -> tuple[PlanContext, list[int]]:
    count = [0]
    db: Any = Interrupted(planned.db, {"run", "transaction"}, count, at, is_after, error)
    store: Any = Interrupted(planned.store, {"put", "head", "get", "stream"}, count, at, is_after, error)
    return PlanContext(db, store, planned.context.settings, planned.context.text_loader), count


def outcome(planned: Planned, batch_id: str) -> Any:
    """All that matters of a plan, without ids and epochs."""
    batch = planned.batch(batch_id)
    units, parts, windows = (planned.rows(table, batch_id) for table in (Unit, Part, Window))
    used = {row.s3_key for row in (*units, *parts)} | {row.line_nos_key for row in windows}
    assert used <= planned.objects(batch_id)
    assert not used & planned.garbage()
    return (
        (batch.status, batch.total, batch.failed, batch.reserved_nanos, batch.model_id),
        planned.lines(batch_id),
        {number: row["custom_id"] for number, row in planned.rejected(batch_id).items()},
        [(unit.no, unit.window_no, unit.num_lines, unit.state) for unit in units],
        [(window.no, window.first_line, window.last_line, window.next_offset) for window in windows],
        [list(window.custom_ids) for window in planned.window_lines(batch_id)],
    )


def plan_interrupted(planned: Planned, batch_id: str, at: int, is_after: bool, error: BaseException) -> bool:
    """Plans with an interruption at call number `at`, and to the end afterwards. False: there was no such call."""
    context, _ = interrupted(planned, at, is_after, error)
    try:
        while planning.plan_next_window(context, batch_id, "interrupted") == PlanProgress.AGAIN:
            pass
        return False
    except type(error):
        time.sleep(0.005)  # longer than its lease
        return True
    finally:
        assert planned.plan(batch_id) == PlanProgress.DONE


@pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
@pytest.mark.parametrize(
    ("kind", "is_after"),
    [
        (_KilledError, True),
        pytest.param(ConnectionError, True, marks=pytest.mark.slow),
        pytest.param(ConnectionError, False, marks=pytest.mark.slow),
    ],
)
def test_interrupted_at_every_call_the_plan_is_the_same(
    planned: Planned, kind: type[BaseException], is_after: bool
) -> None:
    small = planned.with_settings(window_lines=3, lease_s=0.002)
    expected = outcome(small, small.run(DATA, on_invalid="skip").id)
    reserved = small.balance(f"reserved:{PROJECT}")
    assert reserved > 0
    for at in itertools.count(1):
        batch_id = small.add_batch(DATA, on_invalid="skip")
        was_interrupted = plan_interrupted(small, batch_id, at, is_after, kind())
        assert outcome(small, batch_id) == expected
        assert small.balance(f"reserved:{PROJECT}") == (at + 1) * reserved
        if not was_interrupted:
            break
    assert at > 15


@pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
def test_interrupted_at_every_call_a_failing_batch_fails_alike(planned: Planned) -> None:
    small = planned.with_settings(window_lines=3, lease_s=0.002)
    expected = small.run(DATA).errors
    assert [(error["line"], error["code"]) for error in expected or []] == [
        (3, "invalid_json_line"),
        (6, "duplicate_custom_id"),
    ]
    for at in itertools.count(1):
        batch_id = small.add_batch(DATA)
        was_interrupted = plan_interrupted(small, batch_id, at, at % 2 == 0, _KilledError())
        batch = small.batch(batch_id)
        assert (batch.status, batch.errors, batch.errors_total) == ("failed", expected, 2)
        assert small.rows(Unit, batch_id) == []
        if not was_interrupted:
            break
    assert at > 8


def test_two_planners_at_once_give_one_plan(planned: Planned) -> None:
    small = planned.with_settings(window_lines=2)
    expected = outcome(small, small.run(DATA, on_invalid="skip").id)
    batch_id = small.add_batch(DATA, on_invalid="skip")
    ends: list[Any] = []

    def work(owner: str) -> None:
        try:
            while (progress := planning.plan_next_window(small.context, batch_id, owner)) != PlanProgress.DONE:
                if progress == PlanProgress.LOST:
                    time.sleep(0.01)
            ends.append(progress)
        except Exception as error:
            ends.append(error)

    threads = [threading.Thread(target=work, args=(f"w{i}",)) for i in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert ends == [PlanProgress.DONE] * 3
    assert outcome(small, batch_id) == expected


def during_planning(planned: Planned, batch_id: str, event: Callable[[], None]) -> PlanProgress:
    """Plans with something happening in the middle of the first window."""
    happened: list[bool] = []

    def load(path: str) -> TextModel:
        if not happened:
            happened.append(True)
            event()
        return planned.context.text_loader(path)

    context = PlanContext(planned.db, planned.store, planned.context.settings, load)
    progress = planning.plan_next_window(context, batch_id, "slow")
    assert happened
    return progress


def test_a_planner_that_is_overtaken_changes_nothing(planned: Planned) -> None:
    expected = outcome(planned, planned.run(DATA, on_invalid="skip").id)
    batch_id = planned.add_batch(DATA, on_invalid="skip")
    assert planning.plan_next_window(planned.context, "batch_none", "w") == PlanProgress.DONE

    def overtake() -> None:
        assert planning.plan_next_window(planned.context, batch_id, "fast") == PlanProgress.LOST
        with planned.db.transaction() as session:
            session.execute(update(Batch).where(Batch.id == batch_id).values(plan_lease_ms=0))
        assert planned.plan(batch_id, "fast") == PlanProgress.DONE

    assert during_planning(planned, batch_id, overtake) == PlanProgress.DONE
    assert outcome(planned, batch_id) == expected
    used = {unit.s3_key for unit in planned.rows(Unit, batch_id)}
    stale = {key for key in planned.objects(batch_id) if "/unit/" in key} - used
    assert stale and stale <= planned.garbage()


@pytest.mark.parametrize("end", [Status.CANCELLED, Status.EXPIRED])
def test_a_batch_that_ends_while_validating_leaves_nothing(planned: Planned, end: Status) -> None:
    small = planned.with_settings(window_lines=2)
    for is_mid_window in (True, False):
        batch_id = small.add_batch(DATA, on_invalid="skip")

        def stop(batch_id: str = batch_id) -> None:
            with small.db.transaction() as session:
                assert lifecycle.move(session, batch_id, end, now_ms=database_now_ms(session))

        if is_mid_window:
            assert during_planning(small, batch_id, stop) == PlanProgress.DONE
        else:
            assert planning.plan_next_window(small.context, batch_id, "w") == PlanProgress.AGAIN
            assert small.rows(Unit, batch_id)
            stop()
        assert small.plan(batch_id) == PlanProgress.DONE
        batch = small.batch(batch_id)
        assert (batch.status, batch.total, batch.reserved_nanos) == (end, 0, 0)
        assert small.rows(Unit, batch_id) == [] and small.rows(Part, batch_id) == []
        assert small.objects(batch_id) <= small.garbage()
    assert small.balance(f"reserved:{PROJECT}") == 0


@pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
def test_the_lease_is_renewed_while_a_window_takes_long(planned: Planned) -> None:
    eager = planned.with_settings(renew_s=0.005)
    batch_id = eager.add_batch(DATA, on_invalid="skip")
    leases: list[int] = []

    class Slow:
        def __getattr__(self, name: str) -> Any:
            return getattr(eager.text, name)

        def render(self, messages: Any) -> str:
            time.sleep(0.05)  # ten renewals, if the machine lets the thread run
            leases.append(eager.batch(batch_id).plan_lease_ms)
            return eager.text.render(messages)

    load: Any = lambda path: Slow()  # noqa: E731
    assert planning.plan_next_window(PlanContext(eager.db, eager.store, eager.context.settings, load), batch_id, "w")
    assert len(set(leases)) > 1
    assert leases == sorted(leases)
