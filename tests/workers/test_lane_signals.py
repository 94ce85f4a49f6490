"""A worker's heartbeats tell its engine's speed by lane, and operators see it."""

from __future__ import annotations

from typing import Any

from sqlalchemy import select

from batchsvc.batches import worker_service
from batchsvc.batches.tables import Worker
from engine.fake import FakeEngine
from tests.workers.conftest import World
from tests.workers.test_engine_run import completed, until, worker


def test_heartbeats_tell_the_engines_speed_by_lane(sqlite_world: World) -> None:
    world = sqlite_world
    batch_id = world.add_batch(num_lines=30, unit_lines=10)

    def said() -> dict[str, Any]:
        with world.db.reading() as session:
            stats = session.scalars(select(Worker.stats)).one() or {}
        return dict(stats.get("lanes", {}).get("batch", {}))

    engine = FakeEngine(None, tokens_per_s=2_000)
    with worker(world, engine, renew_s=0.1):
        until(completed(world, batch_id), "all lines")
        until(lambda: said().get("output_tokens") == engine.stats().output_tokens, "the last tokens are told")
        with world.db.reading() as session:
            (shown,) = worker_service.shown_workers(session, renew_s=5)["data"]
    batch, interactive = shown["lanes"]["batch"], shown["lanes"]["interactive"]
    assert (batch["running"], batch["waiting"], batch["share"], interactive["computed_tokens"]) == (0, 0, 1.0, 0)
    assert 0 < batch["ttft_p50_s"] <= batch["ttft_p99_s"]
    assert 0 <= shown["busy_share"] <= 1 and shown["step_p99_s"] > 0
