"""Tasks `batch.plan` and `quote.plan`: one window a run, so that a long input never holds a control worker for itself.

The work is in batchsvc/batches/planning.py and quote_planning.py. A run that leaves windows to plan sends the task
again; a duplicate, or a run that was overtaken, changes nothing. An input in a tenant's store is copied first, apart
from the planners (workers/importer.py). For a batch that runs already the same task rebuilds what was found damaged of
its plan (batchsvc/batches/repair.py).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import structlog
from sqlalchemy import Select

from batchsvc.batches import finalize_queries, plan_queries, quote_planning, quote_queries, unit_queries
from batchsvc.batches.offpeak import Night
from batchsvc.batches.planning import PlanProgress, plan_next_window
from batchsvc.batches.reading import PlanContext
from batchsvc.batches.repair import rebuild_next_window
from batchsvc.batches.traces import BatchTraces
from batchsvc.clock import now_ns
from batchsvc.db.session import Database, database_now_ms
from batchsvc.dispatch import Dispatcher
from workers.importer import Importer

log = structlog.get_logger(__name__)


class Planner:
    """Plans batches and quotes, a window a call."""

    def __init__(
        self, context: PlanContext, db: Database, dispatcher: Dispatcher, owner: str, importer: Importer
    ) -> None:
        self._context = replace(context, is_stopping=lambda: importer.is_stopped)
        self._importer = importer
        self._db = db
        self._dispatcher = dispatcher
        self._owner = owner
        self._traces = BatchTraces(db)
        self._night = Night.from_settings(context.settings)

    def plan(self, batch_id: str) -> PlanProgress:
        """Plan the next window of a batch, or rebuild a damaged one, then send what follows from it."""
        return self._apart(plan_queries.foreign_input(batch_id), partial(self._plan, batch_id))

    def quote(self, quote_id: str) -> PlanProgress:
        """Plan the next window of a quote."""
        return self._apart(quote_queries.foreign_input(quote_id), partial(self._quote, quote_id))

    def _apart(self, project_of: Select[str], work: Callable[[], PlanProgress]) -> PlanProgress:
        """Do this here, or on an importer's thread if its input isn't ours yet: then it is LOST here. Those that wait
        for such a thread are asked for at each tick of the reaper, and cost this one look."""
        with self._db.reading() as session:
            project_id = session.scalar(project_of)
        if project_id is None:
            return work()
        self._importer.take(project_id, work)
        return PlanProgress.LOST

    def _plan(self, batch_id: str) -> PlanProgress:
        if rebuild_next_window(self._context, batch_id, self._owner):
            self._start(batch_id)
            return PlanProgress.DONE
        began_ns = now_ns()
        progress = plan_next_window(self._context, batch_id, self._owner)
        self._traces.planned(batch_id, progress.name.lower(), began_ns=began_ns)
        log.info("batch.planned", batch=batch_id, progress=progress.name)
        follow: dict[PlanProgress, Callable[[str], None]] = {
            PlanProgress.AGAIN: self._dispatcher.plan,
            PlanProgress.DONE: self._start,
            PlanProgress.LOST: lambda _: None,
        }
        follow[progress](batch_id)
        return progress

    def _quote(self, quote_id: str) -> PlanProgress:
        progress = quote_planning.plan_next_window(self._context, quote_id, self._owner)
        log.info("quote.planned", quote=quote_id, progress=progress.name)
        if progress == PlanProgress.AGAIN:
            self._dispatcher.quote(quote_id)
        return progress

    def _start(self, batch_id: str) -> None:
        """A batch that is planned: tickets for its units, or, if it has none to run, the finalizer."""
        with self._db.reading() as session:
            is_due = finalize_queries.is_due(session, batch_id)
        if is_due:
            self._dispatcher.finalize(batch_id)
            return
        tickets = self._db.run(
            lambda session: unit_queries.take_first_tickets(
                session, batch_id, is_night=self._night.is_open(database_now_ms(session))
            )
        )
        for digest, count in tickets.items():
            self._dispatcher.ticket(digest, count)
