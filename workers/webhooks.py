"""Sends webhooks: notes what is new, and makes the attempts that are due.

A receiver has one sender at a time, in whichever process, and a sender one receiver: a slow one delays nobody else.
What a process was sending when it died is sent again by another when the lease is over.
"""

from __future__ import annotations

import random
import socket
import uuid
from functools import partial

import structlog

from batchsvc import failpoints
from batchsvc.batches.estimate import Habits
from batchsvc.batches.offpeak import Night
from batchsvc.clock import monotonic_s
from batchsvc.db.session import Database
from batchsvc.egress import Egress
from batchsvc.outbound import Outbound
from batchsvc.settings import Settings
from batchsvc.webhooks import delivery_queries, notices, service
from batchsvc.webhooks.delivery_queries import Claim
from workers.senders import Senders

_SENDERS = 8
_TURN_S = 20.0  # how long a sender stays with one receiver while others wait
_LEASE_S = 20.0  # beyond what one attempt may take
_FORGET_S = 600.0

log = structlog.get_logger(__name__)


class Courier(Senders[Claim]):
    """The senders of one control process."""

    def __init__(self, settings: Settings, db: Database) -> None:
        super().__init__("webhooks", _SENDERS)
        self._db = db
        self._night = Night.from_settings(settings)
        self._habits = Habits.from_settings(settings)
        self._outbound = Outbound(Egress.parse(settings.egress_allow), settings.webhook_timeout_s)
        self._lease_s = settings.webhook_timeout_s + _LEASE_S
        self._owner = f"{socket.gethostname()}:courier:{uuid.uuid4().hex}"
        self._next_forget_s = 0.0

    def _look(self) -> int:
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
        return self._num_due()

    def _num_due(self) -> int:
        with self._db.reading() as session:
            return delivery_queries.num_due(session)

    def _claim(self) -> Claim | None:
        if not self._num_due():
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
