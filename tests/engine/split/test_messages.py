"""What is said is what is heard, and anything else is refused in a sentence."""

from __future__ import annotations

import contextlib
import json
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.cache.passing import Origin
from engine.errors import PeerError
from engine.split import messages
from engine.split.messages import (
    Blocks,
    Bye,
    Cancel,
    Credit,
    Greeting,
    Hello,
    Message,
    Offer,
    Prompt,
    Want,
    check,
    decode,
    encode,
    greeted,
)

names = st.text(max_size=12)
counts = st.integers(0, 1 << 40)
said: st.SearchStrategy[Message] = st.one_of(
    st.builds(
        Hello,
        origin=st.builds(Origin, layout=names, model=names, weights=names),
        role=names,
        window_tokens=counts,
        most_tokens=counts,
        most_blocks=counts,
    ),
    st.builds(
        Prompt,
        id=names,
        token_ids=st.lists(st.integers(0, (1 << 31) - 1)),
        salt=names,
        adapter=names,
        lane=counts,
    ),
    st.builds(Greeting, nonce=names, proof=names, version=counts),
    st.builds(Cancel, id=names),
    st.builds(Credit, blocks=counts, lane=counts),
    st.builds(Offer, id=names, keys=st.lists(st.binary(min_size=16, max_size=16)), hit_tokens=counts),
    st.builds(Want, id=names, first=counts),
    st.builds(Blocks, id=names, first=counts, count=counts, is_last=st.booleans(), data=st.binary()),
    st.builds(Bye, sentence=names),
)


@given(said)
def test_a_message_is_heard_as_it_was_said(message: Message) -> None:
    assert decode(encode(message)) == message


def frame(values: object, tail: bytes = b"") -> bytes:
    head = json.dumps(values).encode()
    return struct.pack("<I", len(head)) + head + tail


@pytest.mark.parametrize(
    "bad",
    [
        b"",
        b"\xff\xff\xff\xff{}",
        struct.pack("<I", 1 << 20) + b"[" * (1 << 20),
        frame([]),
        frame({}),
        frame({"kind": "Eval", "code": "1"}),
        frame({"kind": "Credit", "blocks": -1}),
        frame({"kind": "Credit", "blocks": True}),
        frame({"kind": "Credit", "blocks": 1.5}),
        frame({"kind": "Credit"}),
        frame({"kind": "Credit", "blocks": 1, "more": 1}),
        frame({"kind": "Credit", "blocks": 1}, b"tail"),
        frame({"kind": "Bye", "sentence": "x" * messages.HEAD_BYTES}),
        frame({"kind": "Cancel", "id": 7}),
        frame({"kind": "Offer", "id": "a", "hit_tokens": 0}, b"seventeen bytes!!"),
        frame({"kind": "Prompt", "id": "a", "salt": "", "adapter": "", "lane": 0}, b"123"),
        frame({"kind": "Hello", "origin": [1, 2, 3], "role": "", "window_tokens": 0, "most_blocks": 0, "version": 1}),
        frame({"kind": "Hello", "origin": "abcd", "role": "", "window_tokens": 0, "most_blocks": 0, "version": 1}),
    ],
    ids=lambda bad: repr(bad[:80]),
)
def test_what_is_no_message_is_refused(bad: bytes) -> None:
    with pytest.raises(PeerError, match="isn't a message of this version"):
        decode(bad)


@given(st.binary(max_size=80))
def test_no_bytes_raise_anything_else(data: bytes) -> None:
    with contextlib.suppress(PeerError):
        decode(data)


OURS = Origin(layout="kv1/int8", model="abc", weights="int8")


@pytest.mark.parametrize(
    ("hello", "says"),
    [
        (Hello(origin=OURS, role="prefill"), "It is a prefill engine, and so are we"),
        (Hello(origin=Origin("kv1/int8", "xyz", "int8"), role="decode"), "Its model is xyz, and ours abc"),
        (Hello(origin=Origin("kv1/bf16", "abc", "int8"), role="decode"), "Its KV layout is kv1/bf16, and ours"),
        (Hello(origin=Origin("kv1/int8", "abc", "bf16"), role="decode"), "Its weight format is bf16, and ours int8"),
    ],
)
def test_who_can_not_share_blocks_is_told_why(hello: Hello, says: str) -> None:
    with pytest.raises(PeerError, match=says):
        check(hello, "prefill", OURS)


def test_who_can_is_welcome() -> None:
    check(Hello(origin=OURS, role="decode"), "prefill", OURS)


def test_a_greeting_is_taken_as_it_is() -> None:
    assert messages.VERSION == 2
    made = Greeting(nonce="aa", proof="bb")
    assert greeted(encode(made)) == made


OLD_HELLO = {"kind": "Hello", "origin": ["kv1", "abc", "int8"], "role": "decode", "window_tokens": 0, "most_blocks": 9}


@pytest.mark.parametrize(
    ("first", "says"),
    [
        (frame({**OLD_HELLO, "version": 1}), r"^Its messages are of version 1, and ours of version 2: run one release"),
        (frame({"kind": "Greeting", "version": 3, "more": []}), "of version 3, and ours of version 2"),
        (encode(Bye(sentence="This prefill engine serves 64 others already.")), "serves 64 others already"),
        (encode(Bye()), "said goodbye"),
        (encode(Cancel(id="a")), "isn't a message of this version"),
        (frame([]), "isn't a message of this version"),
        (b"", "isn't a message of this version"),
    ],
)
def test_who_does_not_greet_is_told_why(first: bytes, says: str) -> None:
    with pytest.raises(PeerError, match=says):
        greeted(first)
