"""Test mode in a control process: an engine worker without weights for the lines of test keys, of all models.

It claims and writes as any worker does, only under test mode's digest (batchsvc/mode.py) and with the engine that does
what magic prompts ask. It begins once there is a project for tests: a deployment that has none runs nothing for it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

import structlog
from sqlalchemy.exc import SQLAlchemyError

from batchsvc import mode
from batchsvc.accounts import service as accounts
from batchsvc.batches import magic, magic_queries
from batchsvc.db.session import Database
from batchsvc.dispatch import CeleryDispatcher
from batchsvc.settings import Settings
from batchsvc.store.s3 import ObjectStore
from batchsvc.threads import WorkThread
from workers.magic_engine import MagicEngine
from workers.step import EngineRun

_LOOK_S = 1.0  # how soon a first test key has somebody to run its lines

log = structlog.get_logger(__name__)


class TestMode:
    """The worker of test mode, from its first need to the end of the process; one that failed is followed by another.

    `owner_of` gives each start an id of its own.
    """

    def __init__(self, settings: Settings, owner_of: Callable[[], str]) -> None:
        self._settings = settings
        self._owner_of = owner_of
        self._run: EngineRun | None = None
        self._trouble: str | None = None
        self._ended = threading.Event()
        self._failed = threading.Event()
        self._thread = WorkThread("test-mode", self._serve, self._crashed)

    def start(self) -> None:
        """Look for a project for tests from now on."""
        self._thread.start()

    def trouble(self) -> str | None:
        """Why lines of test keys aren't run, in a sentence; None: they are, or nobody has a test key."""
        return self._trouble

    def stop(self) -> None:
        """Give back what is held, and end."""
        self._ended.set()
        self._thread.join(self._settings.term_grace_s)
        if self._run is not None:
            for _ in range(2):  # the second one shortens the drain: nobody waits for a line that only sleeps
                self._run.signalled()
            self._run.drain()

    def _serve(self) -> None:
        db = Database(self._settings.database_url, pool_size=1)
        try:
            while not self._is_needed(db):
                if self._ended.wait(_LOOK_S):
                    return
        finally:
            db.dispose()
        while not self._ended.is_set():
            try:
                self._serve_once()
            except Exception as error:  # whatever it is, such as a database that is away: the next try may do better
                self._trouble = f"Test mode can't start ({type(error).__name__}): lines of test keys wait."
                log.warning("test_mode.not_started", error=type(error).__name__)
            if not self._ended.is_set():
                self._give_up()
                self._ended.wait(_LOOK_S)

    def _serve_once(self) -> None:
        """One worker, from its start until it fails or the process ends."""
        self._failed.clear()
        run = self._run = self._opened()
        run.start()
        self._trouble = None
        while not self._ended.wait(_LOOK_S) and not self._failed.is_set():
            pass
        if self._failed.is_set() and not self._ended.is_set():
            self._trouble = "The worker of test mode has failed: another one is about to start."
            log.error("test_mode.failed", worker=run.owner)

    def _give_up(self) -> None:
        """End what is left of a worker, however far it came."""
        run, self._run = self._run, None
        try:
            if run is not None:
                run.drain()
        except Exception as error:  # what it held comes back by its leases
            log.warning("test_mode.not_drained", error=type(error).__name__)

    def _is_needed(self, db: Database) -> bool:
        try:
            with db.reading() as session:
                return accounts.has_test_project(session)
        except SQLAlchemyError:  # it is asked again
            return False

    def _opened(self) -> EngineRun:
        settings = self._settings
        db = Database(settings.database_url)

        def expire(request_id: str) -> None:
            unit_id = request_id.partition(":")[0]
            db.run(lambda session: magic_queries.expire_soon(session, unit_id, magic.EXPIRES_IN_S))

        return EngineRun(
            settings,
            db,
            ObjectStore(settings),
            CeleryDispatcher(settings.redis_url),
            MagicEngine(on_expire=expire, max_running=settings.max_running),
            digest=mode.DIGEST,
            owner=self._owner_of(),
            on_failure=self._failed.set,
        )

    def _crashed(self, error: Exception) -> None:
        self._trouble = f"Test mode has ended ({type(error).__name__}): restart this process."
        log.error("test_mode.ended", error=type(error).__name__)
