"""Transports: frames of any size in order, both ways at once; who dies or falls silent is noticed, never waited for."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from engine.cache.passing import Origin
from engine.errors import PeerError
from engine.split import nixl_wire, peers, wires
from engine.split.link import Link, Wire
from engine.split.messages import HEAD_BYTES, Bye, Cancel, Credit, Hello, Message, Prompt, decode, encode
from engine.split.shared import SharedWire
from engine.split.signed import SplitKey

SILENCE_S = 30.0  # longer than any test: nobody counts as lost because a machine is slow
SHORT_S = 0.6
MOST = 1 << 22
HELLO = Hello(origin=Origin("kv", "m", "w"), role="decode")
KINDS = ("shm", "gloo")
Pair = tuple[Wire, Wire]


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def address(kind: str, tmp_path: Path) -> str:
    return f"shm://{tmp_path}/s" if kind == "shm" else "gloo://127.0.0.1:0"


@pytest.fixture
def listener(address: str) -> Iterator[wires.Listener]:
    made = wires.listen(address, silence_s=SILENCE_S)
    yield made
    made.close()


_opened: list[Wire] = []


@pytest.fixture(autouse=True)
def _closing() -> Iterator[None]:
    yield
    while _opened:
        _opened.pop().close()


def pair(listener: wires.Listener, *, silence_s: float = SILENCE_S) -> Pair:
    found: list[Wire] = []
    thread = threading.Thread(target=lambda: found.append(listener.accept()))
    thread.start()
    mine = wires.connect(listener.address, silence_s=silence_s)
    thread.join()
    _opened.extend((mine, found[0]))
    return mine, found[0]


def in_thread(action: Callable[[], object]) -> threading.Thread:
    thread = threading.Thread(target=action)
    thread.start()
    return thread


def test_frames_of_any_size_arrive_in_order_both_ways(listener: wires.Listener) -> None:
    here, there = pair(listener)
    frames = [b"", b"a", b"", os.urandom(70_000), b"x" * (1 << 16), os.urandom(3_000_000), b"end"]
    senders = [in_thread(lambda wire=wire: [wire.send(frame) for frame in frames]) for wire in (here, there)]
    backwards: list[bytes] = []
    reader = in_thread(lambda: backwards.extend(here.receive(MOST) for _ in frames))
    assert [there.receive(MOST) for _ in frames] == frames
    for thread in (*senders, reader):
        thread.join()
    assert backwards == frames


def test_several_connect_and_each_has_its_own(listener: wires.Listener) -> None:
    first, second = pair(listener), pair(listener)
    senders = [
        in_thread(lambda wire=wire, name=name: wire.send(name)) for wire, name in ((first[0], b"1"), (second[0], b"2"))
    ]
    assert (second[1].receive(MOST), first[1].receive(MOST)) == (b"2", b"1")
    for thread in senders:
        thread.join()


def test_a_closed_end_is_noticed_at_once(listener: wires.Listener) -> None:
    here, there = pair(listener)
    here.close()
    with pytest.raises(PeerError, match="gone"):
        there.receive(MOST)


def test_a_silent_peer_counts_as_lost(address: str) -> None:
    listener = wires.listen(address, silence_s=SHORT_S)
    here, there = pair(listener, silence_s=SHORT_S)
    with pytest.raises(PeerError, match=r"silent for 0\.6 s"):
        there.receive(MOST)
    here.close()
    listener.close()


def test_nobody_listens(kind: str, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    address = f"shm://{tmp_path}/nobody" if kind == "shm" else f"gloo://127.0.0.1:{port}"
    with pytest.raises(PeerError, match="No prefill engine listens at"):
        wires.connect(address)


def test_a_path_where_somebody_listens_is_left_alone(tmp_path: Path) -> None:
    address = f"shm://{tmp_path}/s"
    first = wires.listen(address, silence_s=SILENCE_S)
    with pytest.raises(PeerError, match=f"Can't listen at {address}: Address already in use"):
        wires.listen(address, silence_s=SILENCE_S)
    first.accept().close()  # the other one knocked, and left
    here, there = pair(first)
    here.send(b"a")
    assert there.receive(MOST) == b"a"
    first.close()
    assert not (tmp_path / "s").exists()


def test_a_socket_that_was_left_behind_is_replaced_and_only_the_own_one_taken_away(tmp_path: Path) -> None:
    address, path = f"shm://{tmp_path}/s", tmp_path / "s"
    killed = socket.socket(socket.AF_UNIX)
    killed.bind(str(path))
    killed.close()
    first = wires.listen(address, silence_s=SILENCE_S)
    path.rename(tmp_path / "elsewhere")
    second = wires.listen(address, silence_s=SILENCE_S)
    first.close()
    here, there = pair(second)
    here.send(b"a")
    assert there.receive(MOST) == b"a"
    second.close()
    assert not path.exists()


def test_an_address_that_is_taken_is_refused() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, pytest.raises(PeerError, match="Can't listen at gloo://"):
        wires.listen(f"gloo://127.0.0.1:{server.getsockname()[1]}")


def test_the_store_listens_on_its_own_address_only() -> None:
    listener = wires.listen("gloo://127.0.0.1:0", silence_s=SILENCE_S)
    port = int(listener.address.rpartition(":")[2])
    with socket.create_server(("127.0.0.2", port)):  # free, unless somebody listens everywhere
        listener.close()


def shared_files() -> int:
    """Memory files that this process holds."""
    held = 0
    for descriptor in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):  # the one that lists them
            held += "memfd:kv" in str(descriptor.readlink())
    return held


def test_shared_memory_leaves_nothing_behind() -> None:
    """Neither when a frame is read nor when nobody reads it."""
    mine, theirs = (SharedWire(end, silence_s=SILENCE_S) for end in socket.socketpair())
    before = shared_files()
    mine.send(bytes(1 << 20))
    assert theirs.receive(MOST) == bytes(1 << 20)
    mine.send(bytes(1 << 20))
    assert shared_files() == before, "once it is sent the socket alone holds it"
    theirs.close()
    mine.close()
    assert shared_files() == before


def linked(listener: wires.Listener) -> tuple[Link, Link, threading.Event]:
    wake = threading.Event()
    here, there = pair(listener)
    return link_of(here, "A", wake), link_of(there, "B", wake), wake


def link_of(wire: Wire, name: str = "A", wake: threading.Event | None = None, *, most_bytes: int = MOST) -> Link:
    return Link(wire, name, wake or threading.Event(), most_bytes=most_bytes, silence_s=SILENCE_S)


def until(is_so: Callable[[], bool], within_s: float = 10.0) -> None:
    end = time.monotonic() + within_s
    while not is_so():
        assert time.monotonic() < end, "it never happens"
        time.sleep(0.01)


def test_a_link_beats_when_nothing_is_said_as_long_as_its_side_may(listener: wires.Listener) -> None:
    here, there = pair(listener)
    may, asked = threading.Event(), threading.Event()

    def may_beat() -> bool:
        asked.set()
        return may.is_set()

    link = Link(here, "A", threading.Event(), most_bytes=MOST, silence_s=0.04, may_beat=may_beat)
    assert asked.wait(SILENCE_S)
    link.send(Credit(blocks=1))
    assert decode(there.receive(MOST)) == Credit(blocks=1), "a side that hangs says nothing by itself"
    may.set()
    assert [there.receive(MOST) for _ in range(3)] == [b"", b"", b""]
    link.close()


class Broken:
    """A wire that fails as nobody foresaw."""

    def __init__(self, fails: str) -> None:
        self.fails = fails
        self.closed = threading.Event()

    def send(self, frame: bytes) -> None:
        if self.fails == "send":
            raise AssertionError("Torch not compiled with CUDA enabled")

    def receive(self, most_bytes: int) -> bytes:
        if self.fails == "receive":
            raise MemoryError
        self.closed.wait()
        raise PeerError("The connection is closed.")

    def close(self) -> None:
        self.closed.set()


@pytest.mark.parametrize(
    ("fails", "says"),
    [("send", "AssertionError: Torch not compiled"), ("receive", "The connection failed: MemoryError")],
)
def test_whatever_goes_wrong_ends_a_link_and_wakes_its_side(fails: str, says: str) -> None:
    wake, wire = threading.Event(), Broken(fails)
    link = link_of(wire, "A", wake)
    link.send(Credit(blocks=1))
    assert wake.wait(SILENCE_S)
    assert says in str(link.ending)
    assert link.has_news
    wire.close()


def test_peers_are_looked_for_again_whatever_went_wrong(
    listener: wires.Listener, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peers, "_AGAIN_S", 0.01)
    failures = [LookupError("of the directory"), MemoryError("of a connection")]

    def addresses() -> list[str]:
        if len(failures) == 2:
            raise failures.pop(0)
        return [listener.address]

    def connect(address: str, *, key: SplitKey, silence_s: float) -> Wire:
        if failures:
            raise failures.pop()
        return wires.connect(address, key=key, silence_s=silence_s)

    monkeypatch.setattr(peers, "connect", connect)
    accepted = in_thread(lambda: _opened.append(listener.accept()))
    wake = threading.Event()
    found = peers.Peers(addresses, wake, most_bytes=MOST, silence_s=SILENCE_S)
    assert wake.wait(SILENCE_S)
    (link,) = found.take_new()
    assert (link.name, link.ending, found.reason()) == (listener.address, None, None)
    accepted.join()
    found.close()
    link.close()


def test_a_link_carries_what_is_said(listener: wires.Listener) -> None:
    here, there, wake = linked(listener)
    for number in range(3):
        here.send(Credit(blocks=number))
    there.send(Cancel(id="x"))
    heard: list[object] = []

    def have_come() -> bool:
        heard.extend(there.take())
        return len(heard) == 3

    until(have_come)
    assert heard == [Credit(blocks=number) for number in range(3)]
    until(lambda: here.take() == [Cancel(id="x")])
    assert wake.is_set()
    here.close("That is all.")
    until(lambda: there.ending is not None)
    assert there.ending == "That is all."
    assert here.ending == "That is all."


def test_what_is_no_message_ends_a_link(listener: wires.Listener) -> None:
    here, there = pair(listener)
    link = link_of(there, "B")
    here.send(b"nonsense")
    until(lambda: link.ending is not None)
    assert "isn't a message" in str(link.ending)
    link.send(Bye())
    here.close()


def sending(wire: Wire, *frames: bytes) -> threading.Thread:
    """In a thread, because a transport may wait for who reads; the last one may be refused."""

    def send() -> None:
        with contextlib.suppress(PeerError):
            for frame in frames:
                wire.send(frame)

    return in_thread(send)


def test_a_frame_that_is_too_long_is_refused_by_its_length_alone(listener: wires.Listener) -> None:
    here, there = pair(listener)
    sender = sending(here, bytes(1000), bytes(1001))
    assert there.receive(1000) == bytes(1000)
    with pytest.raises(PeerError, match=r"sent a frame of 1,001 bytes, and may send 1,000 at once\.$"):
        there.receive(1000)
    here.close()
    there.close()
    sender.join()


@pytest.mark.parametrize("is_shared", [False, True])
def test_a_length_alone_makes_no_room(is_shared: bool) -> None:
    ours, raw = socket.socketpair()
    wire = SharedWire(ours, silence_s=SILENCE_S)
    raw.sendall(struct.pack("<QB", 1 << 62, is_shared))  # and nothing behind it
    with pytest.raises(PeerError, match=r"sent a frame of 4,611,686,018,427,387,904 bytes"):
        wire.receive(MOST)
    raw.close()
    wire.close()


def test_a_negative_length_is_no_frame() -> None:
    listener = wires.listen("gloo://127.0.0.1:0", silence_s=SILENCE_S)
    here, there = pair(listener)
    sender = in_thread(lambda: here._send(torch.tensor([-1])))
    with pytest.raises(PeerError, match="isn't a frame"):
        there.receive(MOST)
    sender.join()
    listener.close()


def heard_all(link: Link, heard: list[Message], count: int) -> bool:
    heard += link.take()
    return len(heard) == count


def prompt_of(num_bytes: int) -> Message:
    return Prompt(id="p", token_ids=[1] * (num_bytes // 4))


def test_only_who_said_what_it_is_may_send_long_frames(listener: wires.Listener) -> None:
    here, there = pair(listener)
    link = link_of(there, most_bytes=4 * HEAD_BYTES)
    sender = sending(here, encode(prompt_of(2 * HEAD_BYTES)))
    until(lambda: link.ending is not None)
    assert "and may send 65,536 at once." in str(link.ending)
    here.close()
    sender.join()
    here, there = pair(listener)
    link = link_of(there, most_bytes=4 * HEAD_BYTES)
    sending(here, encode(HELLO), encode(prompt_of(2 * HEAD_BYTES))).join()
    heard: list[Message] = []
    until(lambda: heard_all(link, heard, 2))
    sender = sending(here, encode(prompt_of(5 * HEAD_BYTES)))
    until(lambda: link.ending is not None)
    assert "and may send 262,144 at once." in str(link.ending)
    here.close()
    sender.join()


class Endless:
    """A peer that says what it is, and then the same for ever."""

    def __init__(self) -> None:
        self.frames = 0
        self.is_closed = False

    def send(self, frame: bytes) -> None:
        pass

    def receive(self, most_bytes: int) -> bytes:
        if self.is_closed:
            raise PeerError("The connection is closed.")
        self.frames += 1
        return encode(HELLO if self.frames == 1 else prompt_of(HEAD_BYTES))

    def close(self) -> None:
        self.is_closed = True


def test_who_talks_faster_than_it_is_heard_has_to_wait() -> None:
    wire = Endless()
    link = link_of(wire, most_bytes=HEAD_BYTES)
    until(lambda: link._untaken_bytes > 8 * HEAD_BYTES)
    seen = wire.frames
    assert seen < 12
    assert wire.frames == seen, "it is read no further"
    taken = len(link.take())
    until(lambda: link._untaken_bytes > 8 * HEAD_BYTES)
    assert taken == seen < wire.frames
    wire.is_closed = True
    link.close()
    until(lambda: not any(thread.name == "link to A" for thread in threading.enumerate()))


@pytest.mark.parametrize("frame", [b"", encode(Credit(blocks=1))], ids=["beats", "messages"])
def test_who_goes_on_after_our_goodbye_is_not_heard_for_ever(frame: bytes) -> None:
    wire = Endless()
    wire.receive = lambda most_bytes: frame  # type: ignore[method-assign]
    link = Link(wire, "A", threading.Event(), most_bytes=MOST, silence_s=0.1)
    link.close("That is all.")
    until(lambda: wire.is_closed)
    assert link.ending == "That is all."


def has_nixl() -> bool:
    return any(importlib.util.find_spec(name) for name in nixl_wire._NAMES)


@pytest.mark.skipif(has_nixl(), reason="NIXL is installed: the test below runs instead")
def test_without_nixl_its_addresses_are_refused_with_the_way_out() -> None:
    for use in (wires.listen, wires.connect):
        with pytest.raises(PeerError, match="need NIXL, which isn't installed: pip install nixl, or use gloo://"):
            use("nixl://127.0.0.1:0")


@pytest.mark.skipif(not has_nixl(), reason="NIXL isn't installed, as on any machine without CUDA")
def test_nixl_carries_frames_too() -> None:
    listener = wires.listen("nixl://127.0.0.1:0", silence_s=10.0)
    here, there = pair(listener)
    frames = [b"a", os.urandom(70_000), b"", os.urandom(3_000_000), b"end"]
    backwards: list[bytes] = []
    workers = [in_thread(lambda wire=wire: [wire.send(frame) for frame in frames]) for wire in (here, there)]
    workers.append(in_thread(lambda: backwards.extend(here.receive(MOST) for _ in frames)))
    assert [there.receive(MOST) for _ in frames] == frames
    for thread in workers:
        thread.join()
    assert backwards == frames
    here.close()
    with pytest.raises(PeerError):
        there.receive(MOST)
    listener.close()
