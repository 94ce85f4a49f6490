"""Poison: the last line of a unit that ended its engine again and again gets an error line instead of another run.

It goes the way of every result: a part under a lease and an epoch of its own, then the fenced commit. So counts, bill
and merging need to know nothing of it.
"""

from __future__ import annotations

import hashlib

import structlog
from sqlalchemy.orm import Session

from batchsvc.batches import poison_queries, tally_queries, unit_file, unit_queries
from batchsvc.batches.unit_queries import ClaimedUnit, NewPart
from batchsvc.db.session import Database
from batchsvc.errors import ServiceError
from batchsvc.store.s3 import ObjectStore
from workers.objects import store_part
from workers.translate import open_rows, to_errors

CODE = "poison"
_SAYS = "The engine process ended twice while it ran this request alone, so it was not run again."
_AGAIN_S = 30.0

log = structlog.get_logger(__name__)


class Condemner:
    """Writes the error lines of units that `unit_queries.claim_poison` has leased."""

    def __init__(self, db: Database, store: ObjectStore) -> None:
        self._db = db
        self._store = store

    def condemn(self, unit: ClaimedUnit) -> bool:
        """End what the unit lacks as error lines. False: the unit is lost, or can't be read now and is given back."""
        try:
            part = self._stored(unit)
        except (ServiceError, ValueError, OSError) as error:
            log.warning("poison.not_read", unit=unit.id, key=unit.s3_key, error=type(error).__name__)
            self._db.run(lambda session: unit_queries.release(session, unit.id, unit.epoch, delay_s=_AGAIN_S))
            return False

        def count(session: Session) -> bool:
            if not unit_queries.commit_part(session, unit.id, unit.epoch, part):
                return False
            poison_queries.note_poison(session, unit.batch_id, part.id)
            tally_queries.add(session, "lines_quarantined", part.lines_err)
            return True

        is_counted = self._db.run(count)
        log.warning("line.poison", unit=unit.id, batch=unit.batch_id, lines=part.lines_err, counted=is_counted)
        return is_counted

    def _stored(self, unit: ClaimedUnit) -> NewPart:
        data = self._store.get(unit.s3_key)
        if hashlib.sha256(data).hexdigest() != unit.sha256:
            raise ValueError(f"The object {unit.s3_key} isn't what was planned.")
        lines = [
            line
            for row in open_rows(unit, unit_file.read(data))
            for line in to_errors(unit, row, code=CODE, message=_SAYS, status=500)
        ]
        return store_part(self._store, unit, lines)
