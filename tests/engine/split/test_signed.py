"""A side takes frames of who shares its key alone, each once and in order; and no salt crosses."""

from __future__ import annotations

import contextlib
import json
import queue
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from engine.cache.passing import Prefix
from engine.errors import PeerError
from engine.request import Request, SamplingParams
from engine.split import wires
from engine.split.__main__ import main
from engine.split.link import Link, Wire
from engine.split.messages import Bye, Cancel, decode
from engine.split.shared import SharedWire
from engine.split.signed import NO_KEY, SignedWire, SplitKey
from tests.engine.split.halves import SILENCE_S, Halves, make_engine

pytestmark = pytest.mark.usefixtures("_no_dozing")

KEY, OTHER = SplitKey(b"0123456789abcdef" * 2), SplitKey(b"fedcba9876543210" * 2)
MOST = 1 << 20
ANOTHER_KEY = "Its key isn't ours: give both sides the same BATCHSVC_SPLIT_KEY"
CHANGED = "A frame was changed, repeated or left out on its way."
PARAMS = SamplingParams(max_tokens=4, temperature=0, ignore_eos=True)


class Line:
    """One direction of a network that somebody may stand in the way of."""

    def __init__(self) -> None:
        self.passing: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self.seen: list[bytes] = []
        self.deliver: Callable[[bytes], None] = self.passing.put

    def take(self, frame: bytes) -> None:
        self.seen.append(frame)
        self.deliver(frame)


class End:
    """A wire whose frames go through two lines."""

    def __init__(self, out: Line, back: Line) -> None:
        self._out, self._back = out, back

    def send(self, frame: bytes) -> None:
        self._out.take(frame)

    def receive(self, most_bytes: int) -> bytes:
        frame = self._back.passing.get(timeout=SILENCE_S)
        if frame is None:
            raise PeerError("The other side is gone.")
        return frame

    def close(self) -> None:
        self._out.passing.put(None)


def ends(one: SplitKey = KEY, other: SplitKey = KEY) -> tuple[SignedWire, SignedWire, Line, Line]:
    there, back = Line(), Line()
    return (
        SignedWire(End(there, back), one, is_listener=False, silence_s=SILENCE_S),
        SignedWire(End(back, there), other, is_listener=True, silence_s=SILENCE_S),
        there,
        back,
    )


def heard(wire: Wire, found: list[bytes | str]) -> threading.Thread:
    """Reads until it can't, and then says why."""

    def read() -> None:
        try:
            while True:
                found.append(wire.receive(MOST))
        except PeerError as error:
            found.append(str(error))

    thread = threading.Thread(target=read)
    thread.start()
    return thread


@pytest.mark.parametrize("key", [KEY, NO_KEY], ids=["key", "none"])
def test_frames_go_both_ways_as_they_were_sent(key: SplitKey) -> None:
    here, there, out, back = ends(key, key)
    at_here: list[bytes | str] = []
    at_there: list[bytes | str] = []
    readers = [heard(here, at_here), heard(there, at_there)]
    frames = [b"", b"a", b"", bytes(100_000), b"a"]
    for frame in frames:
        here.send(frame)
        there.send(frame)
    for line in (out, back):
        line.passing.put(None)
    for reader in readers:
        reader.join()
    assert at_here[:-1] == at_there[:-1] == frames
    assert [len(frame) for frame in out.seen[1:]] == [len(frame) + 32 * key.is_set for frame in frames]
    if key.is_set:
        assert len(set(out.seen[1:] + back.seen[1:])) == 10, "the same bytes never have the same digest twice"


