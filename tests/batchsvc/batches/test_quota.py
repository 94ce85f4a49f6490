"""The quota of a project: who starts, who waits, in which order, and that every end gives back what was held."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchsvc.accounts import administration
from batchsvc.accounts import service as accounts
from batchsvc.audit.actor import at_command_line
from batchsvc.batches import plan_queries, quota_queries, service, unit_queries
from batchsvc.batches.lifecycle import TERMINAL, Status
from batchsvc.batches.quota import Waiting, admitted
from batchsvc.batches.tables import Batch
from batchsvc.clock import now_ms
from batchsvc.db.session import Database
from batchsvc.settings import Settings
from batchsvc.tables import metadata

queues = st.lists(st.integers(0, 100), max_size=12).map(
    lambda sizes: [Waiting(str(no), size) for no, size in enumerate(sizes)]
)


@given(queues, st.integers(0, 300), st.integers(1, 200))
def test_admission_keeps_order_and_quota(queue: list[Waiting], held: int, most: int) -> None:
    taken = admitted(queue, held=held, quota=most)
    assert taken == [one.batch_id for one in queue[: len(taken)]], "in order, without gaps"
    total = held
    for one in queue[: len(taken)]:
        assert total == 0 or total + one.tokens <= most
        total += one.tokens
    if len(taken) < len(queue):
        assert total and total + queue[len(taken)].tokens > most, "whoever fits is admitted"


@given(queues, st.integers(1, 200))
def test_every_batch_starts_in_the_end(queue: list[Waiting], most: int) -> None:
    """Whatever was admitted ends, then the next ones are: nobody is left over, however large."""
    started = []
    while queue:
        taken = admitted(queue, held=0, quota=most)
        assert taken
        started += taken
        queue = queue[len(taken) :]
    assert started == sorted(started, key=int)


@given(queues, st.integers(0, 300))
def test_without_a_quota_all_start(queue: list[Waiting], held: int) -> None:
    assert admitted(queue, held=held, quota=None) == [one.batch_id for one in queue]


class Office:
    """A project with a quota, and batches whose planning ends here."""

    def __init__(self, settings: Settings) -> None:
        self.db = Database(settings.database_url)
        metadata.create_all(self.db.engine)
        with self.db.transaction() as session:
            self.project_id = accounts.create_project(session, "p").id
        self._number = 0

    def set_quota(self, tokens: int | None) -> None:
        self.db.run(
            lambda s: administration.change_project(s, at_command_line(), self.project_id, {"quota_tokens": tokens})
        )

    def add(self, **values: Any) -> str:
        """A batch whose planning has just begun, younger than all before it."""
        self._number += 1
        batch_id = f"batch_{self._number}"
        row = {
            "id": batch_id,
            "project_id": self.project_id,
            "api_key_id": "key",
            "endpoint": "/v1/chat/completions",
            "input_file_id": "file-x",
            "completion_window": "24h",
            "tier": "batch_24h",
            "status": Status.VALIDATING,
            "created_ms": self._number,
            "expires_ms": now_ms() + 3_600_000,
            "price_version": 1,
            "plan_epoch": 1,
            "model_digest": "d" * 64,
            "model_id": "m",
        }
        with self.db.transaction() as session:
            session.add(Batch(**(row | values)))
        return batch_id

    def plan(self, batch_id: str, tokens: int, default: int | None = None) -> str:
        """End its planning with so much predicted work; one unit of it. What it waits for, or its status."""
        unit = plan_queries.NewUnit(no=0, s3_key="k", sha256="x", num_lines=1, est_tokens=tokens)
        window = plan_queries.NewWindow(
            first_line=1,
            last_line=1,
            num_lines=1,
            next_offset=1,
            input_tokens=1,
            line_nos_key=f"{batch_id}/lines",
            line_nos_sha256="x",
            reserve_nanos=5,
            units=[unit],
            keeps_lease=True,
        )
        assert self.db.run(lambda s: plan_queries.add_window(s, batch_id, 1, 0, window, max_problems=9))
        assert self.db.run(lambda s: plan_queries.start(s, batch_id, 1, default))
        return self.says(batch_id)

    def begin(self, tokens: int, default: int | None = None, **values: Any) -> str:
        return self.plan(self.add(**values), tokens, default)

    def says(self, batch_id: str) -> str:
        shown = self.show(batch_id)
        return str(shown["waiting_for"] if shown["waiting_for"] == "quota" else shown["status"])

    def show(self, batch_id: str) -> dict[str, Any]:
        with self.db.reading() as session:
            return service.show(session, [session.get_one(Batch, batch_id)], renew_s=1)[0]

    def end(self, batch_id: str, status: Status = Status.COMPLETED) -> None:
        with self.db.transaction() as session:
            session.get_one(Batch, batch_id).status = status

    def admit(self, default: int | None = None) -> list[str]:
        with self.db.reading() as session:
            projects = quota_queries.projects_waiting(session)
        assert projects in ([], [self.project_id])
        return [each for p in projects for each in self.db.run(lambda s, p=p: quota_queries.admit(s, p, default))]

    def claimable(self) -> int:
        with self.db.reading() as session:
            return unit_queries.scaling(session, is_night=True).get("d" * 64, unit_queries.Backlog(0, 0)).claimable


@pytest.fixture
def office(settings: Settings) -> Any:
    made = Office(settings)
    yield made
    made.db.dispose()


def test_a_full_quota_makes_a_batch_wait_its_turn(office: Office) -> None:
    office.set_quota(100)
    assert office.begin(60) == "in_progress"
    assert office.begin(60) == "quota"
    assert office.begin(10) == "quota", "it would fit, and comes after the one that waits"
    assert office.claimable() == 1, "what waits wants no worker"
    assert office.admit() == []
    office.end("batch_1")
    assert office.admit() == ["batch_2", "batch_3"]
    assert [office.says(f"batch_{no}") for no in (2, 3)] == ["in_progress"] * 2
    assert office.claimable() == 2
    assert office.admit() == []


def test_the_oldest_waits_in_front(office: Office) -> None:
    """By the age of the batches, not by when their planning ended."""
    office.set_quota(100)
    slow = office.add()
    assert office.begin(100) == "in_progress"
    assert office.begin(50) == "quota"
    assert office.plan(slow, 90) == "quota"
    office.end("batch_2")
    assert office.admit() == [slow]


@pytest.mark.parametrize("status", sorted(TERMINAL))
def test_every_end_gives_the_quota_back(office: Office, status: Status) -> None:
    office.set_quota(100)
    assert office.begin(100) == "in_progress"
    assert office.begin(100) == "quota"
    for still in (Status.CANCELLING, Status.FINALIZING):
        office.end("batch_1", still)
        assert office.admit() == [], "its tokens are given back when it has ended"
    office.end("batch_1", status)
    assert office.admit() == ["batch_2"]


def test_who_will_not_wait_fails(office: Office) -> None:
    office.set_quota(100)
    assert office.begin(100, on_quota="fail") == "in_progress"
    assert office.begin(1, on_quota="fail") == "failed"
    shown = office.show("batch_2")
    (error,) = shown["errors"]["data"]
    assert error["code"] == "token_limit_exceeded" and error["line"] is None and "quota of 100" in error["message"]
    assert (shown["request_counts"]["total"], shown["errors_total"]) == (0, 1)
    office.end("batch_1")
    assert office.begin(1, on_quota="fail") == "in_progress"


def test_what_can_never_fit_fails(office: Office) -> None:
    office.set_quota(100)
    assert office.begin(101) == "failed"
    assert office.show("batch_1")["errors"]["data"][0]["code"] == "token_limit_exceeded"
    assert office.begin(100) == "in_progress"


def test_a_quota_that_is_lowered_leaves_nobody_for_ever(office: Office) -> None:
    office.set_quota(100)
    assert [office.begin(80), office.begin(80)] == ["in_progress", "quota"]
    office.set_quota(50)
    assert office.admit() == []
    office.end("batch_1")
    assert office.admit() == ["batch_2"], "it was taken in before, so it runs, alone"


def test_the_setting_holds_for_projects_without_a_quota_of_their_own(office: Office) -> None:
    assert office.begin(10**9) == "in_progress"
    office.end("batch_1")
    assert [office.begin(60, 100), office.begin(60, 100), office.begin(1, None)] == ["in_progress", "quota", "quota"]
    office.set_quota(10**6)
    assert office.admit(100) == ["batch_3", "batch_4"]


def test_what_waits_can_be_cancelled_and_expires(office: Office) -> None:
    office.set_quota(100)
    office.begin(100)
    assert office.begin(100) == office.begin(100) == "quota"
    with office.db.transaction() as session:
        assert service.cancel(session, office.project_id, "batch_2").status == Status.CANCELLING
        session.get_one(Batch, "batch_3").expires_ms = 1
    office.end("batch_1")
    assert office.admit() == []


def test_batches_that_begin_at_once_share_one_quota(office: Office) -> None:
    office.set_quota(100)
    batches = [office.add() for _ in range(6)]
    together = threading.Barrier(len(batches))

    def begin(batch_id: str) -> None:
        together.wait()
        office.plan(batch_id, 40)

    threads = [threading.Thread(target=begin, args=(batch_id,)) for batch_id in batches]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    said = [office.says(batch_id) for batch_id in batches]
    assert sorted(said) == ["in_progress"] * 2 + ["quota"] * 4
