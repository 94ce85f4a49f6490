"""A peer that breaks the rules is told so in a sentence and left; it takes no more of us than its window."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from engine.errors import PeerError
from engine.request import Lane, Request, SamplingParams, StepOutput
from engine.split import prefill, wires
from engine.split.link import Wire
from engine.split.messages import Blocks, Bye, Cancel, Credit, Hello, Message, Offer, Prompt, decode, encode
from engine.split.prefill import PrefillSide
from engine.split.signed import SignedWire
from tests.engine.split.halves import SILENCE_S, Halves, make_engine

pytestmark = pytest.mark.usefixtures("_no_dozing")

Make = Callable[..., Halves]
TURNS = 2000
WINDOW = 4 * 64  # of the prefill side of these tests: four steps


@pytest.fixture
def halves(tmp_path: Path, fused_model: Path) -> Iterator[Halves]:
    made = Halves(tmp_path, make_engine(fused_model), [make_engine(fused_model)], patience_s=3600)
    yield made
    made.close()


class Stranger:
    """Talks to a prefill side as a decode side may, or may not."""

    def __init__(self, side: PrefillSide) -> None:
        self.side = side
        wire = wires.connect(side.address, silence_s=SILENCE_S)
        self.wire = SignedWire(wire, side._key, is_listener=False, silence_s=SILENCE_S)
        self.heard: list[Message] = []
        self.is_lost = threading.Event()
        threading.Thread(target=self._hear, daemon=True).start()

    def say(self, *messages: Message) -> None:
        for message in messages:
            self.wire.send(encode(message))

    def hello(self) -> Hello:
        return Hello(origin=self.side._passing.origin, role="decode", most_blocks=100)

    def farewell(self) -> str:
        """The sentence with which it is left."""
        for _ in range(TURNS):
            self.side.step()
            if self.is_lost.wait(0.001):
                break
        assert not self.side._peers, "it is still served"
        (bye,) = [message for message in self.heard if isinstance(message, Bye)]
        return bye.sentence

    def turns_until(self, is_so: Callable[[], bool]) -> None:
        for _ in range(TURNS):
            self.side.step()
            self.is_lost.wait(0.001)
            if is_so():
                return
        raise AssertionError("it never happens")

    def _hear(self) -> None:
        try:
            while True:
                frame = self.wire.receive(1 << 22)
                if frame:
                    self.heard.append(decode(frame))
                    if isinstance(self.heard[-1], Bye):
                        self.wire.close()
        except PeerError:
            self.is_lost.set()


@pytest.fixture
def stranger(tmp_path: Path, fused_model: Path) -> Iterator[Stranger]:
    listener = wires.listen(f"shm://{tmp_path}/alone", silence_s=SILENCE_S)
    side = PrefillSide(make_engine(fused_model), listener, step_tokens=WINDOW // 4, silence_s=SILENCE_S)
    made = Stranger(side)
    yield made
    made.wire.close()
    side.close()


def prompt(name: str, num_tokens: int, first: int = 3) -> Prompt:
    return Prompt(id=name, token_ids=[first + number % 300 for number in range(num_tokens)])


def test_a_second_hello_is_refused(stranger: Stranger) -> None:
    stranger.say(stranger.hello(), stranger.hello())
    assert stranger.farewell() == "The other side said twice what it is."


@pytest.mark.parametrize(
    "bad", [{"token_ids": [-1] * 16}, {"salt": "\ud800"}, {"adapter": "\ud800"}], ids=["token", "salt", "adapter"]
)
def test_what_no_prompt_may_hold_ends_the_link_alone(stranger: Stranger, bad: dict[str, Any]) -> None:
    stranger.say(stranger.hello(), Credit(blocks=8), replace(prompt("bad", 16), **bad))
    stranger.turns_until(stranger.is_lost.is_set)
    stranger.turns_until(lambda: not stranger.side._peers)


def test_an_id_may_come_again_while_what_was_cancelled_still_ends(
    stranger: Stranger, monkeypatch: pytest.MonkeyPatch
) -> None:
    stranger.say(stranger.hello(), prompt("x", 128), Credit(blocks=99))
    with monkeypatch.context() as patch:
        patch.setattr(stranger.side._engine, "has_work", lambda: False)  # it gets nowhere
        stranger.turns_until(lambda: bool(stranger.side._peers and stranger.side._peers[0].running))
        (peer,) = stranger.side._peers
        first = peer.running["x"]
        stranger.say(Cancel(id="x"), prompt("x", 64, first=40))
        stranger.turns_until(lambda: "x" in peer.running and peer.running["x"] is not first)
    stranger.turns_until(lambda: "x" in peer.offered)
    stranger.turns_until(lambda: any(isinstance(message, Offer) for message in stranger.heard))
    assert (len(peer.offered["x"].prefix.token_ids), stranger.side._busy_blocks) == (64, 4)


def test_more_than_the_window_is_refused(stranger: Stranger) -> None:
    """What waits without credit and what runs count; what was answered doesn't."""
    (running, waiting) = (prompt("runs", 128), prompt("waits", 128, first=5))
    stranger.say(stranger.hello(), running, waiting, Credit(blocks=8))
    stranger.turns_until(lambda: any(isinstance(message, Offer) for message in stranger.heard))
    (peer,) = stranger.side._peers
    assert (peer.held_tokens[Lane.INTERACTIVE], list(peer.waiting), list(peer.offered)) == (128, ["waits"], ["runs"])
    stranger.say(prompt("fits", WINDOW - 128, first=7))
    stranger.turns_until(lambda: "fits" in peer.waiting)
    stranger.say(prompt("one too many", 16, first=9))
    assert stranger.farewell() == (
        "The other side sent a prompt of 16 tokens beside 256 of its lane that wait or run, and 256 may at once."
    )
    assert stranger.side._busy_blocks == 0