def test_a_real_transport_carries_them(tmp_path: Path) -> None:
    listener = wires.listen(f"shm://{tmp_path}/s", key=KEY, silence_s=SILENCE_S)
    mine = SignedWire(wires.connect(listener.address, key=KEY, silence_s=SILENCE_S), KEY, is_listener=False,
                      silence_s=SILENCE_S)  # fmt: skip
    theirs = SignedWire(listener.accept(), KEY, is_listener=True, silence_s=SILENCE_S)
    wake = threading.Event()
    here, there = (Link(wire, "A", wake, most_bytes=MOST, silence_s=SILENCE_S) for wire in (mine, theirs))
    here.send(Cancel(id="a"))
    got: list[object] = []
    while not got:
        assert wake.wait(SILENCE_S)
        got += there.take()
    assert got == [Cancel(id="a")]
    here.close("That is all.")
    while there.ending is None:
        assert wake.wait(SILENCE_S)
    assert there.ending == "That is all."
    listener.close()


@pytest.mark.parametrize(
    ("one", "other", "connects", "listens"),
    [
        (KEY, OTHER, ANOTHER_KEY, ANOTHER_KEY),
        (KEY, NO_KEY, "It has no key, and we have one: give both sides the same BATCHSVC_SPLIT_KEY", None),
        (NO_KEY, KEY, "It has a key, and we have none: give both sides the same BATCHSVC_SPLIT_KEY", ANOTHER_KEY),
    ],
)
def test_other_keys_are_refused_by_both(one: SplitKey, other: SplitKey, connects: str, listens: str | None) -> None:
    """By who listens even where the other one goes on all the same."""
    here, there, out, _ = ends(one, other)
    at_here: list[bytes | str] = []
    at_there: list[bytes | str] = []
    readers = [heard(here, at_here), heard(there, at_there)]
    readers[0].join()
    assert [str(said).partition(", as")[0].rstrip(".") for said in at_here] == [connects]
    with pytest.raises(PeerError, match=r"^The connection is closed\.$"):
        here.send(b"a")
    if listens is None:
        out.passing.put(None)
    else:
        out.passing.put(bytes(40))
    readers[1].join()
    assert at_there == [f"{listens}." if listens else "The other side is gone."]


def mangled(line: Line, how: str) -> None:
    """From now on the line does this to its frames."""
    held: list[bytes] = []

    def deliver(frame: bytes) -> None:
        match how:
            case "change":
                line.passing.put(frame[:-1] + bytes([frame[-1] ^ 1]))
            case "change the digest":
                line.passing.put(bytes([frame[0] ^ 1]) + frame[1:])
            case "shorten":
                line.passing.put(frame[:-1])
            case "cut":
                line.passing.put(frame[:10])
            case "repeat":
                line.passing.put(frame)
                line.passing.put(frame)
            case "swap":
                held.append(frame)
                if len(held) == 2:
                    line.passing.put(held[1])
                    line.passing.put(held[0])
            case "leave out":
                held.append(frame)
                if len(held) > 1:
                    line.passing.put(frame)

    line.deliver = deliver


@pytest.mark.parametrize(
    "how", ["change", "change the digest", "shorten", "cut", "repeat", "swap", "leave out", "send back", "replay"]
)
def test_nobody_in_between_can_do_a_thing(how: str) -> None:
    here, there, out, back = ends()
    at_here: list[bytes | str] = []
    at_there: list[bytes | str] = []
    readers = [heard(here, at_here), heard(there, at_there)]
    here.send(b"first")
    if how == "send back":
        there.send(b"answer")
        out.passing.put(back.seen[-1])
    elif how == "replay":
        out.passing.put(out.seen[-1])
    else:
        mangled(out, how)
        here.send(b"second")
        with contextlib.suppress(PeerError):
            here.send(b"third!")
    readers[1].join()
    assert at_there[0] == b"first"
    assert at_there[-1] == CHANGED
    assert at_there[1:-1] in ([], [b"second"])
    back.passing.put(None)
    readers[0].join()


