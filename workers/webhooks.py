"""Sends webhooks: the reaper's tick wakes a thread that notes what is new and hands out what is due to senders.

A receiver has one sender at a time, in whichever process, and a sender one receiver: a slow one delays nobody else, and
nothing here delays a repair. What a process was sending when it died is sent again by another when the lease is over.
"""

from __future__ import annotations

import random
import socket
import threading
import uuid
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import structlog
from sqlalchemy.exc import DBAPIError

from batchsvc import failpoints, logs
from batchsvc.batches.estimate import Habits
from batchsvc.batches.offpeak import Night
from batchsvc.clock import monotonic_s
from batchsvc.db.session import Database
from batchsvc.egress import Egress
from batchsvc.errors import ServiceError
from batchsvc.outbound import Outbound
from batchsvc.settings import Settings
from batchsvc.webhooks import delivery_queries, notices, service
from batchsvc.webhooks.delivery_queries import Claim
from workers.thread import WorkThread

_SENDERS = 8
_TURN_S = 20.0  # how long a sender stays with one receiver while others wait
_LEASE_S = 20.0  # beyond what one attempt may take
_FORGET_S = 600.0

log = structlog.get_logger(__name__)


class Courier:
    """The senders of one control process. `wake` is for every tick; `send_due` does all of it here and now."""

    def __init__(self, settings: Settings, db: Database) -> None:
        self._db = db
        self._night = Night.from_settings(settings)
        self._habits = Habits.from_settings(settings)
        self._outbound = Outbound(Egress.parse(settings.egress_allow), settings.webhook_timeout_s)
        self._lease_s = settings.webhook_timeout_s + _LEASE_S
        self._owner = f"{socket.gethostname()}:courier:{uuid.uuid4().hex}"
        self._is_awake = threading.Event()
        self._stopped = threading.Event()
        self._busy = threading.Semaphore(_SENDERS)
        self._senders = ThreadPoolExecutor(_SENDERS, thread_name_prefix="webhook")
        self._next_forget_s = 0.0
        self._thread = WorkThread("courier", self._run, self._crashed)

    def start(self) -> None:
        self._thread.start()

    def wake(self) -> None:
        """Look for what is new and due. Returns at once."""
        self._is_awake.set()

    def stop(self) -> None:
        """End when the attempts that are being made have."""
        self._stopped.set()
        self._is_awake.set()
        self._thread.join()
        self._senders.shutdown()

    def note(self) -> None:
        """Put into the outbox what is new, and give what is in it to those who want it."""
        notices.note(self._db, self._night, self._habits)
        with self._db.reading() as session:
            has_new = delivery_queries.has_new(session)
        while has_new and self._db.run(delivery_queries.spread) and not self._stopped.is_set():
            pass
        if monotonic_s() >= self._next_forget_s:
            self._next_forget_s = monotonic_s() + _FORGET_S
            self._db.run(delivery_queries.give_up_old)
            self._db.run(delivery_queries.forget_old)

    def send_due(self) -> int:
        """Make all attempts that are due, one after the other. Returns how many."""
        self.note()
        made = 0
        while (claimed := self._claim()) is not None:
            made += self._serve(claimed)
        return made

    def _run(self) -> None:
        while True:
            self._is_awake.wait()
            self._is_awake.clear()
            if self._stopped.is_set():
                return
            try:
                self.note()
                with self._db.reading() as session:
                    due = delivery_queries.num_due(session)
            except (ServiceError, DBAPIError, OSError) as error:
                log.warning("webhooks.failed", **logs.where(error))
                continue
            for _ in range(min(due, _SENDERS)):
                if not self._busy.acquire(blocking=False):
                    break
                self._senders.submit(self._send)

    def _crashed(self, error: Exception) -> None:
        log.error("webhooks.crashed", **logs.where(error))
        self._thread = WorkThread("courier", self._run, self._crashed)
        if not self._stopped.is_set():
            self._thread.start()

    def _send(self) -> None:
        """Serve one receiver after the other until nothing is due."""
        try:
            while not self._stopped.is_set() and (claimed := self._claim()) is not None:
                self._serve(claimed)
        except Exception as error:  # what it held comes back by its lease
            log.warning("webhooks.failed", **logs.where(error))
        finally:
            self._busy.release()

    def _claim(self) -> Claim | None:
        with self._db.reading() as session:
            if not delivery_queries.num_due(session):
                return None
        return self._db.run(partial(delivery_queries.claim, owner=self._owner, lease_s=self._lease_s))

    def _serve(self, claimed: Claim) -> int:
        """Make the attempts that are due to a receiver, until one fails or its turn is over. Returns how many."""
        made, until_s = 0, monotonic_s() + _TURN_S
        while not self._stopped.is_set() and monotonic_s() < until_s:
            sending = self._db.run(partial(delivery_queries.next_due, claimed=claimed, lease_s=self._lease_s))
            if sending is None:
                break
            outcome = service.send(self._outbound, sending)
            made += 1
            failpoints.reach("webhook.sent")
            chance = random.random()  # noqa: S311  jitter
            state = self._db.run(
                partial(delivery_queries.record, claimed=claimed, sending=sending, outcome=outcome, chance=chance)
            )
            says = {"event": sending.event_id, "endpoint": claimed.endpoint_id, "status": outcome.status}
            log.info("webhook.sent", **{"webhook_" + name: value for name, value in says.items()}, state=state)
            if not outcome.is_delivered:
                break
        self._db.run(partial(delivery_queries.release, claimed=claimed))
        return made
