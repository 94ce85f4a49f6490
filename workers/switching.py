"""Serves several models in turn: decides when to change over, and becomes the process that loads the other one.

1. A worker's *line-up* is what its settings name, and what operators have loaded and unloaded since.
2. Every few seconds the switcher looks what waits for each model of it and asks model_switch.py.
3. To change over, the process drains as on any signal (what hasn't begun is given back, what runs is saved), and then
   replaces itself by a new start of the same program (`execve`): all memory of the model is the system's again, and
   supervisors see one process that goes on. A *baton* in its environment says what it is to load.
4. If it can't load that, it goes back to the model that it had, and doesn't try again for a while.

A signal that ends the process ends it at any point of this: one that comes between drain and start at once, or, if
every thread keeps it off, when the new start listens.
What it doesn't do: hold two models, or move a call that somebody waits for: calls are answered before it changes over,
as long as the drain may take.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

import structlog
from sqlalchemy.exc import DBAPIError

from batchsvc.batches import model_switch, switch_queries, waiting, worker_queries
from batchsvc.batches.model_switch import Seat
from batchsvc.batches.worker_queries import Place
from batchsvc.clock import monotonic_s
from batchsvc.db.session import Database
from batchsvc.errors import UnavailableError
from batchsvc.threads import WorkThread
from engine.load.fetch import locate
from engine.load.meta import read_meta

BATON = "_BATCHSVC_BATON"
_REFUSED_S = 600.0  # a model that couldn't be loaded isn't tried again for so long
_ENDING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)

log = structlog.get_logger(__name__)


class OwnModel(NamedTuple):
    """A model that the settings of a worker name."""

    digest: str
    source: str  # what to load it by


@dataclass(frozen=True, slots=True, kw_only=True)
class Baton:
    """What a process that changes over leaves to its successor. Times are monotonic seconds, which outlive it.

    `before` is the id under which it was known, `refused` what couldn't be loaded: why, and until when it isn't tried.
    """

    own: tuple[OwnModel, ...]
    digest: str
    source: str
    back: OwnModel | None = None
    before: str | None = None
    began_s: float = 0.0
    refused: Mapping[str, tuple[str, float]] = field(default_factory=dict)

    def returned(self, sentence: str) -> Baton | None:
        """Whom to hand on to, if this one's model can't be loaded. None: there is nothing to go back to."""
        if self.back is None:
            return None
        refused = {**self.refused, self.digest: (sentence, monotonic_s() + _REFUSED_S)}
        return replace(  # what the next load takes is counted by itself
            self, digest=self.back.digest, source=self.back.source, back=None, began_s=monotonic_s(), refused=refused
        )


class NotLoadedError(UnavailableError):
    """A model can't be loaded, and the worker can go back to another one: `back` says to which."""

    def __init__(self, message: str, back: Baton) -> None:
        super().__init__(message)
        self.back = back


def taken() -> Baton | None:
    """The baton of this process, which no child of it inherits; None: nobody has handed one on."""
    text = os.environ.pop(BATON, None)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _ENDING)  # what came while nobody listened ends the process now
    if text is None:
        return None
    found: dict[str, Any] = json.loads(text)
    return Baton(
        **found
        | {
            "own": tuple(OwnModel(*one) for one in found["own"]),
            "back": None if found["back"] is None else OwnModel(*found["back"]),
            "refused": {digest: (says, until_s) for digest, (says, until_s) in found["refused"].items()},
        }
    )


