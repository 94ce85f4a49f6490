"""An operator's verbs in SQL, on both databases: what is held isn't claimed, what is released runs again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from sqlalchemy import select
from sqlalchemy.orm import Session

from batchsvc.audit.actor import Actor, ActorKind
from batchsvc.audit.tables import AuditRow
from batchsvc.batches import (
    hold_queries,
    incident_service,
    models,
    poison,
    poison_queries,
    unit_queries,
    worker_queries,
)
from batchsvc.batches.estimate import Habits
from batchsvc.batches.lifecycle import Status
from batchsvc.batches.offpeak import Night
from batchsvc.batches.tables import Batch, Part, Unit, Worker
from batchsvc.batches.unit_queries import ClaimedUnit
from batchsvc.batches.worker_queries import Place
from batchsvc.errors import InvalidRequestError, NotFoundError
from tests.workers.conftest import DIGEST, World
from tests.workers.helpers import finish, put_part
from workers.finalize import Finalizer
from workers.poison import Condemner

OTHER = "e" * 64
US = Actor(kind=ActorKind.CLI, id="op@host")
RENEW_S = 5.0


def run(world: World, act: Callable[..., Any], *given: Any) -> Any:
    return world.db.run(lambda session: act(session, US, *given))


def claim(world: World, owner: str = "host:1:a", digest: str = DIGEST, limit: int = 1) -> list[ClaimedUnit]:
    return world.db.run(lambda session: unit_queries.claim(session, digest, owner, 30, limit))


def commit(world: World, unit: ClaimedUnit) -> None:
    part = put_part(world, unit, finish(world, unit))
    assert world.db.run(lambda session: unit_queries.commit_part(session, unit.id, unit.epoch, part))


def crash(world: World) -> int:
    return world.db.run(lambda session: unit_queries.free_owner(session, "host", 1))


def start(world: World, worker_id: str, name: str | None = None, digest: str = DIGEST, *others: str) -> None:
    place = Place(name=name, models=(digest, *others))
    world.db.run(lambda session: worker_queries.register(session, worker_id, digest, place))


def audited(world: World) -> list[tuple[str, str]]:
    with world.db.reading() as session:
        rows = session.scalars(select(AuditRow).order_by(AuditRow.effective_ms, AuditRow.id)).all()
    assert all(row.actor_id == US.id for row in rows)
    return [(row.action, row.target_id) for row in rows]


def known(world: World) -> None:
    def register(session: Session) -> None:
        models.register(session, "tiny", "/tiny", digest=DIGEST, context_tokens=64)
        models.register(session, "other", "/other", digest=OTHER, context_tokens=64)

    world.db.run(register)


# ---- holds


def test_paused_claims_stop_what_is_new_and_nothing_that_runs(world: World) -> None:
    known(world)
    batch_id = world.add_batch(num_lines=4, unit_lines=1)
    unit = claim(world)[0]
    run(world, incident_service.pause_claims, None, "a bad release")
    assert claim(world) == [] and claim(world, "host:2:b") == []
    with world.db.reading() as session:
        assert unit_queries.scaling(session, True)[DIGEST].claimable == 0, "nobody is wanted for it"
    assert world.db.run(lambda s: unit_queries.take_tickets_due(s, DIGEST, 9, 0)) == 3, "tickets are hints"
    commit(world, unit)
    run(world, incident_service.pause_claims, "tiny", "one model")
    run(world, incident_service.resume_claims, None)
    assert claim(world) == [] and claim(world, digest=OTHER) == [], "the pause of the model is another one"
    run(world, incident_service.resume_claims, "tiny")
    assert len(claim(world, limit=9)) == 3
    assert world.batch(batch_id).completed == 1
    assert audited(world) == [
        ("claims.paused", "all"),
        ("claims.paused", "tiny"),
        ("claims.resumed", "all"),
        ("claims.resumed", "tiny"),
    ]


def test_a_pause_ends_though_new_weights_came_under_its_name(world: World) -> None:
    known(world)
    world.add_batch(num_lines=2, unit_lines=1)
    for name in ("shown", "digest"):
        run(world, incident_service.pause_claims, "tiny", "slow")
        with world.db.transaction() as session:
            models.register(session, "tiny", "/new", digest="f" * 64, context_tokens=64)
            (held,) = incident_service.claims(session)["data"]
        assert held["model"] == DIGEST[:16] and claim(world) == []
        with pytest.raises(InvalidRequestError, match=f"of tiny aren't paused: those of {DIGEST[:16]} are"):
            run(world, incident_service.resume_claims, "tiny")
        run(world, incident_service.resume_claims, DIGEST if name == "digest" else held["model"])
        assert len(claim(world)) == 1
        known(world)
    with pytest.raises(NotFoundError, match="no model dddd"):
        run(world, incident_service.resume_claims, DIGEST[:16])


@pytest.mark.parametrize("ends", ["in order", "silently"])
def test_a_drain_of_one_process_ends_with_it(world: World, ends: str) -> None:
    start(world, "host:1:a", "gpu-1")
    for worker in ("host:1:a", "gpu-1"):
        run(world, incident_service.drain, worker, None, RENEW_S)
    if ends == "in order":
        world.db.run(lambda s: worker_queries.retire(s, "host:1:a"))
    else:
        with world.db.transaction() as session:
            session.get_one(Worker, "host:1:a").beat_ms = 1
        assert world.db.run(lambda s: worker_queries.forget_dead(s, 60)) == 1
    with world.db.reading() as session:
        assert set(hold_queries.every(session)) == {"worker:gpu-1"}, "a name outlives its process"


def test_what_isnt_paused_is_said(world: World) -> None:
    known(world)
    with pytest.raises(InvalidRequestError, match="Claims of all models aren't paused"):
        run(world, incident_service.resume_claims, None)
    run(world, incident_service.pause_claims, "tiny", None)
    with pytest.raises(InvalidRequestError, match="of all models aren't paused: those of tiny are"):
        run(world, incident_service.resume_claims, None)
    with pytest.raises(NotFoundError, match="no model nope"):
        run(world, incident_service.pause_claims, "nope", None)
    for reason in ("x" * 256, "two\nlines"):
        with pytest.raises(InvalidRequestError, match="printable characters"):
            run(world, incident_service.pause_claims, None, reason)
    with world.db.reading() as session:
        assert [row["reason"] for row in incident_service.claims(session)["data"]] == ["by the operator"]


def test_a_worker_that_is_drained_by_name_stays_so_when_it_starts_again(world: World) -> None:
    world.add_batch(num_lines=6, unit_lines=1)
    start(world, "host:1:a", "gpu-1")
    start(world, "host:2:b", "gpu-2")
    held = claim(world)
    shown = run(world, incident_service.drain, "gpu-1", "hot", RENEW_S)["data"]
    assert [(row["state"], row["units"], row["drain_reason"]) for row in shown] == [("draining", 1, "hot")]
    assert claim(world) == [] and len(claim(world, "host:2:b")) == 1
    commit(world, held[0])
    drained = world.db.run(
        lambda s: worker_queries.beat(s, "host:1:a", DIGEST, is_draining=False, stats={}, place=Place(name="gpu-1"))
    )
    assert drained == "hot", "the worker hears it with its heartbeat"
    start(world, "host:9:new", "gpu-1")
    assert claim(world, "host:9:new") == [], "a new start of the same worker"
    with world.db.reading() as session:
        assert session.get_one(Worker, "host:9:new").is_draining
    states = {row["id"]: row["state"] for row in run(world, incident_service.undrain, "gpu-1", RENEW_S)["data"]}
    assert set(states) == {"host:1:a", "host:9:new"}
    assert len(claim(world, "host:9:new")) == 1
    assert audited(world) == [("worker.drained", "gpu-1"), ("worker.undrained", "gpu-1")]


def test_a_worker_drained_by_id_is_that_process_alone(world: World) -> None:
    world.add_batch(num_lines=4, unit_lines=1)
    start(world, "host:1:a", "gpu-1")
    run(world, incident_service.drain, "host:1:a", None, RENEW_S)
    start(world, "host:1:b", "gpu-1")
    assert claim(world) == [] and len(claim(world, "host:1:b")) == 1
    run(world, incident_service.undrain, "gpu-1", RENEW_S)
    assert len(claim(world)) == 1, "by its name, all of it"
    run(world, incident_service.drain, "gpu-1", None, RENEW_S)
    with pytest.raises(InvalidRequestError, match="isn't drained: it is drained by its name, so undrain gpu-1"):
        run(world, incident_service.undrain, "host:1:a", RENEW_S)
    for act, given in ((incident_service.drain, ("nope", None)), (incident_service.undrain, ("nope",))):
        with pytest.raises((NotFoundError, InvalidRequestError), match="nope"):
            run(world, act, *given, RENEW_S)


def test_suspects_dont_wait_for_a_drained_worker(world: World) -> None:
    world.add_batch(num_lines=1, unit_lines=1)
    start(world, "host:1:a", "first")
    start(world, "host:2:b", "second")
    for _ in range(poison.CRASHES):
        claim(world)
        crash(world)
    start(world, "host:1:a", "first")
    assert claim(world, "host:2:b") == [], "the first worker runs suspects"
    run(world, incident_service.drain, "first", None, RENEW_S)
    assert claim(world) == [] and len(claim(world, "host:2:b")) == 1


# ---- batches


def test_pauses_of_operator_and_project_are_apart(world: World) -> None:
    batch_id = world.add_batch(num_lines=2, unit_lines=1)
    run(world, incident_service.pause_batch, batch_id, "its lines look odd")
    world.db.run(lambda s: poison_queries.pause(s, batch_id, None))
    assert run(world, incident_service.pause_batch, batch_id, "again").pause_reason == "its lines look odd"
    world.db.run(lambda s: poison_queries.resume(s, batch_id, is_operator=False))
    assert claim(world) == [], "the project's resume leaves the operator's pause"
    world.db.run(lambda s: poison_queries.pause(s, batch_id, None))
    run(world, incident_service.resume_batch, batch_id)
    assert claim(world) == [], "the operator's resume leaves the project's pause"
    world.db.run(lambda s: poison_queries.resume(s, batch_id, is_operator=False))
    assert len(claim(world)) == 1
    acts = [action for action, target in audited(world) if target == batch_id]
    assert acts == ["batch.paused", "batch.paused", "batch.resumed"]
    with world.db.reading() as session:
        rows = session.scalars(select(AuditRow).order_by(AuditRow.effective_ms, AuditRow.id)).all()
    assert [row.details.get("reason") for row in rows] == ["its lines look odd", "again", None]
    assert rows[1].details["shown"] == "its lines look odd", "what the batch goes on to say"


def look(world: World, batch_id: str) -> dict[str, Any]:
    with world.db.reading() as session:
        return incident_service.why(session, batch_id, Night(), Habits(), RENEW_S, 600.0)


def stuck(world: World) -> dict[str, tuple[str, str]]:
    with world.db.reading() as session:
        page = incident_service.stuck_batches(session, Night(), RENEW_S, 600.0)
    return {row["id"]: (row["reason"], row["next"]) for row in page["data"]}


def test_what_is_stuck_in_sql(world: World) -> None:
    known(world)
    moving, paused, foreign = (world.add_batch(num_lines=2, unit_lines=1, digest=d) for d in (DIGEST, DIGEST, OTHER))
    ended = world.add_batch(num_lines=1)
    world.set_batch(ended, status=Status.COMPLETED, ended_ms=1)
    start(world, "host:1:a", "gpu-1")
    run(world, incident_service.pause_batch, paused, "odd")
    assert stuck(world) == {
        paused: ("it is paused: odd", f"batchsvc batches resume {paused}"),
        foreign: ("no worker serves tiny", "batchsvc models load tiny"),
    }
    run(world, incident_service.drain, "gpu-1", None, RENEW_S)
    assert stuck(world)[moving] == ("the workers of tiny are drained: gpu-1", "batchsvc workers undrain gpu-1")
    run(world, incident_service.undrain, "gpu-1", RENEW_S)
    start(world, "host:1:a", "gpu-1")
    run(world, incident_service.pause_claims, "tiny", "slow")
    assert stuck(world)[moving] == ("claims are paused: slow", "batchsvc claims resume --model tiny")
    run(world, incident_service.resume_claims, "tiny")
    assert moving not in stuck(world) and look(world, moving)["reason"] is None
    units = claim(world, limit=2)
    assert look(world, moving)["workers"] == ["gpu-1"] and len(units) == 2
    world.set_batch(moving, in_progress_ms=1)
    says, following = stuck(world)[moving]
    assert says.startswith("gpu-1 has 2 of its units") and following.endswith("workers drain gpu-1")
    assert look(world, ended)["reason"] is None and look(world, ended)["progress"]["phase"] == "ended"
    with pytest.raises(NotFoundError):
        look(world, "batch_nope")


def test_nobody_who_plans_or_merges_is_a_reason(world: World) -> None:
    unplanned, undone = world.add_batch(num_lines=1), world.add_batch(num_lines=1)
    start(world, "host:1:a")
    world.set_batch(unplanned, status=Status.VALIDATING, created_ms=1, plan_lease_ms=0)
    world.set_units(undone, state="done")
    world.set_batch(undone, in_progress_ms=1)
    assert stuck(world) == {
        unplanned: ("no control worker plans it", "batchsvc doctor"),
        undone: ("all of its lines are done, and no control worker puts them together", "batchsvc doctor"),
    }


# ---- quarantine


def condemned(world: World, num_lines: int = 2) -> str:
    """A batch in progress, one line of which got its error line."""
    batch_id = world.add_batch(num_lines=num_lines, unit_lines=1)
    poisoned = world.units(batch_id)[0].id
    with world.db.transaction() as session:
        unit = session.get_one(Unit, poisoned)
        unit.is_suspect, unit.crash_count = True, poison.CRASHES
    taken = world.db.run(lambda s: unit_queries.claim_poison(s, "reaper", 30, 1))
    assert [unit.id for unit in taken] == [poisoned] and Condemner(world.db, world.store).condemn(taken[0])
    return batch_id


def quarantined(world: World, batch_id: str | None = None) -> list[dict[str, Any]]:
    with world.db.reading() as session:
        found: list[dict[str, Any]] = incident_service.quarantine(session, batch_id)["data"]
    return found


def test_a_released_line_runs_again_and_is_billed_once(world: World) -> None:
    batch_id = condemned(world)
    (listed,) = quarantined(world, batch_id)
    assert (listed["object"], listed["batch_id"], listed["batch_status"]) == (
        "quarantine.line",
        batch_id,
        "in_progress",
    )
    assert world.batch(batch_id).failed == 1
    done = run(world, incident_service.release, batch_id, [listed["line"]])
    assert (done["lines"], done["units"]) == ([listed["line"]], [])
    assert quarantined(world) and quarantined(world)[0]["object"] == "quarantine.unit", "it begins alone"
    assert world.batch(batch_id).failed == 0
    while units := claim(world):
        commit(world, units[0])
    assert quarantined(world) == []
    assert Finalizer(world.settings, world.db, world.store, "fin").finalize(batch_id)
    world.judge(batch_id, Status.COMPLETED)
    assert len(world.result(batch_id, "output")) == 2 and world.result(batch_id, "error") == []
    assert audited(world) == [("quarantine.released", batch_id)]


def test_a_released_line_that_ends_engines_again_comes_back(world: World) -> None:
    batch_id = condemned(world, num_lines=1)
    world.set_batch(batch_id, total=2)  # so that the batch isn't done with it
    run(world, incident_service.release, batch_id, [])
    for _ in range(poison.CRASHES):
        assert len(claim(world)) == 1
        crash(world)
    taken = world.db.run(lambda s: unit_queries.claim_poison(s, "reaper", 30, 1))
    assert Condemner(world.db, world.store).condemn(taken[0])
    assert [row["object"] for row in quarantined(world)] == ["quarantine.line"]
    with world.db.reading() as session:
        assert sorted(session.scalars(select(Part.is_void).where(Part.is_poison))) == [False, True]


def test_suspects_are_released_to_run_beside_others(world: World) -> None:
    batch_id = world.add_batch(num_lines=4, unit_lines=4)
    for _ in range(poison.CRASHES):
        claim(world)
        crash(world)
    assert [(row["lines"], row["crashes"]) for row in quarantined(world)] == [(2, 0), (2, 0)]
    assert len(run(world, incident_service.release, batch_id, [])["units"]) == 2
    assert quarantined(world) == [] and len(claim(world, limit=9)) == 2


@pytest.mark.parametrize(
    ("status", "says"),
    [
        (Status.COMPLETED, "is completed, and its results stay as they are: .* `batchsvc retry batch_"),
        (Status.FINALIZING, "is finalizing: its results are being put together"),
        (Status.CANCELLING, "is cancelling: its results are being put together"),
    ],
)
def test_what_cant_be_released_says_why(world: World, status: Status, says: str) -> None:
    batch_id = condemned(world)
    line = quarantined(world)[0]["line"]
    world.set_batch(batch_id, status=status, ended_ms=1 if status == Status.COMPLETED else None)
    with pytest.raises(InvalidRequestError, match=says):
        run(world, incident_service.release, batch_id, [line])
    assert world.batch(batch_id).failed == 1 and audited(world) == []


def test_bad_releases(world: World) -> None:
    batch_id = condemned(world)
    for given, says in (
        ((batch_id, [99]), "Line 99 of batch_.* isn't in quarantine"),
        ((world.add_batch(num_lines=1), []), "Nothing of batch_.* is in quarantine"),
        (("batch_nope", []), "There is no batch batch_nope"),
    ):
        with pytest.raises((InvalidRequestError, NotFoundError), match=says):
            run(world, incident_service.release, *given)
    with pytest.raises(NotFoundError):
        quarantined(world, "batch_nope")


def test_holds_are_no_rows_of_batches(world: World) -> None:
    batch_id = world.add_batch(num_lines=1)
    run(world, incident_service.pause_claims, None, "x")
    with world.db.reading() as session:
        assert not session.get_one(Batch, batch_id).is_paused and set(hold_queries.every(session)) == {"*"}
