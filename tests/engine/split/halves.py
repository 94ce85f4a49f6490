"""Both sides in one process, stepped in turns on one thread, so that a test says what happens when."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Sequence
from pathlib import Path

from engine.config import EngineConfig
from engine.engine import Engine
from engine.request import Completion, Request
from engine.split.decode import PATIENCE_S, DecodeSide, most_bytes
from engine.split.peers import Peers
from engine.split.prefill import PrefillSide
from engine.split.signed import NO_KEY, SplitKey
from engine.split.wires import listen

_numbers = itertools.count()
SILENCE_S = 5.0
MOST_TURNS = 20_000


def make_engine(model: Path, **changes: object) -> Engine:
    settings: dict[str, object] = {
        "weight_format": "int8",
        "num_blocks": 400,
        "threads": 1,
        "poison": True,
        "reproducible": True,
        "spec": "off",
        **changes,
    }
    return Engine(EngineConfig(model=str(model), **settings))  # ty: whatever a test changes


class Halves:
    """One decode side and any number of prefill sides. `addresses` may be changed under way."""

    def __init__(
        self,
        folder: Path,
        decode: Engine,
        prefills: Sequence[Engine],
        *,
        patience_s: float = PATIENCE_S,
        key: SplitKey = NO_KEY,
    ) -> None:
        self._folder = folder
        self._key = key
        self.prefills: list[PrefillSide] = []
        self.addresses: list[str] = []
        for engine in prefills:
            self.join(engine)
        wake = threading.Event()
        self.peers = Peers(
            lambda: list(self.addresses), wake, most_bytes=most_bytes(decode), key=key, silence_s=SILENCE_S
        )
        self.decode = DecodeSide(decode, self.peers, wake, patience_s=patience_s)

    def join(self, engine: Engine, *, step_tokens: int = 64, key: SplitKey | None = None) -> PrefillSide:
        listener = listen(f"shm://{self._folder}/{next(_numbers)}", silence_s=SILENCE_S)
        key = self._key if key is None else key
        side = PrefillSide(engine, listener, step_tokens=step_tokens, key=key, silence_s=SILENCE_S)
        self.prefills.append(side)
        self.addresses.append(listener.address)
        return side

    def leave(self, side: PrefillSide) -> None:
        """Its links break without a word, as when it is killed."""
        at = self.prefills.index(side)
        del self.prefills[at], self.addresses[at]
        side._closing.set()
        side._listener.close()
        for peer in side._peers:
            peer.link._wire.close()

    def turn(self) -> list[Completion]:
        for side in list(self.prefills):
            side.step()
        return self.decode.step().completions

    def run(self, requests: Sequence[Request]) -> dict[str, Completion]:
        for request in requests:
            self.decode.add(request)
        found: dict[str, Completion] = {}
        for _ in range(MOST_TURNS):
            for completion in self.turn():
                assert completion.request_id not in found, "a request ended twice"
                found[completion.request_id] = completion
            if not self.decode.has_work():
                return found
        raise AssertionError(f"{len(requests) - len(found)} requests never end")

    def close(self) -> None:
        self.decode.close()
        for side in self.prefills:
            side.close()