def hand_on(baton: Baton, *, unless: Callable[[], bool] = lambda: False) -> None:
    """Become the process that loads this model. Returns only if `unless` says, at the last moment, that it must end.

    Another thread may take a signal that this one keeps off, and a handler of ours would never run again: from here on
    the system's own ends the process, which holds nothing any more. What came before, `unless` knows.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, _ENDING)
    for ending in _ENDING:
        signal.signal(ending, signal.SIG_DFL)
    if unless():
        return
    signal.setitimer(signal.ITIMER_REAL, 0)  # the drain's, which would outlive this program
    sys.stdout.flush()
    sys.stderr.flush()
    argv = [sys.executable, *sys.orig_argv[1:]]
    os.execve(argv[0], argv, os.environ | {BATON: json.dumps(asdict(baton))})  # noqa: S606  our own program again


def own_models(names: Sequence[str]) -> tuple[OwnModel, ...]:
    """What the settings name, each once. Raises ModelError for one that isn't there."""
    found: dict[str, OwnModel] = {}
    for name in names:
        one = OwnModel(read_meta(locate(name)).digest, name)
        found.setdefault(one.digest, one)
    return tuple(found.values())


class LineUp:
    """The models that a worker serves in turn, and what to load each by. Thread-safe: `look` replaces all of it."""

    def __init__(self, name: str, own: Sequence[OwnModel], refused: Mapping[str, tuple[str, float]]) -> None:
        self.name = name
        self.own = tuple(own)
        self.refused = dict(refused)
        self._sources = {one.digest: one.source for one in own}
        self._digests: tuple[str, ...] = tuple(one.digest for one in own)

    def look(self, db: Database) -> None:
        """See what operators have ordered. Raises DBAPIError."""
        with db.reading() as session:
            digests = switch_queries.wanted(session, [self.name], [one.digest for one in self.own])
            known = {model.digest: model.path for model in switch_queries.installed(session)}
        self._sources = known | {one.digest: one.source for one in self.own}
        self._digests = tuple(digest for digest in digests if digest in self._sources)

    def place(self) -> Place:
        """What heartbeats say of it."""
        return Place(name=self.name, models=self._digests)

    def digests(self) -> tuple[str, ...]:
        """All that it should serve and may try to."""
        now_s = monotonic_s()
        return tuple(one for one in self._digests if self.refused.get(one, ("", 0.0))[1] <= now_s)

    def source_of(self, digest: str) -> str:
        return self._sources[digest]

    def find(self, digest: str) -> OwnModel | None:
        """None for one that isn't installed any more, as when its name was given to other weights."""
        source = self._sources.get(digest)
        return None if source is None else OwnModel(digest, source)

    def other_than(self, digest: str) -> OwnModel | None:
        """What else to load where this one can't be; None: there is nothing."""
        others = [one for one in self.digests() if one != digest]
        return OwnModel(others[0], self._sources[others[0]]) if others else None

    def problems(self) -> list[str]:
        """Why models of it can't be served here."""
        now_s = monotonic_s()
        return [says for says, until_s in self.refused.values() if until_s > now_s]


def first_model(db: Database, line_up: LineUp, worker_id: str, *, is_night: bool, renew_s: float) -> OwnModel:
    """What a worker loads that serves nothing yet: what is most urgent, else the first of its line-up."""
    line_up.look(db)
    digests = line_up.digests()
    if len(digests) > 1:
        with db.reading() as session:
            since_ms = waiting.alive_since_ms(session, renew_s)
            view = switch_queries.look(session, worker_id, "", digests, is_night=is_night, since_ms=since_ms)
        choice = model_switch.next_model(Seat(digest=None), view.queues)
        if choice is not None:
            return OwnModel(choice.digest, line_up.source_of(choice.digest))
    digest = digests[0] if digests else line_up.own[0].digest
    return OwnModel(digest, line_up.source_of(digest))


