"""An audit as a whole: one batch, or all of them with the ledger, the balances and the invoices."""

from __future__ import annotations

from collections.abc import Callable

from batchsvc.batches.reconcile import Report
from batchsvc.batches.reconcile_batch import BatchAudit
from batchsvc.batches.reconcile_invoices import compare_invoices
from batchsvc.batches.reconcile_ledger import compare_books
from batchsvc.batches.reconcile_queries import Reader
from batchsvc.store.s3 import ObjectStore

_PAGE = 200


class Auditor:
    """Reads one deployment. Changes nothing; may run while everything else does."""

    def __init__(self, database_url: str, store: ObjectStore) -> None:
        self._reader = Reader(database_url)
        self._store = store

    def close(self) -> None:
        self._reader.close()

    def batch(self, batch_id: str, is_stopping: Callable[[], bool] = lambda: False) -> Report | None:
        """The audit of one batch; None if there is no such batch."""
        report = Report()
        found = BatchAudit(self._reader, self._store, report, batch_id, is_stopping).run()
        return report if found else None

    def everything(self) -> Report:
        """The audit of all there is."""
        report = Report()
        after = ""
        while True:
            with self._reader.snapshot() as now:
                page = now.rows("SELECT id FROM batches WHERE id > :after ORDER BY id LIMIT :page",
                                after=after, page=_PAGE)  # fmt: skip
            for row in page:
                BatchAudit(self._reader, self._store, report, row["id"]).run()
            if not page:
                break
            after = page[-1]["id"]
        compare_books(self._reader, report)
        compare_invoices(self._reader, report)
        return report
