"""The prefill engines that a decode engine knows: it connects to each of their addresses, again and again.

Connecting waits for the other side, so it has a thread of its own. An address that was refused, by us or by them, is
tried less often, and the reason is kept for whoever asks why nothing comes.
"""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Callable, Iterable
from time import monotonic

from engine.split.link import SILENCE_S, Link
from engine.split.signed import NO_KEY, SignedWire, SplitKey
from engine.split.wires import connect

_AGAIN_S = 0.5
_REFUSED_AGAIN_S = 2.0


class Peers:
    """`addresses` are asked for each time, so they may come and go. `most_bytes` is as of Link. Thread-safe."""

    def __init__(
        self,
        addresses: Callable[[], Iterable[str]],
        wake: threading.Event,
        *,
        most_bytes: int,
        key: SplitKey = NO_KEY,
        silence_s: float = SILENCE_S,
    ) -> None:
        self.key = key
        self._addresses = addresses
        self._wake = wake
        self._most_bytes = most_bytes
        self._silence_s = silence_s
        self._lock = threading.Lock()
        self._new: deque[Link] = deque()
        self._links: dict[str, Link] = {}
        self._reasons: dict[str, str] = {}
        self._not_before: dict[str, float] = {}
        self._stopped = threading.Event()
        threading.Thread(target=self._connect, name="split peers", daemon=True).start()

    @property
    def has_new(self) -> bool:
        return bool(self._new)

    def take_new(self) -> list[Link]:
        """Links that were made since the last call."""
        taken = []
        while self._new:
            taken.append(self._new.popleft())
        return taken

    def refused(self, link: Link, sentence: str) -> None:
        """Nothing can be done with who is there: it is asked again later."""
        with self._lock:
            self._reasons[link.name] = sentence
            self._not_before[link.name] = monotonic() + _REFUSED_AGAIN_S

    def reason(self) -> str | None:
        """Why the last one that failed did; None where none did."""
        with self._lock:
            return next((f"{name}: {reason}" for name, reason in self._reasons.items()), None)

    def close(self) -> None:
        self._stopped.set()

    def _connect(self) -> None:
        while not self._stopped.is_set():
            with contextlib.suppress(Exception):  # of the addresses: they are asked for again
                wanted = list(self._addresses())
                for address in self._due(wanted):
                    self._try(address)
            self._stopped.wait(_AGAIN_S)

    def _due(self, wanted: list[str]) -> list[str]:
        """Those without a link that may be tried now."""
        with self._lock:
            for known in (self._reasons, self._not_before):
                for name in known.keys() - set(wanted):
                    del known[name]
            due = [name for name in wanted if self._not_before.get(name, 0.0) <= monotonic()]
        return [name for name in due if name not in self._links or self._links[name].ending is not None]

    def _try(self, address: str) -> None:
        try:
            wire = connect(address, key=self.key, silence_s=self._silence_s)
            link = self._links[address] = Link(
                SignedWire(wire, self.key, is_listener=False, silence_s=self._silence_s),
                address,
                self._wake,
                most_bytes=self._most_bytes,
                silence_s=self._silence_s,
            )
        except Exception as error:  # whatever it is, this thread goes on: without it nobody is ever found
            with self._lock:
                self._reasons[address] = str(error) or type(error).__name__
            return
        with self._lock:
            self._reasons.pop(address, None)
        self._new.append(link)
        self._wake.set()
