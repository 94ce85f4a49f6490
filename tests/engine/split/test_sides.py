"""Prefill here and decode there give what one engine gives, bit for bit; blocks cross once; nobody is overrun, lost or
answered twice."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from engine.engine import Engine
from engine.errors import RequestError
from engine.request import Completion, FinishReason, Pooling, Request, SamplingParams
from engine.split.prefill import PrefillSide
from tests.engine.split.halves import Halves, make_engine

pytestmark = pytest.mark.usefixtures("_no_dozing")

BLOCK = 16
GREEDY = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)
DRAWN = SamplingParams(max_tokens=12, temperature=1.0, top_p=0.9, seed=5, ignore_eos=True)
Make = Callable[..., Halves]


@pytest.fixture
def make(tmp_path: Path, fused_model: Path) -> Iterator[Make]:
    made: list[Halves] = []

    def build(*, prefills: int = 1, decode: dict[str, object] | None = None, **changes: object) -> Halves:
        halves = Halves(
            tmp_path,
            make_engine(fused_model, **{**changes, **(decode or {})}),
            [make_engine(fused_model, **changes) for _ in range(prefills)],
        )
        made.append(halves)
        return halves

    yield build
    for halves in made:
        halves.close()


def workload(count: int = 24, *, seed: int = 1) -> list[Request]:
    """Three stems, suffixes of any length, greedy and drawn, some with several answers."""
    rng = random.Random(seed)
    stems = [rng.choices(range(3, 384), k=length) for length in (70, 128, 33)]
    requests = []
    for number in range(count):
        own = rng.choices(range(3, 384), k=rng.randint(1, 60))
        params = replace(rng.choice((GREEDY, DRAWN)), seed=number)
        requests.append(
            Request(id=str(number), prompt_ids=stems[number % 3] + own, params=params, n=3 if number % 5 == 0 else 1)
        )
    return requests


def distinct_blocks(requests: Sequence[Request]) -> int:
    starts = (tuple(r.prompt_ids[:end]) for r in requests for end in range(BLOCK, len(r.prompt_ids) + 1, BLOCK))
    return len(set(starts))


def unified(engine: Engine, requests: Sequence[Request]) -> dict[str, Completion]:
    return {completion.request_id: completion for completion in engine.run(requests)}


def tokens(found: dict[str, Completion]) -> dict[str, object]:
    """Answers and usage, but for what depends on when a request was admitted."""
    return {
        name: (done.token_ids, done.text, done.finish_reason, done.choices, done.usage.output_tokens)
        for name, done in found.items()
    }


@pytest.mark.parametrize("kv_format", ["bf16", "int8"])
def test_the_same_tokens_as_unified_and_each_block_crosses_once(make: Make, fused_model: Path, kv_format: str) -> None:
    requests = workload()
    expected = unified(make_engine(fused_model, kv_format=kv_format), requests)
    assert len({done.token_ids for done in expected.values()}) > 20, "a test on equal answers shows nothing"
    halves = make(kv_format=kv_format)
    found = halves.run(requests)
    assert tokens(found) == tokens(expected)
    sent, received = halves.prefills[0].stats, halves.decode.split
    block_bytes = halves.decode._engine.passing().block_bytes
    assert sent.sent_blocks == distinct_blocks(requests) == received.received_blocks
    assert sent.sent_bytes == received.received_bytes == sent.sent_blocks * block_bytes
    assert sent.spared_blocks > 0, "or nothing was shared"
    assert received.lost_blocks == 0
    prompt_tokens = sum(len(request.prompt_ids) for request in requests)
    computed = halves.decode.stats().computed_tokens
    outputs = sum(done.usage.output_tokens for done in found.values())
    assert computed - outputs < len(requests) * BLOCK * 3 < prompt_tokens, "the decode side computed prompts"
    assert halves.decode._grants.open_blocks == 0
    halves.decode._engine.scheduler.check_integrity()


def test_a_hit_is_what_the_prefill_engine_found(make: Make) -> None:
    halves = make()
    stem = list(range(10, 74))
    first = halves.run([Request(id="a", prompt_ids=[*stem, 5, 6], params=GREEDY)])["a"]
    assert first.usage.hit_tokens == 0, "its blocks came from elsewhere, but somebody computed them for it"
    found = halves.run([Request(id="b", prompt_ids=[*stem, *range(100, 140)], params=GREEDY)])["b"]
    assert found.usage.hit_tokens == len(stem)
    again = halves.run([Request(id="c", prompt_ids=[*stem, *range(100, 140)], params=GREEDY)])["c"]
    assert again.usage.hit_tokens == (len(stem) + 40) // BLOCK * BLOCK
    assert halves.decode.split.spared_prompts == 1


def test_what_resumes_goes_on(make: Make, fused_model: Path) -> None:
    made = Request(id="r", prompt_ids=list(range(20, 60)), params=replace(DRAWN, max_tokens=40))
    whole = unified(make_engine(fused_model), [made])["r"]
    halves = make()
    cut = replace(made, resume_ids=whole.token_ids[:30], resume_hit_tokens=7)
    found = halves.run([cut])["r"]
    assert found == replace(whole, usage=replace(whole.usage, hit_tokens=7))
    assert halves.decode.split.handed_over == 1
    assert halves.decode.split.received_blocks == 70 // BLOCK


def test_short_prompts_vectors_and_bad_requests_need_nobody(make: Make, fused_model: Path) -> None:
    halves = make(prefills=0)
    requests = [
        Request(id="short", prompt_ids=[5, 6, 7], params=GREEDY),
        Request(id="vector", prompt_ids=[5, 6, 7] * 9, params=GREEDY, pooling=Pooling.MEAN),
        Request(id="empty", prompt_ids=[], params=GREEDY),
    ]
    found = halves.run(requests)
    expected = unified(make_engine(fused_model), requests)
    assert tokens(found) == tokens(expected)
    assert found["vector"].vectors == expected["vector"].vectors
    assert found["empty"].finish_reason is FinishReason.ERROR


def test_a_prompt_that_the_prefill_engine_can_not_hold_is_computed_where_it_fits(
    make: Make, fused_model: Path, tmp_path: Path
) -> None:
    halves = make(prefills=0)
    halves.join(make_engine(fused_model, num_blocks=4))
    requests = [Request(id="long", prompt_ids=list(range(10, 180)), params=GREEDY), *workload(4)]
    found = halves.run(requests)
    assert tokens(found) == tokens(unified(make_engine(fused_model), requests))
    assert halves.decode.split.handed_over < len(requests)


def test_what_the_prefill_engine_has_evicted_is_computed_here(
    make: Make, fused_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All of it, or the end of it, at any moment between the computing and the sending."""
    halves = make()
    passing = halves.prefills[0]._passing
    num_cached, left = passing.num_cached, itertools.cycle((99, 0, 99, 2, 3, 99, 1))
    monkeypatch.setattr(passing, "num_cached", lambda prefix: min(num_cached(prefix), next(left)))
    requests = workload(12)
    found = halves.run(requests)
    assert tokens(found) == tokens(unified(make_engine(fused_model), requests))
    assert halves.prefills[0]._busy_blocks == 0
    assert halves.decode._grants.open_blocks == 0


