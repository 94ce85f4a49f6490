"""Damaged objects of a plan: rebuilt from the pinned input to the same bytes, or given up; never stuck, never mixed."""

from __future__ import annotations

from typing import Any

import pytest

from batchsvc.batches import planning, repair, repair_queries, unit_queries
from batchsvc.batches.planning import PlanProgress
from batchsvc.batches.reading import PlanContext
from batchsvc.batches.tables import Batch, Part, Unit, Window
from batchsvc.store.s3 import ObjectStore
from tests.batchsvc.batches.planned import Planned, jsonl, line

DATA = jsonl(
    *(line(f"a{n}", f"text {n % 4}") for n in range(7)),
    b"nonsense\n",
    line("b", best_of=2),
    line("c", "other"),
    line("c"),
)
SIZES = {"window_lines": 4, "unit_lines": 2}


def lease_all(planned: Planned, batch_id: str) -> dict[str, int]:
    """The epochs of the units of a batch, leased as by a worker."""
    with planned.db.transaction() as session:
        for unit in session.query(Unit).where(Unit.batch_id == batch_id):
            unit.state, unit.epoch, unit.owner = "leased", unit.epoch + 1, "w"
    return {unit.id: unit.epoch for unit in planned.rows(Unit, batch_id)}


def change(planned: Planned, table: Any, ident: Any, **values: Any) -> None:
    with planned.db.transaction() as session:
        row = session.get_one(table, ident)
        for name, value in values.items():
            setattr(row, name, value)


def rebuild(planned: Planned, batch_id: str) -> int:
    """How many windows were rebuilt until none was due."""
    count = 0
    while batch_id in planned.db.run(repair_queries.due):
        count += repair.rebuild_next_window(planned.context, batch_id, "r")
        assert count < 10
    assert not repair.rebuild_next_window(planned.context, batch_id, "r")
    return count


def test_unit_files_come_back_byte_for_byte_and_their_units_run(planned: Planned) -> None:
    small = planned.with_settings(**SIZES)
    batch = small.run(DATA, on_invalid="skip")
    before, lines = small.rows(Unit, batch.id), small.lines(batch.id)
    epochs = lease_all(small, batch.id)
    lost = [unit for unit in before if unit.window_no in (0, 1)]
    small.store.delete([unit.s3_key for unit in lost])
    for unit in lost:
        assert small.db.run(lambda s, unit=unit: repair_queries.return_unit(s, unit.id, epochs[unit.id]))
        assert not small.db.run(lambda s, unit=unit: repair_queries.return_unit(s, unit.id, epochs[unit.id]))
    assert rebuild(small, batch.id) == 2
    after = small.rows(Unit, batch.id)
    assert {unit.id: unit.sha256 for unit in after} == {unit.id: unit.sha256 for unit in before}
    assert {unit.state for unit in after if unit.window_no in (0, 1)} == {"ready"}
    assert {unit.s3_key for unit in after}.isdisjoint(unit.s3_key for unit in lost)
    assert small.lines(batch.id) == lines
    assert not any(window.is_damaged for window in small.rows(Window, batch.id))
    assert all(unit.epoch > epochs[unit.id] for unit in after if unit.window_no in (0, 1)), "the old owner is fenced"


def test_an_error_part_is_made_again(planned: Planned) -> None:
    small = planned.with_settings(**SIZES)
    batch = small.run(DATA, on_invalid="skip")
    rejected = small.rejected(batch.id)
    (part,) = [part for part in small.rows(Part, batch.id) if part.window_no == 1]
    change(small, Part, part.id, is_void=True)
    change(small, Batch, batch.id, failed=batch.failed - part.lines_err)
    change(small, Window, (batch.id, 1), is_damaged=True)
    assert rebuild(small, batch.id) == 1
    rows = [row for row in small.rows(Part, batch.id) if not row.is_void]
    assert {row.window_no for row in rows} == {1, 2} and part.id not in {row.id for row in rows}
    with small.db.transaction() as session:
        session.delete(session.get_one(Part, part.id))
    assert small.rejected(batch.id) == rejected
    assert small.batch(batch.id).failed == batch.failed


def test_numbers_of_lines_are_read_again(planned: Planned) -> None:
    small = planned.with_settings(**SIZES)
    batch = small.run(DATA, on_invalid="skip")
    lines, window = small.window_lines(batch.id), small.rows(Window, batch.id)[1]
    small.store.delete([window.line_nos_key])
    change(small, Window, (batch.id, 1), is_damaged=True)
    assert rebuild(small, batch.id) == 1
    assert small.window_lines(batch.id) == lines


@pytest.mark.parametrize("why", ["replaced", "gone", "replanned"])
def test_what_cannot_be_rebuilt_is_given_up(planned: Planned, why: str) -> None:
    small = planned.with_settings(**SIZES)
    batch = small.run(DATA, on_invalid="skip")
    epochs = lease_all(small, batch.id)
    unit = small.rows(Unit, batch.id)[0]
    assert small.db.run(lambda s: repair_queries.return_unit(s, unit.id, epochs[unit.id]))
    (key,) = [key for key, _ in small.store.list_keys("in/")]
    if why == "replaced":
        small.store.put(key, DATA.replace(b"text", b"TEXT"))
    elif why == "gone":
        small.store.delete([key])
    else:
        small = small.with_settings(unit_lines=1)
    assert rebuild(small, batch.id) == 1
    assert small.rows(Unit, batch.id)[0].state == "sealed"
    assert not any(window.is_damaged for window in small.rows(Window, batch.id))