def test_what_was_said_in_one_session_is_nothing_in_another() -> None:
    """Neither to who listens nor to who connects."""
    here, there, out, back = ends()
    found: list[bytes | str] = []
    readers = [heard(here, []), heard(there, found)]
    here.send(b"pay")
    there.send(b"paid")
    for line in (out, back):
        line.passing.put(None)
    for reader in readers:
        reader.join()
    assert found[0] == b"pay"
    _, again, line, _ = ends()
    for frame in out.seen:
        line.passing.put(frame)
    found = []
    heard(again, found).join()
    assert found == [f"{ANOTHER_KEY}."]
    once_more, _, _, line = ends()
    for frame in back.seen:
        line.passing.put(frame)
    found = []
    heard(once_more, found).join()
    assert found == [f"{ANOTHER_KEY}."]


def test_who_has_not_shown_the_key_is_told_nothing() -> None:
    """Neither before its first frame nor after one that isn't signed."""
    here, there, out, back = ends()
    found: list[bytes | str] = []
    reader, greeter = heard(there, found), heard(here, [])
    said: list[str] = []

    def speak() -> None:
        try:
            there.send(b"our model")
        except PeerError as error:
            said.append(str(error))

    speaker = threading.Thread(target=speak)
    speaker.start()
    speaker.join(0.2)
    assert speaker.is_alive()
    assert len(back.seen) == 1, "a greeting, no more"
    out.passing.put(bytes(40))
    for thread in (reader, speaker):
        thread.join()
    assert (found, said, len(back.seen)) == ([f"{ANOTHER_KEY}."], ["The connection is closed."], 1)
    back.passing.put(None)
    greeter.join()


def test_who_never_greets_is_left_and_holds_nobody_up() -> None:
    mine, theirs = socket_pair()
    wire = SignedWire(mine, KEY, is_listener=True, silence_s=0.1)
    with pytest.raises(PeerError, match=r"silent for 0\.1 s"):
        wire.send(b"a")
    with pytest.raises(PeerError, match=r"silent for 0\.1 s"):
        wire.receive(MOST)
    with pytest.raises(PeerError, match="closed"):
        wire.send(b"a")
    wire.close()
    theirs.close()


def socket_pair() -> tuple[SharedWire, SharedWire]:
    one, other = (SharedWire(end, silence_s=0.1) for end in socket.socketpair())
    return one, other


OLD = {"kind": "Hello", "origin": ["kv1", "abc", "int8"], "role": "decode", "window_tokens": 0, "most_blocks": 9,
       "version": 1}  # fmt: skip
VERSIONS = "Its messages are of version 1, and ours of version 2: run one release on both sides."


def old_hello() -> bytes:
    head = json.dumps(OLD).encode()
    return struct.pack("<I", len(head)) + head


def test_an_older_decode_side_is_told_both_versions(tmp_path: Path, fused_model: Path) -> None:
    """In a frame that it understands."""
    halves = Halves(tmp_path, make_engine(fused_model), [make_engine(fused_model)], key=KEY)
    wire = wires.connect(halves.prefills[0].address, silence_s=SILENCE_S)
    wire.send(old_hello())
    assert decode(wire.receive(MOST)) == Bye(sentence=VERSIONS)
    with pytest.raises(PeerError):
        wire.receive(MOST)
    wire.close()
    halves.close()


def turns_until(halves: Halves, is_so: Callable[[], bool]) -> None:
    for _ in range(5000):
        halves.turn()
        if is_so():
            return
    raise AssertionError(f"it never happens: {halves.decode.note()}")


def test_of_an_older_prefill_side_a_decode_side_tells_both_versions(tmp_path: Path, fused_model: Path) -> None:
    halves = Halves(tmp_path, make_engine(fused_model), [])
    listener = wires.listen(f"shm://{tmp_path}/old", silence_s=SILENCE_S)
    halves.addresses.append(listener.address)
    wire = listener.accept()
    wire.send(old_hello())
    turns_until(halves, lambda: VERSIONS in (halves.decode.note() or ""))
    wire.close()
    listener.close()
    halves.close()