def test_a_repeated_id_is_refused_while_it_is_under_way(make: Make) -> None:
    halves = make()
    made = Request(id="a", prompt_ids=list(range(40)), params=GREEDY)
    halves.decode.add(made)
    with pytest.raises(RequestError, match="unfinished request a"):
        halves.decode.add(made)
    while halves.decode.has_work():
        halves.turn()
    halves.run([made])


def test_without_a_prefill_engine_requests_wait_and_it_says_so(make: Make) -> None:
    halves = make(prefills=0)
    assert halves.decode.note() == "No prefill engine is connected."
    made = Request(id="a", prompt_ids=list(range(3, 43)), params=GREEDY)
    halves.decode.add(made)
    for _ in range(5):
        assert not halves.turn()
    assert halves.decode.note() == "No prefill engine is connected, and 1 request waits for one."
    halves.addresses.append("shm:///nowhere/at/all")
    for _ in range(200):
        halves.turn()
        if "nowhere" in (halves.decode.note() or ""):
            break
    assert "No prefill engine listens at shm:///nowhere/at/all" in (halves.decode.note() or "")
    halves.decode.abort("a")
    (ended,) = halves.turn()
    assert (ended.request_id, ended.finish_reason) == ("a", FinishReason.ABORT)
    assert not halves.decode.has_work()


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"kv_format": "int8"}, "Its KV layout is kv1/"),
        ({"weight_format": "bf16"}, "Its weight format is"),
        ({"block_tokens": 32}, "block_tokens="),
    ],
)
def test_another_layout_or_format_is_refused(
    make: Make, fused_model: Path, change: dict[str, object], says: str
) -> None:
    halves = make(prefills=0)
    halves.join(make_engine(fused_model, **change))
    halves.decode.add(Request(id="a", prompt_ids=list(range(3, 43)), params=GREEDY))
    for _ in range(2000):
        halves.turn()
        if says in (halves.decode.note() or ""):
            break
    assert says in (halves.decode.note() or "")
    assert halves.decode.split.received_blocks == 0


