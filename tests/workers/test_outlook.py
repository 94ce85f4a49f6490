"""What rows remember of progress and what a batch says of its end, on both databases."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from sqlalchemy import select

from batchsvc.batches import (
    finalize_queries,
    progress_queries,
    resume_queries,
    service,
    unit_queries,
    worker_queries,
)
from batchsvc.batches.estimate import Habits
from batchsvc.batches.lifecycle import Status
from batchsvc.batches.offpeak import Night
from batchsvc.batches.resume_queries import SavedSequences
from batchsvc.batches.tables import Batch, Part, Unit
from batchsvc.batches.unit_queries import ClaimedUnit, NewPart
from batchsvc.clock import now_ms
from tests.workers.conftest import DIGEST, World

HABITS = Habits(flush_ms=500, death_ms=4_000, tick_ms=500)
EACH = 100  # predicted tokens of a line


def planned(world: World, num_lines: int = 12, unit_lines: int = 4) -> str:
    """A batch whose lines are predicted to take EACH tokens, half of the plan for certain."""
    batch_id = world.add_batch(num_lines, unit_lines)
    world.set_units(batch_id, est_tokens=EACH * unit_lines)
    world.set_batch(batch_id, est_tokens=EACH * num_lines, sure_tokens=EACH * num_lines // 2)
    return batch_id


def claim(world: World) -> ClaimedUnit:
    (unit,) = world.db.run(lambda session: unit_queries.claim(session, DIGEST, "host:1:x", 60, 1))
    return unit


def commit(world: World, unit: ClaimedUnit, bits: int, *, output_tokens: int, part: str) -> None:
    lines = bits.bit_count()
    new = NewPart(
        id=f"part_{unit.id}_{part}",
        s3_key=f"part/{unit.id}/{part}",
        sha256="",
        size_bytes=1,
        bitmap=bits.to_bytes((unit.num_lines + 7) // 8, "little"),
        lines_ok=lines,
        lines_err=0,
        est_tokens=EACH * lines,
        input_tokens=0,
        cached_tokens=0,
        output_tokens=output_tokens,
        cost_nanos=0,
        standard_nanos=0,
    )
    assert world.db.run(lambda session: unit_queries.commit_part(session, unit.id, unit.epoch, new))


def save(world: World, unit: ClaimedUnit, lines: int, tokens: int) -> None:
    saved = SavedSequences(num_lines=lines, num_tokens=tokens)
    assert world.db.run(lambda session: resume_queries.save(session, unit.id, unit.epoch, saved))


def shown(world: World, batch_id: str) -> dict[str, Any]:
    with world.db.reading() as session:
        (found,) = service.show(session, [session.get_one(Batch, batch_id)], renew_s=10, habits=HABITS)
    return found


def share(world: World, batch_id: str) -> float | None:
    found: float | None = shown(world, batch_id)["progress"]["share"]
    return found


def age(world: World, batch_id: str, seconds: int) -> None:
    """Let the samples of a batch be older."""
    stored = world.batch(batch_id).progress_samples or []
    world.set_batch(batch_id, progress_samples=[[at - 1000 * seconds, tokens] for at, tokens in stored])


def test_nothing_is_said_before_anything_was_seen(world: World) -> None:
    batch_id = planned(world)
    says = shown(world, batch_id)
    assert says["progress"] == {"phase": "running", "share": None}
    assert (says["estimated_completion_at"], says["at_risk"]) == (None, False)


def test_shares_grow_by_what_runs_and_what_ends_and_never_fall(world: World) -> None:
    batch_id = planned(world)
    unit = claim(world)
    seen = []
    for tokens in (40, 160):
        save(world, unit, 4, tokens)
        seen.append(share(world, batch_id))
    commit(world, unit, 0b0011, output_tokens=160, part="a")
    batch = world.batch(batch_id)
    assert (batch.running_tokens, batch.running_lines) == (0, 2), "lines that ended run no more"
    seen.append(share(world, batch_id))
    save(world, unit, 2, 1)  # what was saved last was lost: less runs than before
    seen.append(share(world, batch_id))
    commit(world, unit, 0b1100, output_tokens=900, part="b")  # far longer than predicted
    seen.append(share(world, batch_id))
    assert all(isinstance(one, float) for one in seen)
    assert seen == sorted(seen, key=lambda one: one or 0) and (seen[0] or 0) > 0 and (seen[-1] or 0) < 0.98
    batch = world.batch(batch_id)
    assert (batch.est_done_tokens, batch.running_tokens, batch.running_lines) == (400, 0, 0)


def test_an_end_is_told_once_a_rate_is_known(world: World) -> None:
    batch_id = planned(world)
    first = claim(world)
    commit(world, first, 0b0011, output_tokens=200, part="a")
    age(world, batch_id, 10)
    assert shown(world, batch_id)["estimated_completion_at"] is None, "one sample is no rate"
    commit(world, first, 0b1100, output_tokens=200, part="b")
    told = shown(world, batch_id)["estimated_completion_at"]
    now_s = now_ms() / 1000
    assert now_s - 30 <= told["low"] <= now_s + 40 + 30 and now_s + 40 <= told["high"] <= now_s + 600
    world.set_batch(batch_id, is_paused=True, pause_reason="by the operator")
    assert shown(world, batch_id)["estimated_completion_at"] is None, "nobody knows when it is resumed"


def test_a_deadline_that_is_too_near_is_at_risk_and_cuts_the_end(world: World) -> None:
    batch_id = planned(world)
    first = claim(world)
    commit(world, first, 0b0011, output_tokens=200, part="a")
    age(world, batch_id, 600)
    commit(world, first, 0b1100, output_tokens=200, part="b")
    assert shown(world, batch_id)["at_risk"] is False
    deadline = now_ms() + 120_000
    world.set_batch(batch_id, expires_ms=deadline)
    says = shown(world, batch_id)
    assert says["at_risk"] is True
    assert says["estimated_completion_at"]["low"] <= deadline // 1000 + 1
    assert says["estimated_completion_at"]["high"] <= deadline // 1000 + 30


def test_a_batch_that_nobody_runs_is_at_risk_when_it_is_late(world: World) -> None:
    batch_id = planned(world)
    world.set_batch(batch_id, latest_start_ms=now_ms() + 60_000)
    assert shown(world, batch_id)["at_risk"] is False
    world.set_batch(batch_id, latest_start_ms=now_ms() - 60_000)
    assert shown(world, batch_id)["at_risk"] is True


def test_one_that_waits_behind_another_is_told_from_its_rate(world: World) -> None:
    """The other makes 40 tokens a second, so 800 tokens take 20 s from now on: a deadline in 10 s is too near."""
    ahead, behind = planned(world), planned(world)
    first = claim(world)
    mine, other = (ahead, behind) if first.batch_id == ahead else (behind, ahead)
    commit(world, first, 0b0011, output_tokens=200, part="a")
    age(world, mine, 10)
    commit(world, first, 0b1100, output_tokens=200, part="b")
    assert shown(world, other)["at_risk"] is False
    world.set_batch(other, expires_ms=now_ms() + 10_000)
    assert shown(world, other)["at_risk"] is True


@pytest.mark.parametrize("status", [Status.CANCELLING, Status.IN_PROGRESS])
def test_merging_counts_and_only_the_end_is_the_whole(world: World, status: Status) -> None:
    batch_id = planned(world)
    for _ in range(3):
        unit = claim(world)
        bits = 0b0111 if status == Status.CANCELLING else 0b1111
        commit(world, unit, bits, output_tokens=100 * bits.bit_count(), part="a")
    if status == Status.CANCELLING:
        world.set_units(batch_id, state="ready", owner=None)
        world.set_batch(batch_id, status=status, cancelling_ms=now_ms())
        assert shown(world, batch_id)["progress"]["phase"] == "stopping"
    before = share(world, batch_id)
    lease = world.db.run(lambda session: finalize_queries.begin(session, batch_id, "f", 60))
    assert lease is not None
    says = shown(world, batch_id)
    assert says["progress"] == {"phase": "merging", "share": 0.98} and (before or 0) <= 0.98
    assert says["estimated_completion_at"]["high"] >= now_ms() // 1000
    assert world.db.run(lambda session: finalize_queries.keep(session, batch_id, lease.epoch, 60, merged_lines=6))
    assert share(world, batch_id) == 0.99
    assert world.db.run(lambda session: finalize_queries.keep(session, batch_id, lease.epoch, 60, merged_lines=12))
    assert (share(world, batch_id) or 0) == 0.9999, "all lines are put together, and still nobody can read them"
    world.db.run(
        lambda session: finalize_queries.publish(
            session, batch_id, lease.epoch, [], completed=12, failed=0, file_ttl_s=3600
        )
    )
    says = shown(world, batch_id)
    assert says["progress"] == {"phase": "ended", "share": 1.0}
    assert (says["estimated_completion_at"], says["at_risk"]) == (None, False)


def test_a_part_that_is_taken_back_takes_no_share_back(world: World) -> None:
    batch_id = planned(world, 4, 4)
    unit = claim(world)
    commit(world, unit, 0b1111, output_tokens=400, part="a")
    lease = world.db.run(lambda session: finalize_queries.begin(session, batch_id, "f", 60))
    assert lease is not None
    before = share(world, batch_id)
    part = world.parts(batch_id)[0].id
    assert world.db.run(lambda session: finalize_queries.void_part(session, batch_id, lease.epoch, part))
    says = shown(world, batch_id)
    assert says["progress"]["share"] == before
    assert says["estimated_completion_at"] is None, "how long lines of a damaged part take again was never seen"
    assert world.batch(batch_id).est_done_tokens == 0


def test_a_batch_from_before_predictions_counts_lines(world: World) -> None:
    batch_id = world.add_batch(12, 4)
    with world.db.transaction() as session:
        assert session.query(Unit).where(Unit.batch_id == batch_id, Unit.est_tokens > 0).count() == 0
    unit = claim(world)
    commit(world, unit, 0b1111, output_tokens=400, part="a")
    assert 0.2 < (share(world, batch_id) or 0) < 0.4


def test_the_day_is_left_out_of_rates_and_of_the_time_to_come(world: World) -> None:
    """300 of 1,200 tokens in the last five minutes of a night: the rest takes 15 minutes, from tonight's begin on."""
    batch_id, now = planned(world), datetime.now(UTC)
    begin, end = (now + timedelta(hours=hours) for hours in (3, -3))
    night = Night(begin=begin.time(), end=end.time())
    closed_ms, opens_ms = round(end.timestamp() * 1000), round(begin.timestamp() * 1000)
    samples = [[closed_ms - 1000 * (300 - seconds), seconds] for seconds in range(0, 301, 20)]
    world.set_batch(
        batch_id,
        is_offpeak=True,
        progress_samples=samples,
        progress_ppm=1,
        est_done_tokens=300,
        output_tokens=300,
        sure_tokens=1_200,
        expires_ms=opens_ms + 86_400_000,
    )
    with world.db.reading() as session:
        row = session.get_one(Batch, batch_id)
        (says,) = service.show(session, [row], renew_s=10, night=night, habits=HABITS)
    told, opens_s = says["estimated_completion_at"], opens_ms / 1000
    assert says["at_risk"] is False
    assert opens_s + 600 <= told["low"] <= opens_s + 900 <= told["high"] <= opens_s + 1_800


