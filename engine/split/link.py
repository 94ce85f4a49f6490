"""A connection to another engine: messages go in and out without ever holding up a step.

One thread writes, one reads. Where nothing else is to be said a beat is, so that a peer that says nothing at all for
`silence_s` counts as lost, whether it died, hangs, or its host is gone. The beat comes from a thread of the link, so a
side whose engine may hang passes `may_beat`. A lost link has an `ending` and stays lost; whatever goes wrong with what
the peer sends, too, ends the link and nothing else.

What a peer can make us hold is bounded: no frame is read that is longer than its kind of side may send, nor a long one
before it said what it is; and as long as much is here that wasn't taken, nothing more is read.
"""

from __future__ import annotations

import contextlib
import queue
import threading
from collections import deque
from collections.abc import Callable
from time import monotonic
from typing import Protocol

from engine.errors import PeerError
from engine.split.messages import HEAD_BYTES, Bye, Hello, Message, decode, encode

SILENCE_S = 20.0
_UNTAKEN_FRAMES = 8  # of the longest that may come: as much may lie here before the peer has to wait
_BEATS = 4  # in the time after which a silent peer counts as lost
_BEAT = b""
_MOST_SENTENCE_CHARS = 1000


class Wire(Protocol):
    """A transport of frames between two processes. Both calls wait, and raise PeerError when the peer is gone or was
    silent for too long; `send` and `receive` are called by one thread each."""

    def send(self, frame: bytes) -> None: ...
    def receive(self, most_bytes: int) -> bytes:
        """Raises PeerError for a longer frame before room is made for it."""

    def close(self) -> None: ...


class Link:
    """`wake` is set when there is something to take. `name` says in sentences who the peer is. Once it said what it is,
    its frames may have `most_bytes`."""

    def __init__(
        self,
        wire: Wire,
        name: str,
        wake: threading.Event,
        *,
        most_bytes: int,
        silence_s: float = SILENCE_S,
        may_beat: Callable[[], bool] = lambda: True,
    ) -> None:
        self.name = name
        self.ending: str | None = None
        self._wire = wire
        self._wake = wake
        self._silence_s = silence_s
        self._ended_s = 0.0
        self._beat_s = silence_s / _BEATS
        self._may_beat = may_beat
        self._outbox: queue.SimpleQueue[Message | None] = queue.SimpleQueue()
        self._most_bytes = most_bytes
        self._inbox: deque[tuple[Message, int]] = deque()  # with the bytes of its frame
        self._untaken_bytes = 0
        self._has_room = threading.Condition()
        for work in (self._write, self._read):
            threading.Thread(target=work, name=f"link to {name}", daemon=True).start()

    def send(self, message: Message) -> None:
        """Doesn't wait. On a lost link it goes nowhere."""
        if self.ending is None:
            self._outbox.put(message)

    def take(self) -> list[Message]:
        """What came since the last call; the last of it may have come before the link was lost."""
        taken = []
        with self._has_room:
            while self._inbox:
                message, size = self._inbox.popleft()
                self._untaken_bytes -= size
                taken.append(message)
            self._has_room.notify()
        return taken

    @property
    def has_news(self) -> bool:
        """Whether there is something to take, or it was lost."""
        return bool(self._inbox) or self.ending is not None

    def close(self, sentence: str = "") -> None:
        """Says goodbye and ends the link."""
        self.send(Bye(sentence=sentence[:_MOST_SENTENCE_CHARS]))
        self._outbox.put(None)
        self._end(sentence or "It was closed.")

    def _write(self) -> None:
        try:
            while True:
                try:
                    message = self._outbox.get(timeout=self._beat_s)
                except queue.Empty:
                    if self._may_beat():
                        self._wire.send(_BEAT)
                    continue
                if message is None:
                    return
                self._wire.send(encode(message))
        except Exception as error:
            self._end(_sentence(error))

    def _read(self) -> None:
        most_bytes = HEAD_BYTES
        try:
            while True:
                frame = self._wire.receive(most_bytes)
                if self.ending is not None and monotonic() - self._ended_s > self._silence_s:
                    return  # it had time to read our goodbye
                if frame == _BEAT:
                    continue
                message = decode(frame)
                if isinstance(message, Bye):
                    self._end(message.sentence or f"{self.name} said goodbye.")
                    return
                if self.ending is not None:
                    continue
                if isinstance(message, Hello):
                    most_bytes = self._most_bytes
                self._put(message, len(frame))
        except Exception as error:
            self._end(_sentence(error))
        finally:
            self._outbox.put(None)
            with contextlib.suppress(Exception):
                self._wire.close()

    def _put(self, message: Message, size: int) -> None:
        """Into the inbox; then waits until there is room for more."""
        with self._has_room:
            self._inbox.append((message, size))
            self._untaken_bytes += size
            self._wake.set()
            most_bytes = _UNTAKEN_FRAMES * self._most_bytes
            self._has_room.wait_for(lambda: self._untaken_bytes <= most_bytes or self.ending is not None)

    def _end(self, sentence: str) -> None:
        with self._has_room:
            if self.ending is None:
                self._ended_s, self.ending = monotonic(), sentence
                self._wake.set()
                self._has_room.notify()


def _sentence(error: Exception) -> str:
    """Why a link ends. What isn't foreseen, as memory that a frame finds too little of, must not end a thread unseen:
    then its side would wait for ever."""
    if isinstance(error, PeerError):
        return str(error)
    return f"The connection failed: {type(error).__name__}: {error}".splitlines()[0]