def test_a_prompt_that_runs_counts(stranger: Stranger, monkeypatch: pytest.MonkeyPatch) -> None:
    stranger.say(stranger.hello(), prompt("a", WINDOW), Credit(blocks=99))
    with monkeypatch.context() as patch:
        patch.setattr(stranger.side._engine, "has_work", lambda: False)  # it gets nowhere
        stranger.turns_until(lambda: bool(stranger.side._peers and stranger.side._peers[0].running))
        stranger.say(prompt("b", 16))
        assert "16 tokens beside 256 of its lane" in stranger.farewell()


def test_what_is_cancelled_makes_room(stranger: Stranger) -> None:
    stranger.say(stranger.hello())
    for number in range(9):
        stranger.say(prompt(str(number), WINDOW), Cancel(id=str(number)))
    stranger.say(prompt("last", WINDOW))
    stranger.turns_until(lambda: bool(stranger.side._peers and "last" in stranger.side._peers[0].waiting))
    assert stranger.side._peers[0].held_tokens.total() == WINDOW


def test_a_first_prompt_may_be_longer_than_the_window_but_not_than_the_pool(stranger: Stranger) -> None:
    pool = 400 * 16
    stranger.say(stranger.hello(), prompt("long", pool))
    stranger.turns_until(lambda: bool(stranger.side._peers and stranger.side._peers[0].waiting))
    stranger.say(Cancel(id="long"), prompt("longer", pool + 16))
    assert stranger.farewell() == "The other side sent a prompt of 6,416 tokens; 6,400 fit."


def test_who_never_says_what_it_is_is_left(stranger: Stranger) -> None:
    stranger.turns_until(lambda: bool(stranger.side._peers))
    stranger.side.hung_s = 0.0
    assert stranger.farewell() == "The other side didn't say what it is within 0 s."


def test_a_decode_side_keeps_to_the_window_whatever_happens(halves: Halves, monkeypatch: pytest.MonkeyPatch) -> None:
    """Many prompts of any length, some of them aborted, at a window that is always full."""
    most: list[int] = []
    hold = prefill._Peer.hold

    def watched(peer: prefill._Peer, work: prefill._Work) -> None:
        hold(peer, work)
        most.append(max(peer.held_tokens.values()))

    monkeypatch.setattr(prefill._Peer, "hold", watched)
    params = SamplingParams(max_tokens=2, temperature=0, ignore_eos=True)
    requests = [
        Request(id=str(number), prompt_ids=[number + 3] * (16 + 37 * number % 190), params=params, lane=number % 3)
        for number in range(40)
    ]
    for request in requests:
        halves.decode.add(request)
    turns = 0
    while halves.decode.has_work():
        halves.turn()
        turns += 1
        if turns % 4 == 0:
            halves.decode.abort(str(turns % 40))
        assert turns < TURNS * 10
    assert halves.decode.split.lost_peers == 0
    assert WINDOW - 64 < max(most) <= WINDOW
    (peer,) = halves.prefills[0]._peers
    halves.turn()
    assert peer.held_tokens.total() == 0


