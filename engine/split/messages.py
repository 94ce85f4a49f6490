"""What the two sides say to each other, and how it reads as bytes; pure.

A frame is a length (4 bytes), so much JSON with the message's kind and fields, and behind it its bytes, if it has any.
"""

from __future__ import annotations

import contextlib
import json
import struct
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

from engine.cache.passing import Origin
from engine.errors import PeerError

VERSION = 2
KEY_BYTES = 16
HEAD_BYTES = 1 << 16
"""Most that a frame has beside its tail, and all of one has from whom nothing is known yet."""
PIECE_BYTES = 32 << 20
"""The blocks of a prompt go in pieces of about this size."""

_NO_MESSAGE = "The other side sent something that isn't a message of this version."
SAID_TWICE = "The other side said twice what it is."

_TOKEN_BYTES = 4
_INT32 = next(code for code in "il" if array(code).itemsize == _TOKEN_BYTES)


@dataclass(frozen=True, slots=True, kw_only=True)
class Greeting:
    """The first frame of each side, before any that is signed (signed.py). `nonce` and `proof` are hexadecimal."""

    nonce: str
    proof: str = ""
    version: int = VERSION


@dataclass(frozen=True, slots=True, kw_only=True)
class Hello:
    """The first message of each side, and its only one of this kind. `window_tokens` of prompts may wait or run at a
    prefill side, of each lane and each of at most `most_tokens`; `most_blocks` is the most credit that a prompt of this
    decode side costs."""

    origin: Origin
    role: str
    window_tokens: int = 0
    most_tokens: int = 0
    most_blocks: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """Compute this prefix, which is whole blocks long."""

    id: str
    token_ids: Sequence[int]
    salt: str = ""
    adapter: str = ""
    lane: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Cancel:
    """Nobody waits for this prompt any more."""

    id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Credit:
    """So many more blocks of this lane's prompts may come."""

    blocks: int
    lane: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """A prompt is computed. `keys` are those of its blocks that there are, `hit_tokens` what the cache had of it. No
    keys: it can't be computed here."""

    id: str
    keys: Sequence[bytes]
    hit_tokens: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Want:
    """All blocks of the offer from number `first` on; those before are there, or on their way."""

    id: str
    first: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Blocks:
    """Blocks `first` … `first + count - 1` of a prompt in the pool's wire layout; more follow unless it `is_last`."""

    id: str
    first: int
    count: int
    is_last: bool
    data: bytes = b""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bye:
    """The last message of a side, and why."""

    sentence: str = ""


Message = Greeting | Hello | Prompt | Cancel | Credit | Offer | Want | Blocks | Bye
_KINDS: dict[str, type[Any]] = {
    kind.__name__: kind for kind in (Greeting, Hello, Prompt, Cancel, Credit, Offer, Want, Blocks, Bye)
}


_TAILS: dict[type[Any], str] = {Prompt: "token_ids", Offer: "keys", Blocks: "data"}  # the field that travels as bytes


def encode(message: Message) -> bytes:
    """A message as a frame."""
    tail_name = _TAILS.get(type(message))
    values = {field.name: getattr(message, field.name) for field in fields(message) if field.name != tail_name}
    if isinstance(message, Hello):
        origin = message.origin
        values["origin"] = [origin.layout, origin.model, origin.weights]
    head = json.dumps({"kind": type(message).__name__, **values}).encode()
    return struct.pack("<I", len(head)) + head + _tail(message)


def decode(frame: bytes) -> Message:
    """The message of a frame. Raises PeerError for anything that `encode` doesn't write."""
    try:
        values, tail = _parts(frame)
        kind = _KINDS[values.pop("kind")]
        _check(kind, values, tail)
        message: Message = kind(**values)
    except (struct.error, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise PeerError(_NO_MESSAGE) from error
    return message


def greeted(frame: bytes) -> Greeting:
    """The greeting that a first frame is. Raises PeerError with the reason of who doesn't greet, and with both versions
    where the other side's is another; those before version 2 began with a Hello."""
    with contextlib.suppress(struct.error, ValueError, AttributeError, RecursionError):
        version = _parts(frame)[0].get("version", VERSION)
        if type(version) is int and version != VERSION:
            raise PeerError(
                f"Its messages are of version {version}, and ours of version {VERSION}: run one release on both sides."
            )
    message = decode(frame)
    if isinstance(message, Bye):
        raise PeerError(message.sentence or "The other side said goodbye.")
    if not isinstance(message, Greeting):
        raise PeerError(_NO_MESSAGE)
    return message


def most_prompt_bytes(most_tokens: int) -> int:
    """Of a frame that a decode side sends."""
    return HEAD_BYTES + _TOKEN_BYTES * most_tokens


def most_piece_bytes(block_bytes: int) -> int:
    """Of a frame that a prefill side sends."""
    return HEAD_BYTES + max(PIECE_BYTES, block_bytes)


def check(hello: Hello, own_role: str, own_origin: Origin) -> None:
    """Raises PeerError with the reason why blocks can't go from one side to the other."""
    if hello.role == own_role:
        raise PeerError(f"It is a {own_role} engine, and so are we; a decode engine goes with a prefill engine.")
    sentence = own_origin.difference(hello.origin)
    if sentence is not None:
        raise PeerError(sentence)


def _parts(frame: bytes) -> tuple[Any, bytes]:
    """What JSON and the bytes behind it say."""
    (size,) = struct.unpack_from("<I", frame)
    return json.loads(frame[4 : 4 + size] if size <= HEAD_BYTES else b""), frame[4 + size :]


def _tail(message: Message) -> bytes:
    if isinstance(message, Prompt):
        return array(_INT32, message.token_ids).tobytes()
    if isinstance(message, Offer):
        return b"".join(message.keys)
    return message.data if isinstance(message, Blocks) else b""


def _check(kind: type[Any], values: dict[str, Any], tail: bytes) -> None:
    """Turns what JSON and the tail have into what the fields want, and refuses other types."""
    types = {
        "nonce": str,
        "proof": str,
        "role": str,
        "id": str,
        "salt": str,
        "adapter": str,
        "sentence": str,
        "is_last": bool,
    }
    for name, value in values.items():
        if name == "origin":
            values[name] = Origin(*(_text(part) for part in value))
        elif type(value) is not types.get(name, int) or (type(value) is int and value < 0):
            raise ValueError(name)
        elif isinstance(value, str):
            value.encode()  # half a character is no text, and would be found out in the middle of a step
    if kind is Prompt:
        token_ids = array(_INT32)
        token_ids.frombytes(tail)
        if min(token_ids, default=0) < 0:
            raise ValueError("token_ids")
        values["token_ids"] = token_ids.tolist()
    elif kind is Offer:
        if len(tail) % KEY_BYTES:
            raise ValueError("keys")
        values["keys"] = [tail[at : at + KEY_BYTES] for at in range(0, len(tail), KEY_BYTES)]
    elif kind is Blocks:
        values["data"] = tail
    elif tail:
        raise ValueError("tail")


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError("text")
    value.encode()
    return value
