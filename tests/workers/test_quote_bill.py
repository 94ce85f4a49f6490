"""The bill for input is never above the quote, on real parts: through API, planner, engine worker and finalizer.

Between quote and bill happens what could make it dearer: prices rise, other windows are configured, duplicates are
folded, another batch shares the prefixes, units are taken from their worker and run again.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from sqlalchemy import update

from batchsvc.batches import unit_queries
from batchsvc.batches.lifecycle import Status
from batchsvc.batches.tables import Unit, Window
from batchsvc.billing import pricing
from batchsvc.billing import service as billing
from batchsvc.db.session import Database
from batchsvc.money import Rates, line_cost_nanos
from batchsvc.settings import Settings
from engine.fake import FakeEngine
from engine.request import StepOutput
from tests.batchsvc.batches.planned import jsonl, line
from tests.batchsvc.batches.quoting import Quoting, quoting, with_settings
from tests.workers.conftest import World
from tests.workers.test_engine_run import Hints, completed, until
from workers.finalize import Finalizer
from workers.step import EngineRun

SHARED = "You are a helpful assistant that reads tickets. Order 1234567 was shipped to Berlin. "


class Caching(FakeEngine):
    """As if each prompt met a cache that others had filled, to a random depth."""

    def step(self) -> StepOutput:
        output = super().step()
        draw = random.Random(len(output.completions))
        hits = (
            replace(done, usage=replace(done.usage, hit_tokens=draw.randint(0, done.usage.prompt_tokens)))
            for done in output.completions
        )
        return replace(output, completions=list(hits))


@pytest.fixture
def door(fast: Settings, tiny: tuple[Path, str]) -> Iterator[Quoting]:
    with quoting(fast.model_copy(update={"window_lines": 10, "unit_lines": 4}), tiny[0]) as made:
        yield made


def tickets(count: int, begin: str = SHARED, max_tokens: int = 4) -> bytes:
    """Some share a prefix, some are equal and folded, one differs in everything."""
    texts = [begin + f"Ticket {number % 7}" if number % 9 else f"{number} alone" for number in range(1, count + 1)]
    return jsonl(*(line(f"c{number}", text, max_tokens=max_tokens) for number, text in enumerate(texts, start=1)))


def run(door: Quoting, batch_ids: list[str], *, crashes: bool) -> World:
    """Engine workers until all lines of these batches have ended; then they are finalized and judged."""
    planned = door.planned
    settings = planned.context.settings.model_copy(update={"poll_s": 0.05, "flush_s": 0.2})
    world = World(settings, planned.db, planned.store)

    def worker(name: str, engine: FakeEngine) -> EngineRun:
        made = EngineRun(
            settings,
            Database(settings.database_url),
            world.store,
            Hints(),
            engine,
            digest=planned.text.meta.digest,
            owner=f"host:1:{name}",
            on_failure=lambda: None,
        )
        made.start()
        return made

    workers = []
    if crashes:
        workers.append(worker("lost", FakeEngine(planned.text, max_running=2, tokens_per_s=60)))
        until(lambda: any(world.batch(one).completed for one in batch_ids), "a first part")

        def is_freed() -> (
            bool
        ):  # as the reaper does with what a dead worker held; this one lives, and may renew between
            world.db.run(lambda s: s.execute(update(Unit).where(Unit.state == "leased").values(lease_ms=0)))
            return world.db.run(unit_queries.free_expired) > 0

        until(is_freed, "a lost unit")
        _end(workers.pop())
    workers.append(worker("next", Caching(planned.text)))
    try:
        for batch_id in batch_ids:
            until(completed(world, batch_id), "all lines")
    finally:
        for one in workers:
            _end(one)
    for batch_id in batch_ids:
        assert Finalizer(settings, world.db, world.store, "f").finalize(batch_id)
        world.judge(batch_id, Status.COMPLETED)
    return world


def _end(worker: EngineRun) -> None:
    worker.signalled()
    worker.signalled()
    worker.drain()


def input_bill(world: World, batch_id: str) -> int:
    """The share of the input in the bill of a batch, line by line from its output file, at the rates that it pinned."""
    rates = Rates(**(world.batch(batch_id).rates or {})["tier"])
    total = 0
    for row in world.result(batch_id, "output"):
        usage = row["response"]["body"]["usage"]
        tokens = {
            "input_tokens": usage["prompt_tokens"],
            "cached_tokens": usage["prompt_tokens_details"]["cached_tokens"],
        }
        assert usage["cost_nanos"] == line_cost_nanos(rates, **tokens, output_tokens=usage["completion_tokens"])
        total += line_cost_nanos(rates, **tokens, output_tokens=0)
    return total


def test_the_bill_for_input_is_never_above_the_quote(door: Quoting) -> None:
    data = tickets(23)
    quote = door.quote(data)
    assert quote["plan"]["windows"] == 3
    planned = door.planned
    with planned.db.transaction() as session:  # the prices rise
        book = pricing.shipped_book()
        doubled = {
            name: Rates(input=2 * one.input, cached_input=2 * one.cached_input, output=2 * one.output)
            for name, one in book.rates.items()
        }
        billing.publish_book(session, pricing.PriceBook(book.version + 1, doubled))
    later = with_settings(door, window_lines=3)  # and windows shrink, with what lines share in them
    file_id = quote["input_file_id"]
    quoted = later.create(file_id, quote_id=quote["id"]).json()["id"]
    unquoted = later.create(file_id).json()["id"]
    neighbour = later.create(later.upload(tickets(12)), metadata={"shares": "the prefixes"}).json()["id"]
    for batch_id in (quoted, unquoted, neighbour):
        later.planned.plan(batch_id)
    assert len(planned.rows(Window, quoted)) == 3 and len(planned.rows(Window, unquoted)) == 8
    assert any(len(row.line_nos) > 1 for unit in planned.units(quoted) for row in unit.rows), "duplicates are folded"
    world = run(later, [quoted, unquoted, neighbour], crashes=True)
    batch, cost = world.batch(quoted), quote["cost"]
    assert {part.epoch for part in world.parts(quoted)} | {part.epoch for part in world.parts(unquoted)} >= {1, 2}
    assert batch.price_version == quote["price_version"]
    assert input_bill(world, quoted) <= cost["input_nanos"] < input_bill(world, unquoted)
    assert batch.cost_nanos <= cost["most_nanos"]
    assert batch.input_tokens == quote["usage"]["input_tokens"]
    assert batch.cached_tokens >= quote["usage"]["input_tokens_details"]["cached_tokens"]
    # what these lines showed is what the next quote goes by
    next_quote = later.quote(data)
    assert (next_quote["output_basis"], next_quote["finished_lines"]) == ("finished_lines", 58)
    assert next_quote["cost"]["input_nanos"] > cost["input_nanos"], "at the new prices"


@pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
def test_without_hits_the_bill_for_input_is_the_quote(door: Quoting, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Caching, "step", FakeEngine.step)
    quote = door.quote(tickets(25))
    batch_id = door.create(quote["input_file_id"], quote_id=quote["id"]).json()["id"]
    door.planned.plan(batch_id)
    world = run(door, [batch_id], crashes=False)
    assert input_bill(world, batch_id) == quote["cost"]["input_nanos"]
    assert world.batch(batch_id).cached_tokens == quote["usage"]["input_tokens_details"]["cached_tokens"]