def test_a_repair_that_is_overtaken_changes_nothing(planned: Planned) -> None:
    batch = planned.run(DATA, on_invalid="skip")
    epochs = lease_all(planned, batch.id)
    for unit_id, epoch in epochs.items():
        planned.db.run(lambda s, unit_id=unit_id, epoch=epoch: repair_queries.return_unit(s, unit_id, epoch))
    first = planned.db.run(lambda s: repair_queries.claim(s, batch.id, "one", 60))
    assert first is not None
    assert planned.db.run(lambda s: repair_queries.claim(s, batch.id, "two", 60)) is None
    change(planned, Batch, batch.id, plan_lease_ms=0)
    assert rebuild(planned, batch.id) == 1
    nothing = repair_queries.Rebuilt(units={}, rejected=None, line_nos=None)
    assert planned.db.run(lambda s: repair_queries.commit(s, first, nothing)) is False
    assert {unit.state for unit in planned.rows(Unit, batch.id)} == {"ready"}


def test_a_batch_that_is_sealed_takes_no_rebuilt_unit(planned: Planned) -> None:
    batch = planned.run(DATA, on_invalid="skip")
    epochs = lease_all(planned, batch.id)
    unit_id, epoch = next(iter(epochs.items()))
    planned.db.run(lambda s: repair_queries.return_unit(s, unit_id, epoch))
    planned.db.run(lambda s: unit_queries.seal(s, batch.id))
    change(planned, Batch, batch.id, status="finalizing", why="cancelled")
    assert rebuild(planned, batch.id) == 1
    assert {unit.state for unit in planned.rows(Unit, batch.id)} == {"sealed"}


@pytest.mark.parametrize("how", ["replaced", "gone"])
def test_an_input_that_changes_while_it_is_planned_fails_the_batch(planned: Planned, how: str) -> None:
    """Also in the middle of a window: what was read before doesn't count."""
    small = planned.with_settings(window_lines=4)
    batch_id = small.add_batch(DATA, on_invalid="skip")
    assert planning.plan_next_window(small.context, batch_id, "w") == PlanProgress.AGAIN
    (key,) = [key for key, _ in small.store.list_keys("in/")]
    streams: list[str] = []

    class Changing(ObjectStore):
        def stream(self, key: str, **kinds: Any) -> Any:
            streams.append(key)
            if len(streams) == 3:  # custom_ids of the first window, the head of the file, then its lines
                if how == "replaced":
                    self.put(key, DATA.replace(b"text", b"TEXT"))
                else:
                    self.delete([key])
            return super().stream(key, **kinds)

    context = PlanContext(small.db, Changing(small.context.settings), small.context.settings, lambda p: small.text)
    assert planning.plan_next_window(context, batch_id, "w") == PlanProgress.DONE
    assert len(streams) == 3 and streams[-1] == key
    batch = small.batch(batch_id)
    assert batch.status == "failed" and batch.errors is not None
    assert ("replaced" if how == "replaced" else "doesn't exist") in batch.errors[0]["message"]
    assert small.rows(Unit, batch_id) == [] and batch.reserved_nanos == batch.cost_nanos == 0


def test_planning_starts_over_when_ids_of_a_finished_window_are_damaged(planned: Planned) -> None:
    small = planned.with_settings(window_lines=4)
    expected = small.lines(small.run(DATA, on_invalid="skip").id)
    batch_id = small.add_batch(DATA, on_invalid="skip")
    assert planning.plan_next_window(small.context, batch_id, "w") == PlanProgress.AGAIN
    small.store.put(small.rows(Window, batch_id)[0].line_nos_key, b"nonsense")
    assert planning.plan_next_window(small.context, batch_id, "w") == PlanProgress.AGAIN
    assert small.rows(Window, batch_id) == []
    assert small.plan(batch_id) == PlanProgress.DONE
    assert small.lines(batch_id) == expected


def test_ids_of_finished_windows_are_read_once_a_process(planned: Planned) -> None:
    small = planned.with_settings(window_lines=2)
    reads: list[str] = []

    class Counting(ObjectStore):
        def get(self, key: str) -> bytes:
            reads.append(key)
            return super().get(key)

    def context() -> PlanContext:
        return PlanContext(small.db, Counting(small.context.settings), small.context.settings, lambda _: small.text)

    for contexts, is_once in ([one := context()] * 2, True), ([one, context()], False):
        reads.clear()
        batch_id = small.add_batch(DATA, on_invalid="skip")
        progress, turn = PlanProgress.AGAIN, 0
        while progress == PlanProgress.AGAIN:
            progress = planning.plan_next_window(contexts[turn % 2], batch_id, "w")
            turn += 1
        errors = small.rejected(batch_id)
        assert [row["error"]["code"] for row in errors.values() if row["error"]].count("duplicate_custom_id") == 1
        assert (len(reads) == len(set(reads)) == len(small.rows(Window, batch_id)) - 1) is is_once
