"""Workers in halves: a prefill worker computes prompts, a decode worker does the rest and owns everything.

The lease of a unit stays with the decode worker. It claims the unit, has its prompts computed elsewhere, samples every
token, and writes the parts, as a unified worker does; only its engine is another one (engine/split/decode.py). A
prefill worker claims nothing, writes nothing but its own address, and holds nothing that can't be computed again. So
neither half of a hand-off is a state of a unit, and the fence knows one owner, as ever:

    the prefill worker is killed  its link ends; the decode worker asks another one for the same prompts. Where there is
                                  none for half a minute it computes them itself; the lease is renewed meanwhile, and
                                  nothing of the unit was anywhere else
    the prefill worker hangs      its links fall silent, and a guard ends it
    the decode worker is killed   its lease runs out; whoever claims the unit next has a higher epoch, and goes on from
                                  the parts and beginnings that were saved. The prefill worker drops what it had of it
    a decode worker was paused    its commits are fenced by epoch and lease, as those of any worker

A decode worker without a prefill worker claims nothing and takes no calls, so that both go to others, or wait; its note
says so. What it has it brings to its end.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

import structlog
from sqlalchemy.exc import SQLAlchemyError

from batchsvc.batches import prefill_queries
from batchsvc.clock import monotonic_s
from batchsvc.db.session import Database
from batchsvc.errors import UnavailableError
from batchsvc.settings import Settings
from engine.errors import PeerError
from workers.exits import WorkerExit

if TYPE_CHECKING:
    from engine.engine import Engine
    from engine.split.decode import DecodeSide
    from engine.split.prefill import PrefillSide
    from engine.split.signed import SplitKey

WAITS = "A decode worker has no prefill worker to go with: units wait until one serves this model."

_BEAT_S = 1.0
_SILENT_S = 6.0

log = structlog.get_logger(__name__)


def check_role(settings: Settings) -> None:
    """Raise UnavailableError for a half that has no blocks to pass on, or more than one model; and for one that other
    hosts could reach without a key."""
    if settings.role != "unified" and settings.models:
        raise UnavailableError(
            f"BATCHSVC_ROLE={settings.role} serves one model: leave BATCHSVC_MODELS out, or start a worker for each."
        )
    if settings.role != "unified" and settings.engine == "fake":
        raise UnavailableError(
            f"BATCHSVC_ROLE={settings.role} needs an engine with weights: the fake engine has no KV blocks to pass on."
        )
    if settings.role == "prefill":
        from engine.split.wires import check_reach

        try:
            check_reach(settings.split_listen, split_key(settings))
        except PeerError as error:
            raise UnavailableError(f"BATCHSVC_SPLIT_LISTEN: {error}") from error


class PrefillDirectory:
    """Where the prefill workers of a model are. While the database is away, where they were."""

    def __init__(self, db: Database, digest: str) -> None:
        self._db = db
        self._digest = digest
        self._known: list[str] = []

    def addresses(self) -> list[str]:
        """Those that are alive, as far as is known."""
        with contextlib.suppress(SQLAlchemyError), self._db.reading() as session:
            self._known = prefill_queries.addresses(session, self._digest, _SILENT_S)
        return list(self._known)


def split_key(settings: Settings) -> SplitKey:
    """What the halves share, to know each other."""
    from engine.split.signed import SplitKey

    return SplitKey((settings.split_key or "").encode())


def decode_side(engine: Engine, db: Database, settings: Settings, digest: str) -> DecodeSide:
    """The engine of a decode worker."""
    from engine.split.decode import DecodeSide, most_bytes
    from engine.split.peers import Peers

    wake = threading.Event()
    found = PrefillDirectory(db, digest)
    peers = Peers(found.addresses, wake, most_bytes=most_bytes(engine), key=split_key(settings))
    return DecodeSide(engine, peers, wake)


class Side(Protocol):
    """What is asked of the engine of a decode worker."""

    def is_ready(self) -> bool: ...
    def note(self) -> str | None: ...


class Waiting:
    """What a decode worker waits for, in a sentence that anybody may read; addresses and reasons go to the log."""

    def __init__(self, side: Side) -> None:
        self._side = side
        self._told: str | None = None

    def note(self) -> str | None:
        """None: it doesn't wait."""
        if self._side.is_ready():
            self._told = None
            return None
        reason = self._side.note()
        if reason is not None and reason != self._told:
            self._told = reason
            log.warning("worker.waits", why=reason)
        return WAITS


def prefill_side(engine: Engine, settings: Settings) -> PrefillSide:
    """The engine of a prefill worker, listening. Raises PeerError where it can't."""
    from engine.split.prefill import PrefillSide
    from engine.split.wires import listen

    key = split_key(settings)
    listener = listen(settings.split_listen, key=key)
    return PrefillSide(engine, listener, step_tokens=settings.step_tokens, key=key, hung_s=settings.hung_s)


class PrefillRun:
    """A prefill worker: serves decode workers until a signal."""

    def __init__(
        self,
        db: Database,
        side: PrefillSide,
        *,
        digest: str,
        owner: str,
        on_hang: Callable[[str], None] | None = None,
    ) -> None:
        self._on_hang = on_hang or _end_this_process
        self._moved_s, self._still_s = side.moved_s, 0.0
        self._db = db
        self._side = side
        self._digest = digest
        self._owner = owner
        self._stopping = threading.Event()

    def run(self) -> None:
        """Until `stop`, or a signal that asks a process to end. Nothing is to be drained: what it leaves unfinished
        is asked of another."""
        for name in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT):
            signal.signal(name, lambda *_: self.stop())
        beats = threading.Thread(target=self._beat, name="prefill beats", daemon=True)
        beats.start()
        log.info("prefill.ready", worker=self._owner, address=self._side.address, model=self._digest[:16])
        try:
            while not self._stopping.is_set():
                self._side.step()
        finally:
            self._stopping.set()
            beats.join()
            self._side.close()
            self._db.dispose()

    def stop(self) -> None:
        self._stopping.set()

    def look_for_a_hang(self, elapsed_s: float) -> None:
        """To be called often, with the time since the last call: ends the process when the engine has work and gets
        nowhere. Time in which this process didn't run at all doesn't count."""
        if self._side.moved_s != self._moved_s:
            self._moved_s, self._still_s = self._side.moved_s, 0.0
            return
        self._still_s += min(elapsed_s, _BEAT_S)
        if self._still_s >= self._side.hung_s:
            self._on_hang(f"The engine hangs: it computed nothing for {self._side.hung_s:g} s while it had prompts.")

    def _beat(self) -> None:
        seen_s = monotonic_s()
        while not self._stopping.is_set():
            now_s = monotonic_s()
            self.look_for_a_hang(now_s - seen_s)
            seen_s = now_s
            with contextlib.suppress(SQLAlchemyError):
                self._db.run(
                    lambda session: prefill_queries.beat(session, self._owner, self._digest, self._side.address)
                )
            self._stopping.wait(_BEAT_S)
        with contextlib.suppress(SQLAlchemyError):
            self._db.run(lambda session: prefill_queries.retire(session, self._owner))


def _end_this_process(sentence: str) -> None:
    """At once: its main thread hears no signal, and it holds nothing that anybody would miss."""
    log.error("worker.crashed", says=sentence)
    sys.stderr.write(sentence + "\n")
    sys.stderr.flush()
    os._exit(WorkerExit.FAILED)
