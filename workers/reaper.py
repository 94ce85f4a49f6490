"""The reaper: a tick in every control process that repairs what was forgotten. There is no leader and no beat.

Each step is a short transaction that is right to repeat and right to run in several processes at once:

    leases      units whose worker went silent are claimable again, or split when they seem to be why
    poison      lines that are why get their error line
    starts      each batch knows when it must start to end in time
    deadlines   batches whose time was over while they were planned; the others are finalized when due
    plans       batches that nobody plans, or rebuilds what is damaged of, get their task again; what was planned of
                cancelled ones is forgotten
    quotes      quotes that nobody plans get their task again, old ones are forgotten
    finalizers  batches that are done, stopped or left by a dead finalizer get theirs
    quotas      batches that waited for quota start when there is room
    budgets     and so do those that waited for money
    tickets     a model's queue is as long as it has claimable units
    senders     the threads of webhooks and exports are woken, which send what is due
    money       now and then a batch that has ended is added up again, by code of its own
    leftovers   dead workers, stored answers, files past their life
    sweeper     the thread is woken that deletes in the store, and what should have been wiped by now is told of

If Redis doesn't answer, or takes no messages, planning and finalizing are done here, one after the other: slower, but
done.
"""

from __future__ import annotations

import socket
import uuid
from collections import Counter
from collections.abc import Callable, Iterable
from functools import partial

import structlog
from sqlalchemy.exc import DBAPIError, OperationalError
from sqlalchemy.orm import Session

from batchsvc import counters, failpoints, logs
from batchsvc.accounts import idempotency
from batchsvc.batches import (
    budget_queries,
    finalize_queries,
    garbage_queries,
    lifecycle,
    plan_queries,
    queries,
    quota_queries,
    quote_queries,
    reaper_queries,
    reconcile_sample_queries,
    repair_queries,
    tally_queries,
    unit_queries,
    worker_queries,
)
from batchsvc.batches.offpeak import Night
from batchsvc.batches.reconcile_run import Auditor
from batchsvc.batches.traces import BatchTraces
from batchsvc.clock import monotonic_s
from batchsvc.db.session import Database, database_now_ms
from batchsvc.dispatch import CONTROL_QUEUE, Dispatcher, queue_of
from batchsvc.errors import ServiceError, UnavailableError
from batchsvc.files import service as files
from batchsvc.files import upload_service as uploads
from batchsvc.settings import Settings
from batchsvc.store.s3 import ObjectStore
from batchsvc.threads import LastingThread
from workers import poison
from workers.sweeper import Sweeper

_TICKETS_AT_ONCE = 1_000
_DELETE_AT_ONCE = 500
_POISON_AT_ONCE = 8
_HINTS_IN_VAIN = 6  # messages about a batch that changed nothing: then they get lost, and it is done here
_LEAST_WAIT_S = 0.05
_COMPLETING_S = 600.0  # parts of an upload whose time is over may just be put together
_AUDIT_LEAST_S = 3_600.0
_DIFFERENCES_LOGGED = 10
_DEAD_LEASES = 10  # leases of silence after which a worker's row is forgotten

log = structlog.get_logger(__name__)