OTHER = "e" * 64


def mixed(world: World) -> tuple[str, ClaimedUnit]:
    """A batch of two models whose own half was seen to run: 300 tokens in 60 seconds."""
    batch_id = planned(world, 16, 4)
    world.mix(batch_id, OTHER, every=2)
    world.db.run(lambda session: worker_queries.register(session, "w1", DIGEST))
    unit = claim(world)
    for bits, part in ((0b0001, "a"), (0b0110, "b")):
        commit(world, unit, bits, output_tokens=EACH * bits.bit_count(), part=part)
        age(world, batch_id, 60)
    with world.db.transaction() as session:
        for row in session.scalars(select(Part).where(Part.batch_id == batch_id)):
            row.created_ms -= 60_000
    return batch_id, unit


def test_of_several_models_one_without_a_worker_ends_nobody_knows_when(world: World) -> None:
    batch_id, _ = mixed(world)
    assert shown(world, batch_id)["estimated_completion_at"] is None
    world.set_batch(batch_id, latest_start_ms=now_ms() - 1)
    assert shown(world, batch_id)["at_risk"] is True
    world.set_batch(batch_id, latest_start_ms=now_ms() + 60_000)
    world.db.run(lambda session: worker_queries.register(session, "w2", OTHER))
    says = shown(world, batch_id)
    assert says["estimated_completion_at"] is not None and says["at_risk"] is False


