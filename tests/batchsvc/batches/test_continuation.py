"""Lines that run again keep their numbers: the planner reads the same input, and of it the chosen lines only."""

from __future__ import annotations

import gzip

import pytest

from batchsvc.batches import line_set
from batchsvc.batches.tables import Window
from tests.batchsvc.batches.planned import Planned, jsonl, line

ROWS = [line(f"c{n}", f"Question {n}") for n in range(1, 21)]


@pytest.mark.parametrize("pack", [bytes, gzip.compress])
@pytest.mark.parametrize("chosen", [[3, 4, 11, 20], [1], [20], list(range(1, 21, 2))])
def test_only_the_chosen_lines_are_planned(planned: Planned, chosen: list[int], pack: type[bytes]) -> None:
    planned = planned.with_settings(window_lines=3)
    batch = planned.run(pack(jsonl(*ROWS)), chosen_lines=line_set.encode(chosen), parent_batch_id="batch_x")
    assert (batch.status, batch.total) == ("in_progress", len(chosen))
    assert {number: found[0] for number, found in planned.lines(batch.id).items()} == {n: f"c{n}" for n in chosen}
    windows = planned.rows(Window, batch.id)
    assert [window.num_lines for window in windows[:-1]] == [3] * (len(windows) - 1)


@pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
def test_what_isn_t_chosen_is_not_judged(planned: Planned) -> None:
    """A line that was refused before doesn't refuse the batch that leaves it out."""
    data = jsonl(ROWS[0], b"not JSON\n", {**ROWS[2], "custom_id": "c1"}, ROWS[3])
    assert planned.run(data).status == "failed"
    assert planned.run(data, chosen_lines=line_set.encode([1, 4])).total == 2
