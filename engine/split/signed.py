"""Frames that prove who sent them: both sides share a key, and every frame carries a digest that only its holders make.

    connects                              listens
    Greeting   version, nonce        ->
                                     <-   Greeting   version, nonce, proof of the key
    frame      digest, bytes         <->  frame      digest, bytes

A digest is HMAC-SHA256 of a frame's number and its bytes. Its key is that of the session and the direction, made of the
shared key and both greetings: a frame that is changed, left out, repeated, sent back or taken from another session
isn't the one that is due. The proof tells who connects that keys differ. Who listens sees it by the first frame, and
says nothing but its greeting before.

Nothing is encrypted: who can read the network reads tokens and blocks. Without a key frames have no digest; wires.py
allows that where nobody but this host can connect.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import os
import struct
import threading
from dataclasses import dataclass, field

from engine.errors import PeerError
from engine.split.link import Wire
from engine.split.messages import HEAD_BYTES, Bye, Greeting, encode, greeted

LEAST_BYTES = 32
"""Of a key: those who see signed frames may try keys for as long as they like."""
SAME_KEY = "give both sides the same BATCHSVC_SPLIT_KEY"
_DIGEST_BYTES = 32
_NONCE_BYTES = 32
_NUMBER = struct.Struct("<Q")


@dataclass(frozen=True, slots=True)
class SplitKey:
    """What the sides of a split share; an empty one is none. It shows in no repr."""

    secret: bytes = field(default=b"", repr=False)

    @property
    def is_set(self) -> bool:
        return bool(self.secret)

    def digest(self, purpose: str, *parts: bytes) -> bytes:
        """Of these parts, for this purpose alone."""
        made = hmac.new(self.secret, digestmod=hashlib.sha256)
        for part in (purpose.encode(), *parts):
            made.update(_NUMBER.pack(len(part)))
            made.update(part)
        return made.digest()

    def salt(self, salt: str) -> str:
        """What stands for a project's salt on the other side: the same on every link, so that prefixes are found again,
        and of no use to who reads it."""
        return self.digest("salt", salt.encode()).hex()


NO_KEY = SplitKey()


class SignedWire:
    """A wire whose frames are signed and checked. The first `receive` greets; `send` waits until the other side may be
    spoken to."""

    def __init__(self, wire: Wire, key: SplitKey, *, is_listener: bool, silence_s: float) -> None:
        self._wire = wire
        self._key = key
        self._is_listener = is_listener
        self._silence_s = silence_s
        self._is_settled = threading.Event()  # whether the other side may be spoken to
        self._outwards: _Signer | None = None  # None: it may not
        self._inwards: _Signer | None = None

    def send(self, frame: bytes) -> None:
        """As Wire.send."""
        if not self._is_settled.wait(self._silence_s):
            raise PeerError(f"The other side was silent for {self._silence_s:g} s.")
        outwards = self._outwards
        if outwards is None:
            raise PeerError("The connection is closed.")
        self._wire.send(outwards.next_digest(frame) + frame)

    def receive(self, most_bytes: int) -> bytes:
        """As Wire.receive. Raises PeerError for a frame that isn't the other side's next one, too."""
        try:
            if self._inwards is None:
                self._inwards = self._greet()
                if not self._is_listener or not self._key.is_set:
                    self._is_settled.set()
            signed = self._wire.receive(most_bytes + self._inwards.size)
            frame = self._checked(signed, self._inwards)
        except BaseException:
            self._outwards = None
            raise
        finally:
            self._is_settled.set()
        return frame

    def close(self) -> None:
        self._outwards = None
        self._is_settled.set()
        self._wire.close()

    def _checked(self, signed: bytes, inwards: _Signer) -> bytes:
        """The frame without its digest. Raises PeerError for one that isn't the next."""
        digest, frame = signed[: inwards.size], signed[inwards.size :]
        is_first = inwards.number == 0
        if not hmac.compare_digest(digest, inwards.next_digest(frame)):
            if is_first:
                raise PeerError(f"Its key isn't ours: {SAME_KEY}.")
            raise PeerError("A frame was changed, repeated or left out on its way.")
        return frame

    def _greet(self) -> _Signer:
        """Exchanges greetings. Who connects speaks first, so that who listens can tell another version why not."""
        nonce = os.urandom(_NONCE_BYTES)
        if self._is_listener:
            theirs = self._wire.receive(HEAD_BYTES)
            try:
                greeted(theirs)
            except PeerError as error:
                with contextlib.suppress(PeerError):
                    self._wire.send(encode(Bye(sentence=str(error))))
                raise
            proof = self._key.digest("proof", theirs, nonce).hex() if self._key.is_set else ""
            ours = encode(Greeting(nonce=nonce.hex(), proof=proof))
            self._wire.send(ours)
            greetings = (theirs, ours)
        else:
            ours = encode(Greeting(nonce=nonce.hex()))
            self._wire.send(ours)
            theirs = self._wire.receive(HEAD_BYTES)
            self._check(greeted(theirs), ours)
            greetings = (ours, theirs)
        there, back = (_Signer.of(self._key, way, *greetings) for way in ("there", "back"))
        self._outwards, inwards = (back, there) if self._is_listener else (there, back)
        return inwards

    def _check(self, greeting: Greeting, ours: bytes) -> None:
        """Raises PeerError where who listens has another key."""
        if bool(greeting.proof) != self._key.is_set:
            says = "It has no key, and we have one" if self._key.is_set else "It has a key, and we have none"
            raise PeerError(f"{says}: {SAME_KEY}.")
        due = self._key.digest("proof", ours, _bytes(greeting.nonce))
        if self._key.is_set and not hmac.compare_digest(_bytes(greeting.proof), due):
            raise PeerError(f"Its key isn't ours: {SAME_KEY}.")


class _Signer:
    """Digests of the frames of one direction, in their order."""

    def __init__(self, key: bytes) -> None:
        self._key = key
        self.number = 0
        self.size = _DIGEST_BYTES if key else 0

    @classmethod
    def of(cls, key: SplitKey, way: str, *greetings: bytes) -> _Signer:
        return cls(key.digest(way, *greetings) if key.is_set else b"")

    def next_digest(self, frame: bytes) -> bytes:
        """Of the next frame. Empty without a key."""
        number = self.number
        self.number += 1
        if not self._key:
            return b""
        made = hmac.new(self._key, _NUMBER.pack(number), hashlib.sha256)
        made.update(frame)
        return made.digest()


def _bytes(text: str) -> bytes:
    try:
        return bytes.fromhex(text)
    except ValueError:
        return b""