def test_of_several_models_the_slowest_ends_the_batch(world: World) -> None:
    batch_id, _ = mixed(world)
    world.db.run(lambda session: worker_queries.register(session, "w2", OTHER))
    before = shown(world, batch_id)["estimated_completion_at"]
    theirs = world.db.run(lambda session: unit_queries.claim(session, OTHER, "host:1:y", 60, 1))[0]
    commit(world, theirs, 0b0001, output_tokens=1, part="c")
    with world.db.transaction() as session:  # 1 token in 100 seconds
        row = session.get_one(Part, f"part_{theirs.id}_c")
        row.est_tokens, row.created_ms = 1, now_ms() - 100_000
    world.set_batch(batch_id, expires_ms=now_ms() + 10**9)
    after = shown(world, batch_id)["estimated_completion_at"]
    assert after["high"] > now_ms() / 1000 + 10_000 > before["high"]
    world.set_batch(batch_id, latest_start_ms=now_ms() - 1)  # a careful moment: with rates known, only the end counts
    assert shown(world, batch_id)["at_risk"] is False
    world.set_batch(batch_id, expires_ms=now_ms() + 10_000)
    assert shown(world, batch_id)["at_risk"] is True


def test_batches_share_workers_as_far_as_they_share_models(world: World) -> None:
    """What a batch of several models needs of another batch's model is in its way, and nothing else is."""
    batch_id, _ = mixed(world)
    alone = world.add_batch(4, 4, digest=OTHER)
    strange = world.add_batch(4, 4, digest="f" * 64)
    with world.db.reading() as session:
        found = {one.id: one.shares for one in progress_queries.companions(session, {OTHER})}
    assert found.keys() == {batch_id, alone} and strange not in found
    assert found[alone] == {OTHER: 1.0}
    theirs = found[batch_id][OTHER]
    assert 0.6 < theirs < 0.63 and sum(found[batch_id].values()) == pytest.approx(1)