def _read_all(wire: Wire) -> None:
    with contextlib.suppress(PeerError):
        while True:
            wire.receive(1 << 22)


class Impostor:
    """Talks to a decode side as a prefill side may not."""

    def __init__(self, halves: Halves, folder: Path) -> None:
        self.halves = halves
        self._listener = wires.listen(f"shm://{folder}/impostor", silence_s=SILENCE_S)
        halves.addresses[:] = [self._listener.address]
        self.hello = replace(
            Hello(origin=halves.prefills[0]._passing.origin, role="prefill", window_tokens=WINDOW), most_tokens=6400
        )

    def reason(self, *messages: Message) -> str:
        """Why it is left after it said this."""
        accepted: list[Wire] = []
        thread = threading.Thread(target=lambda: accepted.append(self._listener.accept()))
        thread.start()
        for _ in range(TURNS):
            self.halves.decode.step()
            if accepted:
                break
        thread.join()
        wire = SignedWire(accepted[0], self.halves.peers.key, is_listener=True, silence_s=SILENCE_S)
        reader = threading.Thread(target=_read_all, args=(wire,))
        reader.start()
        for message in messages:
            wire.send(encode(message))
        for _ in range(TURNS):
            self.halves.decode.step()
            found = self.halves.peers.reason()
            if found is not None:
                break
        wire.close()
        reader.join()
        self._listener.close()
        assert found is not None, "it is never left"
        return found.partition(": ")[2]


def test_a_prefill_side_says_once_what_it_is(halves: Halves, tmp_path: Path) -> None:
    impostor = Impostor(halves, tmp_path)
    assert impostor.reason(impostor.hello, impostor.hello) == "The other side said twice what it is."


def test_a_prefill_side_says_first_what_it_is(halves: Halves, tmp_path: Path) -> None:
    impostor = Impostor(halves, tmp_path)
    assert impostor.reason(Offer(id="0", keys=())) == "The other side spoke before it said what it is."


def test_what_no_prefill_side_can_hold_is_not_asked_of_it(halves: Halves, fused_model: Path) -> None:
    (side,) = halves.prefills
    halves.leave(side)
    small = halves.join(make_engine(fused_model, num_blocks=4))
    params = SamplingParams(max_tokens=2, temperature=0, ignore_eos=True)
    found = halves.run([Request(id="long", prompt_ids=list(range(10, 180)), params=params)])
    assert found["long"].usage.output_tokens == 2
    assert (halves.decode.split.own_prompts, small.stats.prompts, halves.decode.split.lost_peers) == (1, 0, 0)


def test_a_prompt_is_offered_once_and_before_its_blocks(halves: Halves) -> None:
    """Or its tokens would be given back twice, and blocks that never come be waited for."""
    decode_side = halves.decode
    for _ in range(TURNS):
        halves.turn()
        if decode_side._peers and decode_side._peers[0].is_known:
            break
    asked = Request(id="a", prompt_ids=list(range(3, 67)), params=SamplingParams(max_tokens=2, temperature=0))
    decode_side.add(asked)
    decode_side._take_in(StepOutput())
    decode_side._ask()
    (peer,) = decode_side._peers
    ((number, pending),) = peer.asked.items()
    keys = decode_side._passing.keys(decode_side._as_sent(pending.prefix))
    with pytest.raises(PeerError, match="hasn't offered"):
        decode_side._read(peer, Blocks(id=number, first=0, count=0, is_last=True))
    decode_side._read(peer, Offer(id=number, keys=keys))
    with pytest.raises(PeerError, match="offered a prompt twice"):
        decode_side._read(peer, Offer(id=number, keys=keys[:1]))
    assert peer.asked_tokens.total() == 0
    assert peer.coming == set(pending.keys)
