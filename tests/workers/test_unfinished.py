"""Unfinished sequences outlive their worker: another one goes on, with the same text, usage and bill, and no waste."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import zstandard

from batchsvc.batches import resume_file, unit_file, unit_queries
from batchsvc.batches.choices import choices_of
from batchsvc.batches.lifecycle import Status
from batchsvc.batches.resume_file import Unfinished
from batchsvc.batches.unit_queries import ClaimedUnit
from engine.config import EngineConfig
from engine.engine import Engine
from engine.fake import FakeEngine
from engine.request import Begun, TokenLogprobs
from tests.tiny import make_tiny_model
from tests.workers.conftest import DIGEST, World
from tests.workers.test_engine_run import completed, finalized, until, worker
from workers.step import EngineRun
from workers.translate import open_rows, to_request

LONG = {"temperature": 0.8, "ignore_eos": True, "seed": 5}
PATIENT = {"lease_s": 300.0, "term_grace_s": 60.0}  # a machine that is busy with other things loses no lease


def undisturbed(world: World, batch_id: str, engine: Any) -> dict[int, Any]:
    """What an engine that is never interrupted makes of the batch: completions by line."""
    made = {}
    for unit in world.units(batch_id):
        claimed = ClaimedUnit(
            id=unit.id,
            epoch=0,
            batch_id=batch_id,
            window_no=0,
            no=unit.no,
            s3_key=unit.s3_key,
            sha256=unit.sha256,
            num_lines=unit.num_lines,
            done_bitmap=bytes((unit.num_lines + 7) // 8),
            salt="undisturbed",
            model_id="tiny",
            created_s=0,
            rates={},
        )
        rows = list(open_rows(claimed, unit_file.read(world.store.get(unit.s3_key))))
        for row, done in zip(rows, engine.run([to_request(claimed, row) for row in rows]), strict=True):
            made[row.row.line_nos[0]] = done
    return made


def same_as(world: World, batch_id: str, expected: dict[int, Any]) -> None:
    """The published answers are those, byte for byte, and so is their usage."""
    output = world.result(batch_id, "output")
    assert {line["line"] for line in output} == set(expected)
    for line in output:
        done, body = expected[line["line"]], line["response"]["body"]
        assert body["choices"] == choices_of(done, {}, ident="")
        assert body["usage"]["completion_tokens"] == done.usage.output_tokens
        assert body["usage"]["prompt_tokens_details"]["cached_tokens"] == max(1, done.usage.hit_tokens)


def generated(witness: Path) -> int:
    entries = [json.loads(line) for line in witness.read_text().splitlines()]
    return sum(sum(entry["tokens"].values()) for entry in entries if entry["event"] == "tokens")


def drained(run: EngineRun) -> None:
    """As SIGTERM twice: no time for anything to finish."""
    run.signalled()
    run.signalled()
    run.drain()


@pytest.mark.parametrize(
    "params",
    [
        LONG,
        {**LONG, "stop": ["river stone"]},
        {"min_tokens": 1_500},
        {**LONG, "n": 3, "logprobs": 2, "max_tokens": 150},
    ],
    ids=str,
)
def test_a_drain_loses_no_token(world: World, tmp_path: Path, params: dict[str, Any]) -> None:
    world.params = {name: value for name, value in params.items() if name != "max_tokens"}
    batch_id = world.add_batch(num_lines=12, unit_lines=6, max_tokens=params.get("max_tokens", 2_000))
    witness = tmp_path / "witness"

    def fake(tokens_per_s: float) -> FakeEngine:
        return FakeEngine(None, witness=witness, max_running=4, tokens_per_s=tokens_per_s)

    saved = 0
    for turn in range(3):
        with worker(world, fake(400), name=f"w{turn}", waiting_requests=5, **PATIENT) as run:
            start = run._engine.stats().output_tokens
            until(lambda run=run, start=start: run._engine.stats().output_tokens > start + 150, "some tokens")
            drained(run)
        units = world.units(batch_id)
        assert all(unit.state in {"ready", "done"} and unit.crash_count == 0 for unit in units)
        in_parts = world.batch(batch_id).output_tokens
        saved = sum(unit.running_tokens for unit in units)
        assert generated(witness) == in_parts + saved, "every token that was generated is in a part or saved"
    assert saved > 0
    with worker(world, fake(0), name="last", **PATIENT):
        until(completed(world, batch_id), "all lines")
    finalized(world, batch_id, Status.COMPLETED)
    same_as(world, batch_id, undisturbed(world, batch_id, FakeEngine(None)))
    batch = world.batch(batch_id)
    assert generated(witness) == batch.output_tokens, "nothing was generated twice"
    assert batch.running_tokens == 0 and not any(unit.resume_key for unit in world.units(batch_id))


@pytest.fixture
def real(tmp_path: Path) -> Iterator[list[Engine]]:
    """Real engines, all of one model, in formats whose sums don't depend on the batch: plain torch's float32 do, in
    their last bits, and one draw in ten thousand falls between two such sums."""
    model = make_tiny_model(tmp_path / "model", heads=2, kv_heads=1)
    config = EngineConfig(
        model=str(model), weight_format="int8", kv_format="int8", num_blocks=300, step_tokens=24, threads=1
    )
    engines = [Engine(config) for _ in range(3)]
    yield engines
    for engine in engines:
        engine.close()


@pytest.mark.parametrize(
    "params",
    [
        {"temperature": 0.9, "top_p": 0.9, "min_tokens": 40},
        {"temperature": 0.0},
        {"temperature": 0.9, "n": 3, "logprobs": 4, "frequency_penalty": 0.5},
    ],
    ids=str,
)
def test_the_real_engine_gives_the_same_bytes_after_a_takeover(
    sqlite_world: World, real: list[Engine], params: dict[str, Any]
) -> None:
    world, (first, second, plain) = sqlite_world, real
    world.params = {**params, "ignore_eos": True}
    batch_id = world.add_batch(num_lines=8, unit_lines=4, max_tokens=60)
    expected = undisturbed(world, batch_id, plain)

    class Slow:
        """Leaves the test time to interrupt."""

        def __getattr__(self, name: str) -> Any:
            return getattr(first, name)

        def step(self) -> Any:
            time.sleep(0.02)
            return first.step()

    with worker(world, Slow(), waiting_requests=3, **PATIENT) as run:
        until(lambda: run._engine.stats().output_tokens > 60, "some tokens")
        drained(run)
    saved = sum(unit.running_tokens for unit in world.units(batch_id))
    assert saved > 0
    with worker(world, second, name="next", **PATIENT):
        until(completed(world, batch_id), "all lines")
    finalized(world, batch_id, Status.COMPLETED)
    for line in world.result(batch_id, "output"):
        done, body = expected[line["line"]], line["response"]["body"]
        assert [choice["message"]["content"] for choice in body["choices"]] == [one.text for one in done.answers]
        assert body["usage"]["completion_tokens"] == done.usage.output_tokens
        for choice, one in zip(body["choices"], done.answers, strict=True):
            for found, wanted in zip((choice["logprobs"] or {}).get("content", ()), one.logprobs or (), strict=True):
                assert bytes(found["bytes"]) == wanted.piece and found["logprob"] == pytest.approx(
                    wanted.logprob, abs=1e-4
                )
    together = first.stats().output_tokens + second.stats().output_tokens
    assert together == sum(done.usage.output_tokens for done in expected.values()), "a drain loses no token"


def test_each_flush_saves_what_runs_and_deletes_what_it_saved_before(sqlite_world: World) -> None:
    world = sqlite_world
    world.params = LONG
    batch_id = world.add_batch(num_lines=4, unit_lines=4, max_tokens=10_000)
    seen: set[str] = set()
    with worker(world, FakeEngine(None, tokens_per_s=300), flush_s=0.2) as run:

        def look() -> bool:
            key = world.units(batch_id)[0].resume_key
            seen.update({key} if key else ())
            return len(seen) >= 3

        until(look, "three saves of sequences of which none ends")
        unit = world.units(batch_id)[0]
        assert world.batch(batch_id).running_tokens == unit.running_tokens > 0 and unit.running_lines == 4
        until(lambda: len(list(world.store.list_keys(f"batch/{batch_id}/progress/"))) <= 2, "old ones are deleted")
        world.set_batch(batch_id, status=Status.CANCELLING, cancelling_ms=1)
        until(lambda: run._units.num_live() == 0, "it stops")


def test_a_unit_that_was_lost_saves_nothing_more(sqlite_world: World) -> None:
    world = sqlite_world
    world.params = LONG
    batch_id = world.add_batch(num_lines=4, unit_lines=4, max_tokens=10_000)
    with worker(world, FakeEngine(None, tokens_per_s=300), flush_s=0.2, renew_s=60) as run:
        until(lambda: world.units(batch_id)[0].resume_key is not None, "a first save")
        with world.db.transaction() as session:
            mine = world.units(batch_id)[0]
            assert unit_queries.release(session, mine.id, mine.epoch)
            taken = unit_queries.claim(session, DIGEST, "other", 30, 1)[0]
        until(lambda: run._units.num_live() == 0, "the fence of the save is noticed without any renewal")
        unit = world.units(batch_id)[0]
        assert (unit.resume_key, unit.owner, unit.epoch) == (taken.resume_key, "other", 2)


@pytest.mark.parametrize("damage", ["cut", "gone"])
def test_damaged_saves_cost_work_and_nothing_else(sqlite_world: World, damage: str) -> None:
    world = sqlite_world
    world.params = LONG
    batch_id = world.add_batch(num_lines=4, unit_lines=4, max_tokens=200)
    with worker(world, FakeEngine(None, tokens_per_s=300)) as run:
        until(lambda: run._engine.stats().output_tokens > 100, "some tokens")
        drained(run)
    key = world.units(batch_id)[0].resume_key or ""
    if damage == "cut":
        world.store.put(key, world.store.get(key)[:-3])
    else:
        world.store.delete([key])
    with worker(world, name="next") as run:
        until(completed(world, batch_id), "all lines")
        assert run._engine.stats().output_tokens == 800, "they began anew"
    finalized(world, batch_id, Status.COMPLETED)
    same_as(world, batch_id, undisturbed(world, batch_id, FakeEngine(None)))


def test_the_object_holds_what_was_put_in() -> None:
    lone = [Unfinished(line_no=n, answers=(Begun(tuple(range(n * 100))),), hit_tokens=n) for n in range(5)]
    found = TokenLogprobs(7, -0.1 - 0.2, ((7, -0.1 - 0.2), (9, -1e-17)))
    several = Unfinished(line_no=9, answers=(Begun((7,), (found,)), Begun(), Begun((7,), (found,))), hit_tokens=3)
    rows = [*lone, several]
    data = resume_file.encode(rows)
    assert resume_file.decode(data, hashlib.sha256(data).hexdigest()) == {row.line_no: row for row in rows}
    few = resume_file.encode([several, *lone, replace(several, line_no=10)], most_logprobs=6)
    assert set(resume_file.decode(few, hashlib.sha256(few).hexdigest())) == {0, 1, 2, 3, 4, 9}, "the others begin anew"
    plain = zstandard.ZstdCompressor().compress(b"[[5,2,[1,2,3]]]")
    older = resume_file.decode(plain, hashlib.sha256(plain).hexdigest())
    assert older == {5: Unfinished(line_no=5, answers=(Begun((1, 2, 3)),), hit_tokens=2)}, "as older workers wrote it"
    with pytest.raises(ValueError, match="aren't what"):
        resume_file.decode(data, "0" * 64)


def test_no_token_is_generated_after_a_cancelled_batch_was_noticed(sqlite_world: World, tmp_path: Path) -> None:
    """Without a single renewal: the look between renewals is enough."""
    world, witness = sqlite_world, tmp_path / "witness"
    world.params = LONG
    batch_id = world.add_batch(num_lines=8, unit_lines=4, max_tokens=10_000)
    engine = FakeEngine(None, tokens_per_s=300, witness=witness)
    with worker(world, engine, renew_s=600, lease_s=3600):
        until(lambda: witness.exists() and generated(witness) > 100, "some tokens")
        world.set_batch(batch_id, status=Status.CANCELLING, cancelling_ms=1)
        cancelled = time.time()
        until(lambda: {unit.state for unit in world.units(batch_id)} == {"ready"}, "both units are given back")
        time.sleep(0.3)
        entries = [json.loads(line) for line in witness.read_text().splitlines()]
        assert max(entry["t"] for entry in entries if entry["event"] == "tokens") < cancelled + 5
        assert not engine.has_work()
    finalized(world, batch_id, Status.CANCELLED)