def test_damaged_blocks_are_refused_and_computed_by_another(
    make: Make, fused_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    halves = make()
    side = halves.prefills[0]
    export = side._passing.export

    def damaged(*args: object) -> tuple[range, bytes]:
        depths, data = export(*args)
        return depths, data[:-1] + bytes([data[-1] ^ 1]) if data else data

    monkeypatch.setattr(side._passing, "export", damaged)
    requests = workload(6)
    for request in requests:
        halves.decode.add(request)
    for _ in range(5000):
        halves.turn()
        if "damaged" in (halves.peers.reason() or ""):
            break
    assert "damaged" in (halves.peers.reason() or "")
    halves.leave(side)
    halves.join(make_engine(fused_model))
    found: dict[str, Completion] = {}
    while halves.decode.has_work():
        found |= {done.request_id: done for done in halves.turn()}
    assert tokens(found) == tokens(unified(make_engine(fused_model), requests))


def test_the_prefill_side_never_gets_ahead_of_the_room_there_is(make: Make) -> None:
    """Few blocks on the decode side: prompts wait, and are begun one after the other as room comes."""
    halves = make(decode={"num_blocks": 24, "max_running": 2})
    requests = [Request(id=str(i), prompt_ids=[i + 3] * 64, params=GREEDY) for i in range(12)]
    for request in requests:
        halves.decode.add(request)
    most = halves.decode._grants.most_blocks
    found: dict[str, Completion] = {}
    while halves.decode.has_work():
        found |= {done.request_id: done for done in halves.turn()}
        (side,) = halves.prefills
        begun = side.stats.prompts - halves.decode.split.handed_over
        assert begun * 4 <= most
        assert halves.decode._grants.open_blocks <= most
    assert len(found) == 12
    assert halves.decode.split.most_open_blocks == 4
    assert halves.decode.split.lost_blocks == 0
    assert halves.decode.stats().preemptions == 0


def test_without_output_of_the_prefill_side_the_decode_side_idles(make: Make) -> None:
    halves = make()
    halves.decode.add(Request(id="a", prompt_ids=list(range(3, 43)), params=GREEDY))
    for _ in range(50):
        halves.decode.step()  # the prefill side isn't stepped
    assert halves.decode.stats().steps == 0
    assert halves.decode.has_work()


def test_prompts_that_nobody_wants_any_more_hold_nothing_up(make: Make) -> None:
    halves = make(decode={"num_blocks": 40})
    requests = [Request(id=str(i), prompt_ids=[i + 3] * 64, params=GREEDY) for i in range(12)]
    for request in requests:
        halves.decode.add(request)
    found: dict[str, Completion] = {}
    rng, turns = random.Random(3), 0
    while halves.decode.has_work():
        for done in halves.turn():
            assert done.request_id not in found
            found[done.request_id] = done
        turns += 1
        if turns % 3 == 0:
            halves.decode.abort(rng.choice(requests).id)
        assert turns < 5000
    assert len(found) == 12
    assert any(done.finish_reason is FinishReason.ABORT for done in found.values())
    assert halves.decode._grants.open_blocks == 0
    for side in halves.prefills:
        for _ in range(2000):
            side.step()
            if not side._busy_blocks:
                break
        assert side._busy_blocks == 0
        assert len(side._engine.scheduler._expected) == 0
    again = [Request(id=f"more {i}", prompt_ids=[i + 60] * 64, params=GREEDY) for i in range(6)]
    assert len(halves.run(again)) == 6


@pytest.mark.parametrize("after", [1, 3, 6, 10, 15])
def test_a_lost_prefill_side_is_replaced_and_nothing_is_lost_or_twice(
    make: Make, fused_model: Path, after: int
) -> None:
    requests = workload()
    halves = make(prefills=2)
    for request in requests:
        halves.decode.add(request)
    found: dict[str, Completion] = {}
    turns = 0
    while halves.decode.has_work():
        for done in halves.turn():
            assert done.request_id not in found, "answered twice"
            found[done.request_id] = done
        turns += 1
        if turns == after:
            victim: PrefillSide = halves.prefills[0]
            halves.leave(victim)
        if turns == 2 * after:
            halves.join(make_engine(fused_model))
        assert turns < 20_000
    assert tokens(found) == tokens(unified(make_engine(fused_model), requests))
    assert halves.decode._grants.open_blocks == 0
    halves.decode._engine.scheduler.check_integrity()


def test_a_lost_decode_side_leaves_nothing_at_the_prefill_side(make: Make, fused_model: Path, tmp_path: Path) -> None:
    halves = make()
    (side,) = halves.prefills
    for request in workload():
        halves.decode.add(request)
    while not side._busy_blocks:
        halves.turn()
    for peer in halves.decode._peers:
        peer.link._wire.close()
    halves.decode.close()
    for _ in range(500):
        side.step()
        if not side.num_peers:
            break
    while side._engine.has_work():
        side.step()
    assert (side._busy_blocks, side.num_peers, len(side._engine.scheduler._expected)) == (0, 0, 0)
    side._engine.scheduler.check_integrity()


@pytest.mark.slow
@pytest.mark.parametrize("kv_format", ["bf16", "int8"])
def test_the_default_model_answers_as_one(tmp_path: Path, default_model: Path, kv_format: str) -> None:
    """On prompts that share their beginnings, as in a job of tickets."""
    requests = [replace(made, params=replace(made.params, max_tokens=32)) for made in workload(40)]
    settings: dict[str, object] = {"kv_format": kv_format, "num_blocks": 1200, "threads": 2, "poison": False}
    expected = unified(make_engine(default_model, **settings), requests)
    halves = Halves(tmp_path, make_engine(default_model, **settings), [make_engine(default_model, **settings)])
    found = halves.run(requests)
    assert tokens(found) == tokens(expected)
    assert halves.prefills[0].stats.sent_blocks == distinct_blocks(requests) == halves.decode.split.received_blocks
    halves.close()
