"""Inputs 20 to 24: batches whose every line fails, that are cancelled, expire, lose workers, or are sent twice."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import func, select

from batchsvc.batches import finalize_queries, quota_queries, unit_queries
from batchsvc.batches.tables import Batch, Unit
from engine.fake import FakeEngine
from tests.batchsvc.batches.planned import PROJECT, URL, jsonl, line
from tests.inputs.service import Service
from tests.workers.test_engine_run import completed, until
from tests.workers.test_processes import environment

_FINALIZE = """
import sys
from batchsvc.db.session import Database
from batchsvc.settings import Settings
from batchsvc.store.s3 import ObjectStore
from workers.finalize import Finalizer
settings = Settings.from_env()
Finalizer(settings, Database(settings.database_url), ObjectStore(settings), "killed").finalize(sys.argv[1])
"""


def lines(count: int, max_tokens: int = 20) -> bytes:
    return jsonl(
        *(line(f"c{number}", f"say {number}", ignore_eos=True, max_tokens=max_tokens) for number in range(count))
    )


def slow(service: Service, tokens_per_s: float = 400) -> FakeEngine:
    return FakeEngine(service.planned.text, tokens_per_s=tokens_per_s, max_running=4)


def cancel(service: Service, batch_id: str) -> Any:
    return service.client.post(f"/v1/batches/{batch_id}/cancel")


def test_input_20_every_line_fails(service: Service) -> None:
    """Completed, with an error file only, and free."""
    ended = service.run(jsonl(*(line(f"c{number}", n=0) for number in range(5))))
    batch = ended.batch
    assert (batch["status"], batch["output_file_id"]) == ("completed", None)
    assert ended.refusals == dict.fromkeys(range(1, 6), ("invalid_value", "n"))
    assert batch["request_counts"] == {"total": 5, "completed": 0, "failed": 5}
    usage = batch["usage"]
    assert [usage[name] for name in ("input_tokens", "output_tokens", "total_tokens", "cost_nanos")] == [0, 0, 0, 0]
    assert usage["input_tokens_details"] == {"cached_tokens": 0}
    assert usage["output_tokens_details"] == {"reasoning_tokens": 0}
    assert batch["errors"] is None


def test_input_21_cancelled_while_validating(service: Service) -> None:
    batch_id = service.create(lines(3))
    first, second = cancel(service, batch_id), cancel(service, batch_id)
    assert (first.status_code, second.status_code) == (200, 200)
    assert first.json() == second.json() == service.shown(batch_id)
    batch = first.json()
    assert (batch["status"], batch["request_counts"]["total"], batch["output_file_id"]) == ("cancelled", 0, None)
    service.planned.plan(batch_id)
    assert service.shown(batch_id)["status"] == "cancelled"
    assert service.revenue(batch_id) == service.held(batch_id) == 0


@pytest.mark.parametrize("moment", ["before the first token", "in the middle"])
def test_input_21_cancelled_while_it_runs(service: Service, moment: str) -> None:
    """By two callers at once, and again. What was finished is delivered and paid, the rest says why."""
    batch_id = service.start(lines(40))
    is_early = moment == "before the first token"
    with nullcontext() if is_early else service.working(slow(service)):
        if not is_early:
            until(lambda: service.world.batch(batch_id).completed > 0, "the first lines")
        with ThreadPoolExecutor(2) as callers:
            answers = list(callers.map(lambda _: cancel(service, batch_id), range(2)))
        assert [answer.status_code for answer in answers] == [200, 200]
        assert {answer.json()["status"] for answer in answers} == {"cancelling"}
        assert cancel(service, batch_id).status_code == 200
        until(lambda: service.finalize(batch_id), "the end")
    ended = service.ended(batch_id)
    assert ended.batch["status"] == "cancelled"
    assert set(ended.codes.values()) == {"batch_cancelled"}
    assert len(ended.output) + len(ended.errors) == 40
    assert bool(ended.output) != is_early
    again = cancel(service, batch_id)
    assert (again.status_code, again.json()) == (200, ended.batch)


def test_input_21_cancelled_while_it_is_merged_and_after(service: Service) -> None:
    """There is nothing left to save while results are put together; after the end it is too late."""
    batch_id = service.start(lines(3))
    with service.working():
        until(completed(service.world, batch_id), "all lines")
    service.change(batch_id, status="finalizing", why="completed", finalizing_ms=1)
    late = cancel(service, batch_id)
    assert (late.status_code, late.json()["status"]) == (200, "finalizing")
    assert service.finalize(batch_id)
    assert service.ended(batch_id).batch["status"] == "completed"
    refused = cancel(service, batch_id)
    assert (refused.status_code, refused.json()["error"]["code"]) == (400, "batch_already_ended")


def test_input_22_the_window_passes(service: Service) -> None:
    """Done lines are delivered and paid, the rest says why, the quota is free. The process that ends the batch is
    killed with everything put together, and another one finds all of it."""
    before = held(service)
    batch_id = service.start(lines(30))
    assert held(service) > before
    with service.working(slow(service)):
        until(lambda: service.world.batch(batch_id).completed >= 12, "40 % of the lines")
        service.change(batch_id, expires_ms=1)
        until(lambda: is_due(service, batch_id), "the end of the window")
        killed_at(service, batch_id, "batch.publishing")
        assert service.shown(batch_id)["status"] == "finalizing"
        service.change(batch_id, fin_lease_ms=0)
    with service.working():  # a worker that comes back finds nothing to do
        until(lambda: service.finalize(batch_id), "the end")
    ended = service.ended(batch_id)
    assert ended.batch["status"] == "expired"
    assert ended.batch["expired_at"] is not None
    assert set(ended.codes.values()) == {"batch_expired"}
    assert len(ended.output) >= 12 and ended.errors
    assert held(service) == before
    assert not service.finalize(batch_id), "nothing changes it any more"
    assert service.ended(batch_id) == ended


def is_due(service: Service, batch_id: str) -> bool:
    with service.planned.db.reading() as session:
        return finalize_queries.is_due(session, batch_id)


def killed_at(service: Service, batch_id: str, where: str) -> None:
    """A process of its own ends the batch, and is killed there."""
    env = environment(service.settings, Path(), BATCHSVC_FAILPOINTS=f"{where}=kill")
    killed = subprocess.run([sys.executable, "-c", _FINALIZE, batch_id], env=env, capture_output=True, timeout=60)
    assert killed.returncode == -9, killed.stderr


def held(service: Service) -> int:
    """Tokens that the unfinished batches of the project hold of its quota."""
    with service.planned.db.reading() as session:
        return quota_queries._held_tokens(session, PROJECT)


def test_input_23_workers_that_are_lost(service: Service) -> None:
    """Their leases end, others go on where they were; each line counts once, and who comes back finds itself fenced.

    Processes that are killed, and a Redis that is wiped: tests/faults/test_worker_kills.py, test_redis_faults.py."""
    batch_id = service.with_settings(unit_lines=8).start(lines(24))
    db = service.planned.db
    ghost = db.run(lambda s: unit_queries.claim(s, service.planned.text.meta.digest, "host:1:ghost", 30, 1))[0]
    assert ghost.batch_id == batch_id
    with service.working(slow(service), "first"):
        until(lambda: service.world.batch(batch_id).completed > 0, "a first part")
    seen = service.world.batch(batch_id)
    assert 0 < seen.completed < 24, "it was stopped in the middle"
    service.world.set_units(batch_id, lease_ms=0)
    assert db.run(unit_queries.free_expired) >= 1
    with service.working(name="second"), service.working(name="third"):
        ended = service.finish(batch_id)
    assert sorted(row["custom_id"] for row in ended.output.values()) == sorted(f"c{number}" for number in range(24))
    assert ended.batch["usage"]["cost_nanos"] >= seen.cost_nanos
    postings = service.postings(batch_id)
    assert not db.run(lambda s: unit_queries.renew(s, "host:1:ghost", 30, [ghost.id]))
    assert not db.run(lambda s: unit_queries.release(s, ghost.id, ghost.epoch))
    assert service.postings(batch_id) == postings
    assert service.ended(batch_id) == ended


def test_input_24_a_create_that_is_sent_twice(service: Service) -> None:
    """The client says that it tries again; there is one batch, whatever it was that got lost."""
    body = {"input_file_id": service.upload(lines(2)), "endpoint": URL, "completion_window": "24h"}

    def create(tries: int) -> str:
        answer = service.client.post("/v1/batches", json=body, headers={"x-stainless-retry-count": str(tries)})
        assert answer.status_code == 200
        return str(answer.json()["id"])

    first = create(0)
    assert create(1) == create(2) == first
    assert create(0) != first, "a call that isn't sent again means what it says"
    with ThreadPoolExecutor(8) as callers:
        assert set(callers.map(create, [1] * 16)) <= {first, newest(service)}


def newest(service: Service) -> str:
    listed = service.client.get("/v1/batches?limit=1").json()["data"]
    return str(listed[0]["id"])


def test_input_24_a_hundred_polls_change_nothing(service: Service) -> None:
    with service.working():
        ended = service.run(lines(3))
    batch_id, files = ended.batch["id"], ended.batch["output_file_id"]
    before = everything(service)
    answers: list[str] = []
    lock = threading.Lock()

    def poll(number: int) -> None:
        paths = (f"/v1/batches/{batch_id}", f"/v1/files/{files}", f"/v1/batches/{batch_id}/results")
        answer = service.client.get(paths[number % 3])
        assert answer.status_code == 200
        with lock:
            answers.append(f"{number % 3}{answer.text}")

    with ThreadPoolExecutor(8) as callers:
        list(callers.map(poll, range(100)))
    assert len(set(answers)) == 3
    assert everything(service) == before
    assert json.loads(service.client.get(f"/v1/batches/{batch_id}").text) == ended.batch


def everything(service: Service) -> list[int]:
    """How many rows of what may be charged there are."""
    with service.planned.db.reading() as session:
        return [int(session.scalar(select(func.count()).select_from(table)) or 0) for table in (Batch, Unit)] + [
            service.postings(batch_id) for batch_id in session.scalars(select(Batch.id).order_by(Batch.id))
        ]
