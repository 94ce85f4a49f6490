"""A line's explanation says what the plan says: which tokens are cached, by whom, and how the cost comes about."""

from __future__ import annotations

import numpy as np
import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchsvc.batches import error_codes, explain, explain_service, unit_file, unit_queries
from batchsvc.batches.tables import Worker
from batchsvc.batches.unit_file import UnitRow
from batchsvc.cli.explain import engine_fields
from batchsvc.clock import now_ms
from batchsvc.errors import NotFoundError
from batchsvc.money import Rates, line_cost_nanos
from engine.sched.order import plan_window
from tests.workers.conftest import DIGEST, World
from tests.workers.helpers import put_part
from tests.workers.test_finalize import commit, finalizer, run_units
from workers.translate import open_rows, to_errors

PROMPTS = st.lists(st.tuples(st.integers(0, 2), st.integers(0, 40), st.integers(0, 3)), min_size=1, max_size=12)


@given(PROMPTS)
def test_the_shared_prefix_is_the_planned_one(shapes: list[tuple[int, int, int]]) -> None:
    """By the rule of the plan, derived anew: and its leader is the first that has it."""
    prompts = [np.array([kind] * 20 + [7] * length + [end], np.int32) for kind, length, end in shapes]
    packed = [prompt.astype(">u4").tobytes() for prompt in prompts]
    plan = plan_window(packed, [None] * len(packed), [4] * len(packed), unit_lines=4, unit_tokens=10**6)
    rows = [
        UnitRow(
            line_nos=(planned.members[0],),
            custom_ids=(str(planned.members[0]),),
            prompt_ids=prompts[planned.members[0]],
            params={},
            planned_cached_tokens=planned.planned_cached_tokens,
            max_tokens=4,
        )
        for planned in plan.rows
    ]
    for index, row in enumerate(rows):
        found = explain.shared_prefix(row.prompt_ids, rows[:index])
        assert found.tokens == row.planned_cached_tokens
        prefix = row.prompt_ids[: found.tokens].tobytes()
        same = [other for other in rows[:index] if other.prompt_ids.tobytes().startswith(prefix)]
        assert found.leader is (same[0] if found.tokens else None)


@given(st.integers(0, 10**9), st.integers(0, 10**9), st.integers(0, 10**6), st.integers(0, 10**6))
def test_the_arithmetic_ends_in_the_cost(rate: int, less: int, tokens: int, output: int) -> None:
    rates = Rates(input=rate, cached_input=less, output=rate)
    usage = {"input_tokens": 2 * tokens, "cached_tokens": tokens, "output_tokens": output}
    says = explain.arithmetic(rates, **usage)
    assert says.removesuffix(" nano-dollars").split()[-1] == str(line_cost_nanos(rates, **usage))


def test_lines_of_a_batch(sqlite_world: World) -> None:
    world = sqlite_world
    batch_id = world.add_batch(num_lines=8, unit_lines=4, windows=2, fold=2)
    project = world.batch(batch_id).project_id

    def line(custom_id: str) -> dict[str, object]:
        return explain_service.explain_line(world.db, world.store, project, batch_id, custom_id)

    waiting = line("c9")
    assert (waiting["status"], waiting["cost_nanos"], waiting["window"], waiting["part"]) == ("pending", None, 1, None)
    run_units(world)
    assert finalizer(world).finalize(batch_id)
    results = {row["custom_id"]: row for row in world.result(batch_id, "output")}
    duplicates = 0
    for custom_id, result in results.items():
        shown = line(custom_id)
        usage = result["response"]["body"]["usage"]
        assert (shown["status"], shown["cost_nanos"]) == ("answered", usage["cost_nanos"])
        assert explain_service.explain_line(world.db, world.store, None, batch_id, custom_id) == shown  # an operator
        assert shown["usage"] == {
            "input_tokens": usage["prompt_tokens"],
            "cached_tokens": usage["prompt_tokens_details"]["cached_tokens"],
            "output_tokens": usage["completion_tokens"],
        }
        assert str(shown["arithmetic"]).removesuffix(" nano-dollars").endswith(str(usage["cost_nanos"]))
        cached, part, unit = shown["cached"], shown["part"], shown["unit"]
        assert isinstance(cached, dict) and isinstance(part, dict) and isinstance(unit, dict)
        (stored,) = [row for row in world.parts(batch_id) if row.id == part["id"]]
        assert stored.unit_id == unit["id"] and shown["engine_steps"] == 3
        if cached["duplicate_of"]:
            duplicates += 1
            assert cached["planned_tokens"] == usage["prompt_tokens"] and "runs once" in cached["why"]
    assert duplicates == 8, "of each folded pair the second"
    with pytest.raises(NotFoundError):
        line("c17")
    # when the plan is gone, the output file still tells
    world.store.delete([key for key, _ in world.store.list_keys(f"batch/{batch_id}/") if "/out/" not in key])
    shown = line("c9")
    assert shown["cost_nanos"] == results["c9"]["response"]["body"]["usage"]["cost_nanos"]
    assert "cleared away" in orjson.dumps(shown["cached"]).decode()
    with pytest.raises(NotFoundError):
        line("c17")