class Reaper:
    """Ticks every `reaper_s` seconds. `plan`, `finalize` and `quote` do a next step here and now."""

    def __init__(
        self,
        settings: Settings,
        db: Database,
        store: ObjectStore,
        dispatcher: Dispatcher,
        *,
        plan: Callable[[str], object],
        finalize: Callable[[str], object],
        quote: Callable[[str], object],
        wake_senders: Iterable[Callable[[], None]] = (),
    ) -> None:
        self._settings = settings
        self._db = db
        self._store = store
        self._dispatcher = dispatcher
        self._plan = plan
        self._finalize = finalize
        self._quote = quote
        self._wake_senders = tuple(wake_senders)
        self._night = Night.from_settings(settings)
        self._traces = BatchTraces(db)
        self._condemn = poison.Condemner(db, store).condemn
        self._owner = f"{socket.gethostname()}:reaper:{uuid.uuid4().hex}"
        self._next_sample_s = monotonic_s() + settings.reconcile_s
        self._unsure_until_s = 0.0
        self.ticked_s = monotonic_s()  # when its last tick ended, or it was made
        self._plan_hints: Counter[str] = Counter()
        self._finalize_hints: Counter[str] = Counter()
        self._quote_hints: Counter[str] = Counter()
        self._thread = LastingThread("reaper", self._turn)
        self._stopped = self._thread.stopped
        self._sweeper = Sweeper(settings, db, store)
        self._num_overdue = 0

    def start(self) -> None:
        self._sweeper.start()
        self._thread.start()

    def stop(self) -> None:
        self._thread.stop()
        self._sweeper.stop()

    def tick(self) -> None:
        """All repairs once. A step that fails is logged, and the others still run."""
        steps = (
            self._leases,
            self._poison,
            self._latest_starts,
            self._deadlines,
            self._cancelled_plans,
            self._plans,
            self._quotes,
            self._finalizers,
            self._quotas,
            self._budgets,
            self._tickets,
            self._senders,
            self._answers,
            self._workers,
            self._files,
            self._uploads,
            self._purges,
            self._reconcile_now_and_then,
            self._tally,
        )
        failpoints.reach("reaper.ticked")
        for step in steps:
            if self._stopped.is_set():
                return
            try:
                step()
            except (ServiceError, DBAPIError, OSError) as error:
                counters.REAPER_STEP_FAILURES.inc()
                log.warning("reaper.failed", step=step.__name__.strip("_"), **logs.where(error))

    def sweep(self) -> None:
        """What the sweeper does when it is woken, here and now."""
        self._sweeper.sweep()

    def audit(self) -> int:
        """Delete old objects that nobody refers to; see garbage.py."""
        return self._sweeper.audit()

    def reconcile(self, period_s: float = 0) -> None:
        """Add up a batch that ended lately, if for `period_s` nobody has done so."""
        with self._db.reading() as session:
            batch_id = reconcile_sample_queries.next_batch(session, period_s)
        if batch_id is None:
            return
        auditor = Auditor(self._settings.database_url, self._store)
        try:
            report = auditor.batch(batch_id, self._stopped.is_set)
        finally:
            auditor.close()
        if report is None or self._stopped.is_set():
            return
        for difference in report.differences[:_DIFFERENCES_LOGGED]:
            log.error("batch.differs", batch=batch_id, difference=str(difference), of=report.num_differences)
        self._db.run(lambda session: reconcile_sample_queries.note(session, batch_id, report))

    def _turn(self) -> None:
        if not self._stopped.wait(self._wait_s()):
            self.tick()

    def _wait_s(self) -> float:
        """Until the next tick: sooner, if a batch has to be sealed before."""
        period_s = self._settings.reaper_s
        try:
            with self._db.reading() as session:
                seal_ms = finalize_queries.next_seal_ms(session)
        except DBAPIError:
            return period_s
        return period_s if seal_ms is None else max(_LEAST_WAIT_S, min(period_s, seal_ms / 1000))

    def _leases(self) -> None:
        """When the database was away it was so for the workers too: they get a lease's time to say that they live."""
        try:
            if monotonic_s() < self._unsure_until_s:
                with self._db.reading() as session:
                    database_now_ms(session)
                return
            freed = self._db.run(_free_expired)
        except OperationalError:
            self._unsure_until_s = monotonic_s() + self._settings.lease_s
            raise
        if freed:
            log.warning("unit.freed", units=freed)

    def _poison(self) -> None:
        for unit in self._db.run(
            lambda session: unit_queries.claim_poison(session, self._owner, self._settings.lease_s, _POISON_AT_ONCE)
        ):
            self._condemn(unit)

    def _latest_starts(self) -> None:
        self._db.run(reaper_queries.keep_latest_starts)

    def _deadlines(self) -> None:
        for batch_id in self._db.run(_expire_unplanned):
            log.info("batch.expired", batch=batch_id)
            self._traces.ended(batch_id)

    def _cancelled_plans(self) -> None:
        with self._db.reading() as session:
            cancelled = reaper_queries.cancelled_plans(session)
        for batch_id in cancelled:
            self._db.run(partial(plan_queries.discard_unstarted, batch_id=batch_id))
            log.info("plan.discarded", batch=batch_id)
            self._traces.ended(batch_id)

    def _plans(self) -> None:
        with self._db.reading() as session:
            due = reaper_queries.plans_due(session) + repair_queries.due(session)
        self._hint(due, self._dispatcher.plan, self._plan, self._plan_hints)

    def _quotes(self) -> None:
        with self._db.reading() as session:
            due = quote_queries.due(session)
        self._hint(due, self._dispatcher.quote, self._quote, self._quote_hints)
        self._db.run(quote_queries.forget_old)

    def _finalizers(self) -> None:
        with self._db.reading() as session:
            due = finalize_queries.due(session)
        self._hint(due, self._dispatcher.finalize, self._finalize, self._finalize_hints)

    def _hint(
        self, batch_ids: list[str], send: Callable[[str], None], do: Callable[[str], object], hints: Counter[str]
    ) -> None:
        for batch_id in hints.keys() - set(batch_ids):
            del hints[batch_id]
        if not batch_ids:
            return
        waiting = self._dispatcher.waiting(CONTROL_QUEUE)
        if waiting is not None and waiting >= len(batch_ids):
            return  # the tasks are on their way, the control workers are behind
        for batch_id in batch_ids:
            if self._stopped.is_set():
                return
            if waiting is None or hints[batch_id] >= _HINTS_IN_VAIN:
                do(batch_id)
            else:
                send(batch_id)
                hints[batch_id] += 1

    def _quotas(self) -> None:
        with self._db.reading() as session:
            projects = quota_queries.projects_waiting(session)
        for project_id in projects:
            most = self._settings.quota_tokens
            for batch_id in self._db.run(partial(quota_queries.admit, project_id=project_id, default_tokens=most)):
                log.info("batch.admitted", batch=batch_id)

    def _budgets(self) -> None:
        with self._db.reading() as session:
            waiting = budget_queries.waiting(session)
        for batch_ids in waiting.values():
            for batch_id in batch_ids:  # the oldest first, and none passes one that still waits
                if not self._db.run(partial(budget_queries.admit, batch_id=batch_id)):
                    break
                log.info("batch.admitted", batch=batch_id)

    def _tickets(self) -> None:
        with self._db.reading() as session:
            is_night = self._night.is_open(database_now_ms(session))
            wanted = unit_queries.scaling(session, is_night)
        for digest, backlog in wanted.items():
            waiting = self._dispatcher.waiting(queue_of(digest))
            if waiting is not None and waiting < backlog.claimable:
                missing = min(backlog.claimable - waiting, _TICKETS_AT_ONCE)
                self._send_tickets(digest, missing, is_night=is_night)

    def _send_tickets(self, digest: str, missing: int, *, is_night: bool) -> None:
        quiet_s = self._settings.reaper_s
        due = self._db.run(
            lambda session: unit_queries.take_tickets_due(session, digest, missing, quiet_s, is_night=is_night)
        )
        if due:
            log.info("ticket.sent_again", model=digest[:16], tickets=due)
            self._dispatcher.ticket(digest, due)

    def _senders(self) -> None:
        for wake in self._wake_senders:
            wake()

    def _answers(self) -> None:
        self._db.run(idempotency.forget_old)

    def _workers(self) -> None:
        silent_s = self._settings.lease_s * _DEAD_LEASES
        self._db.run(lambda session: worker_queries.forget_dead(session, silent_s))

    def _files(self) -> None:
        self._db.run(
            lambda session: files.expire(
                session,
                is_read=queries.is_read(lifecycle.TERMINAL),
                live_batch_of=lambda inner, file_id: queries.live_batch_of(inner, file_id, lifecycle.TERMINAL),
                discard=lambda inner, key: garbage_queries.discard(inner, [key]),
            )
        )

    def _uploads(self) -> None:
        self._db.run(
            lambda session: uploads.expire(
                session, discard=lambda inner, key: garbage_queries.discard(inner, [key], grace_s=_COMPLETING_S)
            )
        )

    def _purges(self) -> None:
        self._sweeper.wake()
        if (overdue := self._sweeper.num_overdue()) != self._num_overdue:
            self._num_overdue = overdue
            log.error("purges.overdue", purges=overdue)
        if overdue:  # tick after tick, so that whoever watches the steps of the reaper is told
            raise UnavailableError(f"{overdue} deletions should have been wiped by now.", code="purges_overdue")

    def _tally(self) -> None:
        """Last: a tick that got to its end is what an operator wants to hear of."""
        self._db.run(lambda session: tally_queries.add(session, "reaper_ticks"))
        self.ticked_s = monotonic_s()

    def _reconcile_now_and_then(self) -> None:
        period_s = self._settings.reconcile_s
        if period_s and monotonic_s() >= self._next_sample_s:
            self._next_sample_s = monotonic_s() + period_s
            self.reconcile(period_s)


def _free_expired(session: Session) -> int:
    freed = unit_queries.free_expired(session)
    if freed:
        tally_queries.add(session, "leases_lost", freed)
    return freed


def _expire_unplanned(session: Session) -> list[str]:
    expired = reaper_queries.expire_unplanned(session)
    for batch_id in expired:
        plan_queries.discard_unstarted(session, batch_id)
    return expired
