"""What workers serve in turn, in SQL, on both databases: orders, what waits for each model, and who changes over."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from sqlalchemy import select, update
from sqlalchemy.orm import Session

from batchsvc.audit.actor import Actor, ActorKind
from batchsvc.audit.tables import AuditRow
from batchsvc.batches import (
    hold_queries,
    loading_service,
    models,
    stuck_queries,
    switch_queries,
    waiting,
    worker_queries,
)
from batchsvc.batches.model_switch import Queue, Seat, Why
from batchsvc.batches.offpeak import Night
from batchsvc.batches.tables import Batch, Model, Worker
from batchsvc.batches.worker_queries import Place
from batchsvc.clock import now_ms
from batchsvc.errors import InvalidRequestError, NotFoundError
from tests.workers.conftest import DIGEST, World

OTHER = "e" * 64
THIRD = "f" * 64
US = Actor(kind=ActorKind.CLI, id="op@host")
RENEW_S = 5.0


@pytest.fixture(autouse=True)
def registered(world: World) -> None:
    def register(session: Session) -> None:
        for name, digest in (("tiny", DIGEST), ("other", OTHER), ("third", THIRD)):
            models.register(session, name, f"/{name}", digest=digest, context_tokens=64)

    world.db.run(register)


def start(world: World, worker_id: str, name: str, *digests: str) -> None:
    world.db.run(
        lambda s: worker_queries.register(s, worker_id, digests[0], Place(name=name, models=digests)),
    )


def wanted(world: World, name: str, *own: str) -> list[str]:
    with world.db.reading() as session:
        return switch_queries.wanted(session, [name], own)


def load(world: World, model: str, worker: str | None = None) -> dict[str, Any]:
    return world.db.run(lambda s: loading_service.load(s, US, model, worker, RENEW_S))


def unload(world: World, model: str, worker: str | None = None) -> dict[str, Any]:
    return world.db.run(lambda s: loading_service.unload(s, US, model, worker, RENEW_S))


def lately() -> int:
    """Since when who is silent counts as dead."""
    return now_ms() - round(3 * 1000 * RENEW_S)


def waits(world: World, batch_id: str) -> str | None:
    with world.db.reading() as session:
        row = session.get_one(Batch, batch_id)
        return waiting.waiting_for(row, waiting.look_around(session, [row], Night(), RENEW_S))


def told(world: World, batch_id: str) -> str | None:
    """What operators are told that it waits for."""
    with world.db.reading() as session:
        row = session.get_one(Batch, batch_id)
        return stuck_queries.facts(session, [row], Night(), RENEW_S)[batch_id].in_turn


def test_orders_change_what_settings_name(world: World) -> None:
    start(world, "h:1:a", "one", DIGEST)
    start(world, "h:2:b", "two", DIGEST)
    assert wanted(world, "one", DIGEST) == [DIGEST]
    load(world, "other")
    assert wanted(world, "one", DIGEST) == wanted(world, "two", DIGEST) == [DIGEST, OTHER]
    load(world, "third", "two")
    assert wanted(world, "two", DIGEST) == [DIGEST, OTHER, THIRD] and THIRD not in wanted(world, "one", DIGEST)
    unload(world, "other", "two")
    assert wanted(world, "two", DIGEST) == [DIGEST, THIRD], "an order for its name counts more"
    load(world, "other")
    assert OTHER in wanted(world, "two", DIGEST), "an order for all ends those by name"
    unload(world, "other")
    assert wanted(world, "one", DIGEST) == [DIGEST]
    with world.db.transaction() as session:
        switch_queries.order(session, "", DIGEST, is_loaded=False)
    assert wanted(world, "one", DIGEST) == [DIGEST], "a worker always has one"
    with world.db.reading() as session:
        acts = [row.action for row in session.scalars(select(AuditRow).order_by(AuditRow.effective_ms))]
    assert sorted(acts) == ["model.loaded"] * 3 + ["model.unloaded"] * 2


def test_unloading_what_is_needed_is_refused_by_name(world: World) -> None:
    start(world, "h:1:a", "one", DIGEST, OTHER)
    needed = [world.add_batch(num_lines=1, digest=OTHER) for _ in range(2)]
    with pytest.raises(
        InvalidRequestError, match=r"other can't be unloaded, .* need it: batch_\w+, batch_\w+\."
    ) as refused:
        unload(world, "other")
    assert all(batch_id in str(refused.value) for batch_id in needed)
    start(world, "h:2:b", "two", OTHER, DIGEST)
    unload(world, "other", "one")  # another worker is there for them
    with pytest.raises(InvalidRequestError, match="other can't be unloaded"):
        unload(world, "other")
    for batch_id in needed:
        world.set_batch(batch_id, status="completed", ended_ms=1)
        world.set_units(batch_id, state="done")
    unload(world, "other")


def test_unloads_in_a_row_leave_each_worker_a_model(world: World) -> None:
    start(world, "h:1:a", "one", DIGEST, OTHER)
    unload(world, "other")
    with pytest.raises(InvalidRequestError, match="tiny is the only model of the worker one"):
        unload(world, "tiny")  # the worker hasn't even heard of the first


def test_bad_loads(world: World) -> None:
    start(world, "h:1:a", "one", DIGEST)
    with pytest.raises(NotFoundError, match="no model nope: `batchsvc models add nope`"):
        load(world, "nope")
    for worker in ("nope", "h:1:a"):
        with pytest.raises(NotFoundError, match="no worker by the name"):
            load(world, "other", worker)
    with pytest.raises(InvalidRequestError, match="tiny is the only model of the worker one"):
        unload(world, "tiny")


def test_a_batch_says_whose_turn_it_waits_for(world: World) -> None:
    batch_id = world.add_batch(num_lines=1, digest=OTHER)
    world.set_batch(batch_id, model_id="other")
    assert waits(world, batch_id) == "no worker for model other"
    start(world, "h:1:a", "one", DIGEST, OTHER)
    assert waits(world, batch_id) == "its turn: a worker serves another model now"
    assert told(world, batch_id) == "its turn: the worker one serves tiny now, and other after it"
    world.db.run(lambda s: worker_queries.change_over(s, "h:1:a", OTHER))
    assert waits(world, batch_id) == "a worker, which loads other"
    assert told(world, batch_id) == "the worker one, which loads other"
    world.db.run(lambda s: worker_queries.register(s, "h:1:a", OTHER, Place(name="one", models=(OTHER, DIGEST))))
    assert waits(world, batch_id) is None


def test_what_waits_is_seen_by_one_worker(world: World) -> None:
    start(world, "h:1:a", "one", DIGEST, OTHER)
    world.add_batch(num_lines=4, unit_lines=2, digest=OTHER, expires_in_s=100)
    with world.db.transaction() as session:
        session.execute(update(Batch).values(in_progress_ms=now_ms() - 50_000))
        session.execute(update(Model).where(Model.digest == OTHER).values(swap_ms=2_500))
    with world.db.reading() as session:
        view = switch_queries.look(session, "h:1:a", DIGEST, [DIGEST, OTHER], is_night=True, since_ms=lately())
    own, other = view.queues
    assert view.is_idle and (own.units, own.slack_s, own.wait_s) == (0, None, 0)
    assert (other.units, other.workers, other.swap_s) == (2, 0, 2.5)
    assert other.slack_s is not None and 90 < other.slack_s <= 100 and 49 < other.wait_s < 60
    world.db.run(lambda s: worker_queries.change_over(s, "h:1:a", DIGEST))  # it lets go of the model that it serves
    with world.db.transaction() as session:
        session.execute(update(Model).where(Model.digest == OTHER).values(served_ms=now_ms() - 10_000))
    with world.db.reading() as session:
        other = switch_queries.look(session, "h:1:a", DIGEST, [OTHER], is_night=True, since_ms=lately()).queues[0]
    assert 9 < other.wait_s < 20, "it was served since"


def test_two_workers_dont_change_over_for_one_unit(world: World) -> None:
    for number in (1, 2):
        start(world, f"h:{number}:a", f"w{number}", DIGEST, OTHER)
    world.add_batch(num_lines=1, digest=OTHER)
    dry = Seat(digest=DIGEST, served_s=1e6, dry_s=1e6)
    got = [
        world.db.run(
            lambda s, w=f"h:{n}:a": switch_queries.change_over(
                s, w, dry, [DIGEST, OTHER], is_night=True, since_ms=lately()
            )
        )
        for n in (1, 2)
    ]
    assert got[0] is not None and (got[0].digest, got[0].why) == (OTHER, Why.DRY)
    assert got[1] is None, "one is on its way"
    with world.db.reading() as session:
        row = session.get_one(Worker, "h:1:a")
        assert (row.switching_to, row.is_draining) == (OTHER, True)
        served = loading_service.served_by(session, RENEW_S)
    assert served == {DIGEST: ["w1 (in turn)", "w2"], OTHER: ["w1 (loads it)", "w2 (in turn)"]}


def seen(world: World, digest: str, since_ms: int) -> Queue:
    """What waits for a model, as a worker sees it that serves another one."""
    with world.db.reading() as session:
        return switch_queries.look(session, "h:9:z", THIRD, [digest], is_night=True, since_ms=since_ms).queues[0]


def test_who_beats_slowly_is_alive(world: World) -> None:
    start(world, "h:1:a", "one", OTHER)
    start(world, "h:2:b", "two", DIGEST, OTHER)
    world.db.run(lambda s: worker_queries.change_over(s, "h:2:b", OTHER))
    beat = [(5.0, 1, 10), (25.0, 1, 60), (5.0, 0, 61), (25.0, 1, 100), (25.0, 0, 121)]
    for renew_s, alive, silent_s in beat:
        with world.db.transaction() as session:
            session.execute(update(Worker).values(beat_ms=now_ms() - 1000 * silent_s))
            since_ms = waiting.alive_since_ms(session, renew_s)
        serves = int(silent_s < 3 * renew_s)
        assert seen(world, OTHER, since_ms).workers == serves + alive, (renew_s, silent_s)


@pytest.mark.parametrize("ends", ["in order", "known", "forgotten", "silent"])
def test_work_waits_since_its_only_worker_ended(world: World, ends: str) -> None:
    """Not since it began: else another worker changes over at once while that one starts anew."""
    start(world, "h:1:a", "one", OTHER)
    batch_id = world.add_batch(num_lines=1, digest=OTHER)
    world.set_batch(batch_id, in_progress_ms=now_ms() - 3_600_000)
    died_s = 0 if ends == "in order" else 30
    with world.db.transaction() as session:
        session.execute(update(Worker).values(beat_ms=now_ms() - 30_000))
        if ends == "in order":
            worker_queries.retire(session, "h:1:a")
        elif ends == "known":
            worker_queries.mark_dead(session, "h", 1)
        elif ends == "forgotten":
            assert worker_queries.forget_dead(session, 20) == 1
    queue = seen(world, OTHER, lately())
    assert queue.workers == 0 and died_s <= queue.wait_s < died_s + 20


def test_unloads_in_a_row_leave_unfinished_batches_a_worker(world: World) -> None:
    start(world, "h:1:a", "one", DIGEST, OTHER)
    start(world, "h:2:b", "two", DIGEST, OTHER)
    world.add_batch(num_lines=1, digest=OTHER)
    unload(world, "other", "one")
    with pytest.raises(InvalidRequestError, match="other can't be unloaded"):
        unload(world, "other", "two")  # the first of them hasn't even heard of it
    load(world, "other", "one")
    unload(world, "other", "two")


@pytest.mark.parametrize("what", ["hold", "order"])
def test_two_operators_at_once(world: World, what: str) -> None:
    def act(session: Session, number: int) -> None:
        if what == "hold":
            hold_queries.hold(session, hold_queries.EVERYTHING, f"reason {number}")
        else:
            switch_queries.order(session, "one", OTHER, is_loaded=number == 2)

    failed: list[Exception] = []

    def second() -> None:
        try:
            world.db.run(lambda session: act(session, 2))
        except Exception as error:
            failed.append(error)

    thread = threading.Thread(target=second)
    with world.db.transaction() as session:
        act(session, 1)
        thread.start()
        thread.join(0.3)  # it waits for the first one, if it was quick enough
    thread.join(20)
    assert not failed and not thread.is_alive()
    with world.db.reading() as session:
        if what == "hold":
            assert hold_queries.every(session)["*"].reason == "reason 2"
        else:
            assert switch_queries.wanted(session, ["one"], [DIGEST]) == [DIGEST, OTHER]