def test_error_lines_are_counted_by_their_codes_while_a_batch_runs_and_when_it_has_ended(sqlite_world: World) -> None:
    world = sqlite_world
    batch_id = world.add_batch(num_lines=8, unit_lines=4)
    failed, never_run = world.db.run(lambda session: unit_queries.claim(session, DIGEST, "w", 30, 100))
    rows = list(open_rows(failed, unit_file.read(world.store.get(failed.s3_key))))
    codes = ["poison", "invalid_logits", "invalid_logits"]
    lines = [to_errors(failed, row, code=code, message="-", status=500)[0] for row, code in zip(rows, codes)]  # noqa: B905
    commit(world, failed, put_part(world, failed, lines))
    assert error_codes.counted(world.db, world.store, "batch_nope") == {}
    assert error_codes.counted(world.db, world.store, batch_id) == {"invalid_logits": 2, "poison": 1}
    for unit in (failed, never_run):
        world.db.run(lambda session, unit=unit: unit_queries.release(session, unit.id, unit.epoch))
    world.set_batch(batch_id, expires_ms=1)
    assert finalizer(world).finalize(batch_id)
    ended = error_codes.counted(world.db, world.store, batch_id)
    assert ended == {"batch_expired": 5, "invalid_logits": 2, "poison": 1}
    assert next(iter(ended)) == "batch_expired", "the most frequent first"
    world.store.delete([key for key, _ in world.store.list_keys(f"batch/{batch_id}/")])
    assert error_codes.counted(world.db, world.store, batch_id) == {}, "there is nothing left to read"


def test_hits_beyond_the_plan_are_named() -> None:
    row = UnitRow(
        line_nos=(3,), custom_ids=("c",), prompt_ids=np.arange(40, dtype=np.int32), params={},
        planned_cached_tokens=16, max_tokens=4,
    )  # fmt: skip
    leader = explain.SharedPrefix(16, row)
    shown = explain.cached_part(row, 0, leader, None, 32)
    assert (shown["planned_tokens"], shown["beyond_plan_tokens"]) == (16, 16)
    assert "16 tokens more than was planned" in shown["why"] and shown["leader"] == {"line": 3, "custom_id": "c"}
    assert explain.cached_part(row, 0, explain.SharedPrefix(0, None), None, 16)["leader"] is None


def test_a_line_that_reuses_nothing_has_no_leader() -> None:
    first, second = (
        UnitRow(
            line_nos=(number,), custom_ids=(f"c{number}",), prompt_ids=np.arange(40, dtype=np.int32),
            params={"pooling": pooling}, planned_cached_tokens=0, max_tokens=0,
        )
        for number, pooling in ((1, "mean"), (2, "last"))
    )  # fmt: skip
    prefix = explain.shared_prefix(second.prompt_ids, [first])
    assert prefix.tokens == 32
    for row, why in ((first, "no prefix is reused"), (second, "nothing that the engine can take")):
        shown = explain.cached_part(row, 0, prefix, None, 0)
        assert shown["leader"] is None and shown["planned_tokens"] == 0
        assert why in shown["why"] and "first 0 tokens" not in shown["why"]


def test_a_worker_that_only_embeds_is_explained_by_what_it_served() -> None:
    stats = {
        "steps": 9, "mean_running": 1.0, "prompt_tokens": 9_000, "output_tokens": 0, "busy_ms": 3_600,
        "weight_bytes": 1_000, "block_bytes": 18, "read_blocks": 500,
    }  # fmt: skip
    found = explain.engine_part([stats], cost_per_hour_nanos=9 * 10**9, cost_nanos=5, tokens=9_000)
    assert found is not None and (found["output_tokens"], found["served_tokens"]) == (0, 9_000)
    assert found["weight_bytes_per_output_token"] is found["kv_bytes_per_output_token"] is None
    assert (found["weight_bytes_per_served_token"], found["kv_bytes_per_served_token"]) == (1, 1)
    assert found["cost_nanos_per_mtok"] == 10**9, "a thousandth of an hour for 9,000 tokens"
    assert engine_fields(found)["Weights read"] == "1 bytes per served token"
    assert explain.engine_part([{**stats, "prompt_tokens": 0}], cost_per_hour_nanos=1, cost_nanos=5, tokens=9) is None


def test_only_operators_see_the_engine(sqlite_world: World) -> None:
    world = sqlite_world
    batch_id = world.add_batch()
    run_units(world)
    batch = world.batch(batch_id)
    stats = {
        "steps": 10, "mean_running": 4.0, "prompt_tokens": 60, "output_tokens": 40, "busy_ms": 3_600,
        "weight_bytes": 1000, "block_bytes": 16, "read_blocks": 50,
    }  # fmt: skip
    with world.db.transaction() as session:
        session.add(Worker(id="h:1:x", model_digest=DIGEST, beat_ms=now_ms(), is_draining=False, stats=stats))
    settings = world.settings.model_copy(update={"accelerator_cost_per_hour": "2.50"})
    with world.db.reading() as session:
        theirs = explain_service.explain_batch(session, settings, batch.project_id, batch_id)
        shown = explain_service.explain_batch(session, settings, None, batch_id)
    assert "engine" not in theirs and theirs["cost_nanos"] == batch.cost_nanos
    assert sum(item["amount_nanos"] for item in theirs["items"]) == batch.cost_nanos
    engine = shown["engine"]
    assert (engine["weight_bytes_per_output_token"], engine["kv_bytes_per_output_token"]) == (250, 20)
    assert engine["mean_batch_thousandths"] == 4000
    assert engine["cost_nanos_per_mtok"] == 2_500_000 * 10_000, "a thousandth of an hour for 100 tokens"
    price = engine["price_nanos_per_mtok"]
    assert engine["margin_nanos_per_mtok"] == price - engine["cost_nanos_per_mtok"]
