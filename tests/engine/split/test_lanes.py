"""Who waits for an answer goes first through both halves, and peers of one lane share a prefill engine evenly."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from engine.request import Completion, Lane, Request, SamplingParams
from engine.split import wires
from engine.split.messages import Credit, Prompt
from engine.split.prefill import PrefillSide
from tests.engine.split.halves import SILENCE_S, Halves, make_engine
from tests.engine.split.test_bounds import Stranger

pytestmark = pytest.mark.usefixtures("_no_dozing")

PARAMS = SamplingParams(max_tokens=4, temperature=0, ignore_eos=True)
STEP_TOKENS = 64
BATCH, CALLS = Lane.BATCH, Lane.INTERACTIVE


@pytest.fixture
def halves(tmp_path: Path, fused_model: Path) -> Iterator[Halves]:
    """Few blocks on the decode side, so that batch work waits for credit."""
    decode = make_engine(fused_model, num_blocks=48, max_running=2)
    made = Halves(tmp_path, decode, [make_engine(fused_model)], patience_s=3600)
    yield made
    made.close()


def batch(number: int, num_tokens: int = 64) -> Request:
    return Request(id=f"b{number}", prompt_ids=[number + 3] * num_tokens, params=PARAMS, lane=BATCH)


def call(name: str, num_tokens: int = 64) -> Request:
    return Request(id=name, prompt_ids=[200 + len(name)] * num_tokens, params=PARAMS, lane=CALLS)


def turns_until(halves: Halves, is_so: Callable[[], bool]) -> list[Completion]:
    found: list[Completion] = []
    for _ in range(20_000):
        if is_so():
            return found
        found += halves.turn()
    raise AssertionError("it never happens")


def test_a_call_passes_all_batch_work_that_waits(halves: Halves) -> None:
    """Windows and credit are full of batch prompts when it comes."""
    for number in range(16):
        halves.decode.add(batch(number))
    turns_until(halves, lambda: halves.decode._grants.open_of[BATCH] == halves.decode._grants.most_blocks)
    (peer,) = halves.decode._peers
    assert not peer.has_room(64, BATCH)
    halves.decode.add(call("call"))
    halves.decode.step()
    assert halves.decode._outside["call"].number in peer.asked, "it is sent at once"
    assert halves.decode._grants.open_of[CALLS] == 4, "and has credit at once"
    ended = {done.request_id for done in turns_until(halves, lambda: "call" not in halves.decode._open)}
    assert "call" in ended
    assert len(ended) < 8, "it waited behind batch work"
    turns_until(halves, lambda: not halves.decode.has_work())
    assert halves.decode._grants.open_blocks == 0
    assert halves.decode.split.handed_over == 17


def test_batch_work_leaves_a_call_room_at_the_prefill_side(halves: Halves) -> None:
    """Blocks that wait to be fetched hold batch prompts up, not calls."""
    (side,) = halves.prefills
    side._most_busy = {CALLS: 400, BATCH: -1}
    halves.decode.add(batch(1))
    halves.decode.add(call("call"))
    (ended,) = turns_until(halves, lambda: "call" not in halves.decode._open)
    assert ended.request_id == "call"
    assert "b1" in halves.decode._open
    side._most_busy[BATCH] = 0
    turns_until(halves, lambda: not halves.decode.has_work())


@pytest.fixture
def side(tmp_path: Path, fused_model: Path) -> Iterator[PrefillSide]:
    listener = wires.listen(f"shm://{tmp_path}/fair", silence_s=SILENCE_S)
    made = PrefillSide(make_engine(fused_model), listener, step_tokens=512, silence_s=SILENCE_S)
    yield made
    made.close()


def test_each_peer_gets_as_many_tokens_however_long_its_prompts_are(side: PrefillSide) -> None:
    """Both have prompts and credit enough; one by one they are begun and offered."""
    side._most_busy[BATCH] = -1  # none before both are heard
    greedy, modest = Stranger(side), Stranger(side)
    sizes = {greedy: 128, modest: 32}
    for stranger, size in sizes.items():
        first = 3 if stranger is greedy else 50
        prompts = [
            Prompt(id=str(number), token_ids=[first + number] * size, lane=BATCH) for number in range(512 // size)
        ]
        stranger.say(stranger.hello(), *prompts, Credit(blocks=200, lane=BATCH))
    greedy.turns_until(lambda: len([peer for peer in side._peers if peer.waiting]) == 2)
    side._most_busy[BATCH] = 0  # one at a time
    peers = list(side._peers)
    size_of = [len(next(iter(peer.waiting.values())).prefix.token_ids) for peer in peers]
    begun: list[int] = []  # whose turn it was, by their places
    for _ in range(2000):
        was_begun = [peer.turn.total() for peer in peers]
        side.step()
        for place, peer in enumerate(peers):
            begun += [place] * (peer.turn.total() != was_begun[place])
            for prompt_id in list(peer.offered):
                side._cancel(peer, prompt_id)  # as if it had been fetched
        if side.stats.prompts == 20:
            break
    assert side.stats.prompts == 20
    tokens = Counter[int]()
    assert len(begun) == 20
    spread = []
    for place in begun:
        tokens[place] += size_of[place]
        spread.append(abs(tokens[0] - tokens[1]))
    assert max(spread) <= 2 * 128, f"one of them waits for the other: {begun}"
    for stranger in sizes:
        stranger.wire.close()
