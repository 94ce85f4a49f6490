"""A quote of many windows survives the kill -9 of the control worker that plans it: another goes on where it was."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
import redis

from batchsvc.batches import quote_service
from batchsvc.settings import Settings
from tests.batchsvc.batches.planned import jsonl, line
from tests.batchsvc.batches.quoting import quoting
from tests.workers.conftest import stamp
from tests.workers.test_processes import environment, process, until


@pytest.mark.parametrize("database_url", ["sqlite", pytest.param("postgresql", marks=pytest.mark.slow)], indirect=True)
def test_a_killed_planner_is_taken_up_again(
    fast: Settings, tiny: tuple[Path, str], tmp_path: Path, redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    redis.Redis.from_url(redis_url).flushall()
    monkeypatch.setattr(quote_service, "INLINE_LINES", 0)  # no caller waits, however small the file
    settings = fast.model_copy(update={"window_lines": 10})
    data = jsonl(*(line(f"c{number}", f"Ticket {number % 7} asks for a refund") for number in range(40)))
    with quoting(settings, tiny[0]) as door:
        stamp(door.planned.db)
        expected = door.quote(data)
        quote_id = door.ask(data).json()["id"]  # nobody was told: the reaper finds it
        env = environment(settings, tiny[0], TEST_LOGS=tmp_path)
        with process("control", env | {"BATCHSVC_FAILPOINTS": "quote.planned=kill@2"}) as victim:
            until(lambda: victim.poll() is not None, "the planner dies")
            assert victim.returncode == -signal.SIGKILL
        left = door.shown(quote_id)
        assert left["status"] == "queued" and left["plan"]["windows"] == 2, "what counts, counts"
        with process("control", env):
            until(lambda: door.shown(quote_id)["status"] == "ready", "the quote")
        found = door.shown(quote_id)
    for name in ("plan", "usage", "cost", "request_counts"):
        assert found[name] == expected[name]
