"""Inputs in tenants' stores are copied apart from the planners, a project's one at a time, and let go of at the end."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from batchsvc.batches.planning import PlanProgress
from batchsvc.files import importing
from tests.batchsvc.batches.conftest import planned, tiny_model  # noqa: F401  fixtures
from tests.batchsvc.batches.planned import PROJECT, Planned, jsonl, line
from tests.batchsvc.batches.test_s3_input import abroad, add_batch, file_of  # noqa: F401  a fixture
from tests.dispatchers import NullDispatcher
from tests.tenant_store import Tenant, dripping
from workers.importer import Importer
from workers.plan import Planner

LIVENESS_S = 20


def until(condition: Callable[[], Any], what: str) -> None:
    deadline = time.monotonic() + LIVENESS_S
    while not condition():
        assert time.monotonic() < deadline, f"never saw: {what}"
        time.sleep(0.01)


@pytest.fixture
def importer() -> Iterator[Importer]:
    made = Importer(threads=2)
    yield made
    made.stop()


def test_a_project_has_one_at_a_time_and_room_ends(importer: Importer) -> None:
    gate, begun = threading.Event(), threading.Semaphore(0)
    done: list[str] = []

    def slow(name: str) -> Callable[[], None]:
        def work() -> None:
            begun.release()
            assert gate.wait(LIVENESS_S)
            done.append(name)

        return work

    assert importer.take("a", slow("first"))
    assert not importer.take("a", slow("second of a")), "its first one is on its way"
    assert importer.take("b", slow("b"))
    assert not importer.take("c", slow("c")), "both threads are busy"
    assert begun.acquire(timeout=LIVENESS_S) and begun.acquire(timeout=LIVENESS_S)
    gate.set()
    until(lambda: sorted(done) == ["b", "first"], "both ends")
    until(lambda: importer.take("c", slow("c")), "room again")

    def broken() -> None:
        raise OSError("x")

    until(lambda: importer.take("a", broken), "a's turn")
    until(lambda: importer.take("a", slow("after it")), "an end like any other")
    importer.stop()
    assert importer.is_stopped and sorted(done) == ["after it", "b", "c", "first"]
    assert not importer.take("d", slow("d"))


@pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
def test_a_slow_store_holds_up_its_own_batch_alone(
    abroad: Planned,  # noqa: F811
    tenant: Tenant,
    importer: Importer,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One planner, a store that sends a byte now and then, and a batch of another kind that comes after it."""
    monkeypatch.setattr(importing, "_LOOK_S", 0.1)
    data = jsonl(*(line(f"a{number}") for number in range(50)))
    etag = tenant.put("in/requests.jsonl", data)
    slow, quick = add_batch(abroad, tenant), abroad.add_batch(jsonl(line("b")))
    planner = Planner(abroad.context, abroad.db, NullDispatcher(), "w", importer)
    head = b'HTTP/1.1 200 OK\r\nContent-Length: %d\r\nETag: "%s"\r\n\r\n' % (len(data), etag.encode())
    with dripping(head) as port:
        tenant.register(abroad.db, PROJECT, "in/", endpoint=f"http://127.0.0.1:{port}")
        assert planner.plan(slow) == PlanProgress.LOST
        until(lambda: abroad.batch(slow).plan_owner == "w", "the copy has begun")
        assert planner.plan(quick) == PlanProgress.DONE
        assert abroad.batch(quick).status == "in_progress" and abroad.batch(slow).status == "validating"
        importer.stop()  # the process ends: the copy is let go of
    batch = abroad.batch(slow)
    assert (batch.status, batch.plan_owner) == ("validating", None) and batch.plan_lease_ms == 0
    tenant.register(abroad.db, PROJECT, "in/")
    again = Importer()
    assert Planner(abroad.context, abroad.db, NullDispatcher(), "w2", again).plan(slow) == PlanProgress.LOST
    until(lambda: abroad.batch(slow).status == "in_progress", "its plan")
    again.stop()
    assert file_of(abroad, slow).sha256