@pytest.fixture
def keyed(tmp_path: Path, fused_model: Path) -> Iterator[Halves]:
    made = Halves(tmp_path, make_engine(fused_model), [make_engine(fused_model)], patience_s=3600, key=KEY)
    yield made
    made.close()


def test_a_prefill_engine_of_another_key_is_told_in_the_note(keyed: Halves, fused_model: Path) -> None:
    keyed.leave(keyed.prefills[0])
    other = keyed.join(make_engine(fused_model), key=OTHER)
    keyed.decode.add(Request(id="a", prompt_ids=list(range(3, 67)), params=PARAMS))
    turns_until(keyed, lambda: ANOTHER_KEY in (keyed.decode.note() or ""))
    assert keyed.decode.split.handed_over == other.stats.prompts == 0


SALTS = ("salt-of-one-project", "salt-of-another-one")


def asked(name: str, salt: str) -> Request:
    return Request(id=name, prompt_ids=list(range(10, 90)), params=PARAMS, salt=salt)


def test_salts_stay_here_and_separate_projects_there(keyed: Halves, monkeypatch: pytest.MonkeyPatch) -> None:
    frames: list[bytes] = []
    send = SharedWire.send

    def watched(wire: SharedWire, frame: bytes) -> None:
        frames.append(frame)
        send(wire, frame)

    monkeypatch.setattr(SharedWire, "send", watched)
    (side,) = keyed.prefills
    found = {}
    for name, salt in zip("ab", SALTS, strict=True):
        found |= keyed.run([asked(name, salt)])
        raw, sent = (Prefix(token_ids=list(range(10, 90)), salt=text) for text in (salt, KEY.salt(salt)))
        assert [side._passing.num_cached(prefix) for prefix in (raw, sent)] == [0, 5]
        assert [keyed.decode._passing.num_cached(prefix) for prefix in (raw, sent)] == [5, 0]
    assert side.stats.sent_blocks == keyed.decode.split.received_blocks == 10, "nothing is shared between projects"
    assert [found[name].usage.hit_tokens for name in "ab"] == [0, 0]
    assert len(frames) > 4
    assert not any(salt.encode() in frame for salt in SALTS for frame in frames)


def test_another_link_finds_the_prefixes_of_a_project_again(keyed: Halves, tmp_path: Path, fused_model: Path) -> None:
    """What stands for a salt is of the key, not of a connection: else they would be computed once a connection."""
    keyed.run([asked("a", SALTS[0])])
    (side,) = keyed.prefills
    computed = side._engine.stats().computed_tokens
    other = Halves(tmp_path, make_engine(fused_model), [], patience_s=3600, key=KEY)
    other.prefills, other.addresses = [side], [side.address]
    found = other.run([asked("b", SALTS[0])])
    assert side._engine.stats().computed_tokens == computed
    assert found["b"].usage.hit_tokens == 79, "all but the token that is computed again"
    assert other.decode.split.received_blocks == 5
    other.decode.close()


def test_what_stands_for_a_salt_tells_nothing_of_it_or_of_the_key() -> None:
    made = {key.salt(salt) for key in (KEY, OTHER, NO_KEY) for salt in (*SALTS, "")}
    assert len(made) == 9
    assert {len(text) for text in made} == {64}
    assert KEY.digest("salt", b"ab", b"c") != KEY.digest("salt", b"a", b"bc")
    assert "0123" not in repr(KEY)


@pytest.mark.parametrize(
    ("text", "says"), [(None, "can't be read: No such file"), ("short", "less than 32 characters")]
)
def test_a_key_file_that_is_none_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], fused_model: Path, text: str | None, says: str
) -> None:
    path = tmp_path / "key"
    if text is not None:
        path.write_text(text)
    assert main(["prefill", "--model", str(fused_model), "--num-blocks", "10", "--key-file", str(path)]) == 2
    assert says in capsys.readouterr().err
