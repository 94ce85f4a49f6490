"""SQL of wiping: takes the content of deleted things out of the rows that stay, and tells where their objects are.

    a file     its name and where it came from; of an input besides what quotes and batches quote of its lines
    an upload  its name
    a batch    its metadata, its name, what `errors` and `warnings` quote, where its results went
    answers    stored for repeated calls (accounts/idempotency.py) lose the same fields

Ids, counts, tokens, money, times, line numbers and error codes stay, and SHA-256 digests, which tell one content from
another without having it. Every function may be run again, and changes only what is deleted, or has ended.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import orjson
from sqlalchemy import exists, false, literal, select, update
from sqlalchemy.orm import Session

from batchsvc.accounts import idempotency
from batchsvc.batches import export_queries
from batchsvc.batches.lifecycle import TERMINAL
from batchsvc.batches.quote_queries import FAILED, QUEUED
from batchsvc.batches.tables import Batch, Export, Quote, Reconciliation
from batchsvc.db.insert import insert
from batchsvc.db.session import database_now_ms
from batchsvc.files.retention import Kind, date_of
from batchsvc.files.tables import File, Purge, Upload
from batchsvc.store import keys

_NAMES = {
    "filename": "",
    "name": None,
    "metadata": None,
    "source": None,
    "errors": None,
    "warnings": None,
    "output_s3": None,
}


def wipe(session: Session, kind: Kind, subject_id: str) -> list[str]:
    """Wipe something out of the rows. Returns the prefixes of its objects: what nobody refers to there has to go."""
    return {
        Kind.FILE: wipe_file,
        Kind.UPLOAD: wipe_upload,
        Kind.BATCH: wipe_batch,
        Kind.PLAN: wipe_plan,
    }[kind](session, subject_id)


def wipe_file(session: Session, file_id: str) -> list[str]:
    """A deleted file: an input with all that was made of it, or results with the parts that they were merged from."""
    row = session.get(File, file_id, with_for_update=True, populate_existing=True)
    if row is None or row.deleted_ms is None:
        return []
    row.filename, row.source_uri, row.source_etag, row.source_error = "", None, None, None
    for upload in session.scalars(select(Upload).where(Upload.file_id == file_id).order_by(Upload.id)):
        upload.filename = ""
        _wipe_answers(session, row.project_id, upload.id, upload.created_ms)
    _wipe_answers(session, row.project_id, file_id, row.created_ms)
    batch_id = keys.batch_of(row.s3_key)
    if batch_id is not None:
        _wipe_differences(session, [batch_id])
        return wipe_plan(session, batch_id)
    says = f"Deleted with the input on {date_of(row.deleted_ms)}."
    read_by = select(Batch.id).where(Batch.input_file_id == file_id, Batch.status.in_(TERMINAL)).order_by(Batch.id)
    batch_ids = session.scalars(read_by).all()
    for batch_id in batch_ids:
        _wipe_problems(session.get_one(Batch, batch_id, with_for_update=True, populate_existing=True), says)
    _wipe_differences(session, batch_ids)
    quote_ids = session.scalars(select(Quote.id).where(Quote.input_file_id == file_id).order_by(Quote.id)).all()
    for quote_id in quote_ids:
        _wipe_quote(session, quote_id, says)
    return [row.s3_key, *(keys.of_batch(owner) for owner in (*batch_ids, *quote_ids))]


def wipe_upload(session: Session, upload_id: str) -> list[str]:
    """The pieces of an upload that has ended; the name of one that became no file."""
    row = session.get(Upload, upload_id, with_for_update=True, populate_existing=True)
    if row is None:
        return []
    if row.file_id is None:
        row.filename = ""
        _wipe_answers(session, row.project_id, upload_id, row.created_ms)
    return [keys.of_upload(row.project_id, upload_id)]


def wipe_batch(session: Session, batch_id: str) -> list[str]:
    """A deleted batch, apart from its files, which are deleted by themselves."""
    row = session.get(Batch, batch_id, with_for_update=True, populate_existing=True)
    if row is None or row.deleted_ms is None:
        return []
    row.metadata_json = row.name = row.output_s3 = None
    _wipe_problems(row, f"Deleted with the batch on {date_of(row.deleted_ms)}.")
    _wipe_differences(session, [batch_id])
    _wipe_answers(session, row.project_id, batch_id, row.created_ms)
    export = session.get(Export, batch_id, with_for_update=True, populate_existing=True)
    if export is not None:
        export.uploads = []
        session.flush()
        end_export(session, batch_id)
        export.error = export_queries.WAS_DELETED if export.error else None
    return wipe_plan(session, batch_id)


def end_export(session: Session, batch_id: str) -> None:
    """Let nobody export the results of a batch that is being deleted. If uploads were begun in the tenant's store, an
    exporter takes it once more, to end them; it has time until the batch is wiped."""
    row = session.get(Export, batch_id, with_for_update=True, populate_existing=True)
    if row is not None and row.state == export_queries.PENDING:
        row.error = export_queries.WAS_DELETED
        row.epoch += 1
        row.owner = None
        row.lease_ms = row.due_ms = 0
        if not row.uploads:
            row.state, row.ended_ms = export_queries.FAILED, database_now_ms(session)


def wipe_plan(session: Session, batch_id: str) -> list[str]:
    """What only a running batch needs. Of one that runs nothing."""
    has_ended = session.scalar(select(Batch.id).where(Batch.id == batch_id, Batch.status.in_(TERMINAL)))
    return [] if has_ended is None else [keys.of_batch(batch_id)]


def adopt(session: Session) -> int:
    """Have wiped what was deleted by a process of an older version, which didn't ask for it. Returns how many.

    Reads all files and batches: not for every tick.
    """
    adopted = 0
    for table, kind in ((File, Kind.FILE), (Batch, Kind.BATCH)):
        is_known = exists().where(Purge.subject_id == table.id, Purge.kind == kind.value)
        found = select(table.id, literal(kind.value), table.deleted_ms, table.deleted_ms, literal(0), false()).where(
            table.deleted_ms.is_not(None), ~is_known
        )
        names = ["subject_id", "kind", "deleted_ms", "due_ms", "num_failures", "is_backlog"]
        made = insert(session, Purge).from_select(names, found).on_conflict_do_nothing().returning(Purge.subject_id)
        adopted += len(session.execute(made).all())
    return adopted


def _wipe_quote(session: Session, quote_id: str, says: str) -> None:
    row = session.get_one(Quote, quote_id, with_for_update=True, populate_existing=True)
    if row.status == QUEUED:  # nobody who plans it can write to it from now on
        row.status, row.ended_ms = FAILED, database_now_ms(session)
        row.plan_owner, row.plan_lease_ms, row.errors_total = None, 0, row.errors_total + 1
        row.errors = [{"code": "input_deleted", "line": None, "message": says, "param": None}]
    else:
        row.errors = _redacted(row.errors, says)
    row.problems, row.advice = _redacted(row.problems, says), None
    row.windows = [{**window, "key": "", "sha256": ""} for window in row.windows]


def _wipe_problems(row: Batch, says: str) -> None:
    row.errors, row.warnings = _redacted(row.errors, says), _redacted(row.warnings, says)


def _redacted(problems: Sequence[Any] | None, says: str) -> list[Any] | None:
    """Problems with their code and line; messages and params may quote what stands in the line."""
    if problems is None:
        return None
    return [{"code": one.get("code"), "line": one.get("line"), "message": says, "param": None} for one in problems]


def _wipe_differences(session: Session, batch_ids: Collection[str]) -> None:
    """What the audit of a batch said of its lines."""
    session.execute(update(Reconciliation).where(Reconciliation.batch_id.in_(batch_ids)).values(first=None))


def _wipe_answers(session: Session, project_id: str, object_id: str, made_ms: int) -> None:
    """Take the user's words about an object out of the answers that repeated calls get."""

    def wiped(body: str) -> str:
        return orjson.dumps(_without_words(orjson.loads(body), object_id)).decode()

    idempotency.rewrite_answers(session, project_id, object_id, made_ms, wiped)


def _without_words(value: Any, object_id: str) -> Any:
    if isinstance(value, list):
        return [_without_words(one, object_id) for one in value]
    if not isinstance(value, dict):
        return value
    found = {name: _without_words(one, object_id) for name, one in value.items()}
    if found.get("id") != object_id:
        return found
    return {name: _NAMES.get(name, one) for name, one in found.items()}