class Announcer:
    """Says that a worker is alive while it loads its model, which may take minutes; its predecessor is forgotten."""

    def __init__(self, db: Database, worker_id: str, digest: str, place: Place, before: str | None, renew_s: float):
        self._db = db
        self._said = (worker_id, digest, place)
        self._before = before
        self._renew_s = renew_s
        self._stopped = threading.Event()
        self._thread = WorkThread("loading", self._run, lambda error: log.warning("loading.unsaid", error=str(error)))

    def __enter__(self) -> Announcer:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, _error: object, _trace: object) -> None:
        self._stopped.set()
        self._thread.join()
        if kind is not None:
            with contextlib.suppress(DBAPIError):
                self._db.run(lambda session: worker_queries.retire(session, self._said[0]))

    def _run(self) -> None:
        while not self._stopped.is_set():
            try:
                self._db.run(lambda session: worker_queries.loading(session, *self._said))
                if self._before is not None:
                    self._db.run(partial(worker_queries.retire, worker_id=self._before))
                    self._before = None
            except DBAPIError as error:  # the start itself finds out
                log.warning("loading.unsaid", error=type(error).__name__)
            self._stopped.wait(self._renew_s)


class Switcher:
    """Decides for one engine process. `change_over` is called once, on its thread, when `baton` says to what;
    `may_decide` says whether the process goes on and nobody has drained it."""

    def __init__(
        self,
        db: Database,
        line_up: LineUp,
        *,
        worker_id: str,
        digest: str,
        period_s: float,
        renew_s: float,
        is_night: Callable[[], bool],
        may_decide: Callable[[], bool],
        change_over: Callable[[], None],
        on_crash: Callable[[Exception], None],
    ) -> None:
        self._db = db
        self._line_up = line_up
        self._worker_id = worker_id
        self._digest = digest
        self._period_s = period_s
        self._renew_s = renew_s  # of all workers: one that missed several heartbeats serves nobody
        self._is_night = is_night
        self._may_decide = may_decide
        self._change_over = change_over
        self.baton: Baton | None = None
        self._ready_s = monotonic_s()
        self._dry_since_s: float | None = None
        self._stopped = threading.Event()
        self._thread = WorkThread("switch", self._run, on_crash)

    def start(self) -> None:
        self._ready_s = monotonic_s()
        self._thread.start()

    def stop(self, timeout_s: float) -> None:
        self._stopped.set()
        self._thread.join(timeout_s)

    def tick(self) -> bool:
        """Look and decide once. Whether it has changed over."""
        self._line_up.look(self._db)
        digests = self._line_up.digests()
        if not self._may_decide() or not digests or digests == (self._digest,):
            self._dry_since_s = None
            return False
        is_night = self._is_night()
        with self._db.reading() as session:
            since_ms = waiting.alive_since_ms(session, self._renew_s)
            view = switch_queries.look(
                session, self._worker_id, self._digest, digests, is_night=is_night, since_ms=since_ms
            )
        seat = self._seat(is_idle=view.is_idle)
        if model_switch.next_model(seat, view.queues) is None:
            return False
        back = self._line_up.find(self._digest)
        choice = self._db.run(
            lambda session: switch_queries.change_over(
                session,
                self._worker_id,
                seat,
                digests,
                is_night=is_night,
                since_ms=waiting.alive_since_ms(session, self._renew_s),
            )
        )
        if choice is None:
            return False
        log.info("worker.changes_over", worker=self._worker_id, model=choice.digest[:16], why=str(choice.why))
        self.baton = Baton(
            own=self._line_up.own,
            digest=choice.digest,
            source=self._line_up.source_of(choice.digest),
            back=back,
            before=self._worker_id,
            began_s=monotonic_s(),
            refused=self._line_up.refused,
        )
        self._change_over()
        return True

    def _seat(self, *, is_idle: bool) -> Seat:
        now_s = monotonic_s()
        if not is_idle:
            self._dry_since_s = None
        elif self._dry_since_s is None:
            self._dry_since_s = now_s
        dry_s = 0.0 if self._dry_since_s is None else now_s - self._dry_since_s
        return Seat(digest=self._digest, served_s=now_s - self._ready_s, dry_s=dry_s)

    def _run(self) -> None:
        while not self._stopped.wait(self._period_s):
            try:
                if self.tick():
                    return
            except DBAPIError as error:
                log.warning("switch.not_looked", error=type(error).__name__)
