"""A reader of result lines for tests: it goes on after the cursor of the last line it has, a few lines at a time."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import orjson

from batchsvc.batches import ordered_results, result_service
from tests.workers.conftest import World


@dataclass
class Follower:
    """Reads from the world as the API does."""

    world: World
    batch_id: str
    order: str = "completion"
    after: str | None = None
    lines: list[dict[str, Any]] = field(default_factory=list)
    status: str = ""

    def read(self, limit: int | None = None) -> int:
        """One answer. Returns how many lines it had."""
        world, project_id = self.world, self.world.batch(self.batch_id).project_id
        with world.db.snapshot() as session:
            if self.order == "input":
                ordered, place = ordered_results.look(session, project_id, self.batch_id, self.after)
            else:
                progress, cursor = result_service.look(session, project_id, self.batch_id, self.after)
        if self.order == "input":
            self.status = ordered.status
            body = b"".join(ordered_results.lines(world.store, ordered, place, limit))
        else:
            self.status = progress.status
            body = b"".join(result_service.lines(world.store, progress, cursor, limit))
        got = [orjson.loads(line) for line in body.split(b"\n") if line]
        self.lines += got
        self.after = got[-1]["cursor"] if got else self.after
        return len(got)

    def read_all(self, limit: int | None = None) -> None:
        while self.read(limit):
            continue

    @property
    def numbers(self) -> list[int]:
        return [line["line"] for line in self.lines]

    def judge(self) -> None:
        """Each line once, and of the batch's own files; the exceptions are lines that were taken back after reading."""
        batch = self.world.batch(self.batch_id)
        assert sorted(self.numbers) == list(range(1, batch.total + 1)), "each line once, none lost"
        assert all(line["custom_id"] == f"c{line['line']}" for line in self.lines)
        if self.order == "input":
            assert self.numbers == sorted(self.numbers)
