"""Audits one batch: its columns, parts, usage rows, hours, postings and files, each against the others.

Sums are taken of one moment, so a batch may run meanwhile; rows of parts come in pages, objects line by line, so that
a million lines take no more memory than a thousand.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from typing import Any

import zstandard

from batchsvc.batches.reconcile import (
    NUMBERS,
    LineNumbers,
    Prices,
    Report,
    Sums,
    add_output_line,
    add_part_line,
    lines,
)
from batchsvc.batches.reconcile_ledger import compare_ledger, revenue_of
from batchsvc.batches.reconcile_queries import Reader, Snapshot, decoded
from batchsvc.errors import NotFoundError
from batchsvc.store.s3 import ObjectStore

_ENDED = ("completed", "failed", "expired", "cancelled")
_PAGE = 500
_KINDS = ("input", "cached_input", "output")
_COLUMNS = ("completed", "failed", *NUMBERS[2:])  # of a batch, in the order of NUMBERS
_PART_COLUMNS = ("lines_ok", "lines_err", *NUMBERS[2:])  # of a part
_USAGE = ("requests", "input_tokens", "cached_tokens", "output_tokens", "cost_nanos")
_USAGE_OF_PART = ("lines_ok", "input_tokens", "cached_tokens", "output_tokens", "cost_nanos")
_USAGE_KEYS = ("project_id", "api_key_id", "model", "tier", "endpoint", "price_version")

_BATCH = "SELECT * FROM batches WHERE id = :batch"
_PART_SUMS = (
    "SELECT COALESCE(SUM(over_budget), 0) AS over_budget, "  # noqa: S608  names of ours
    + ", ".join(f"COALESCE(SUM({name}), 0) AS {name}" for name in _PART_COLUMNS)
    + " FROM parts WHERE batch_id = :batch AND NOT is_void"
)
_USAGE_SUMS = (
    "SELECT COUNT(*) AS num, "  # noqa: S608  names of ours
    + ", ".join(f"COALESCE(SUM({name}), 0) AS {name}" for name in _USAGE)
    + " FROM usage WHERE batch_id = :batch"
)
_STRAY_USAGE = (
    "SELECT u.part_id, u.cost_nanos FROM usage u WHERE u.batch_id = :batch AND NOT EXISTS (SELECT 1 FROM parts p"
    " WHERE p.batch_id = u.batch_id AND p.unit_id IS NOT NULL AND p.id ="
    " CASE WHEN u.part_id LIKE 'void:%' THEN substr(u.part_id, 6) ELSE u.part_id END) LIMIT 1000"
)
_HOURS = (
    f"SELECT created_ms / 3600000 * 3600000 AS hour_ms, {', '.join(_USAGE_KEYS)}, "  # noqa: S608  names of ours
    + ", ".join(f"SUM({name}) AS {name}" for name in _USAGE)
    + f" FROM usage WHERE batch_id = :batch GROUP BY created_ms / 3600000 * 3600000, {', '.join(_USAGE_KEYS)}"
)
_STORED_HOURS = "SELECT * FROM usage_hours WHERE batch_id = :batch"
_PRICES = (
    "SELECT model, tier, kind, nanos_per_mtok FROM prices"
    " WHERE version = :version AND model IN (:model, 'default') AND tier IN (:tier, 'standard')"
)
_PARTS = (
    "SELECT p.id, p.unit_id, p.is_void, p.s3_key, p.sha256, p.bitmap, p.created_ms, u.model_id, "  # noqa: S608  ours
    + ", ".join(f"p.{name}" for name in _PART_COLUMNS)
    + " FROM parts p LEFT JOIN units u ON u.id = p.unit_id"
    + " WHERE p.batch_id = :batch AND p.id > :after ORDER BY p.id LIMIT :page"
)
_PART_USAGE = "SELECT * FROM usage WHERE part_id IN :ids"
_PART_POSTINGS = (
    "SELECT t.key, t.price_version, t.created_ms, e.account, e.amount_nanos FROM ledger_transactions t"
    " JOIN ledger_entries e ON e.transaction_id = t.id WHERE t.key IN :ids"
)
_FILE = "SELECT * FROM files WHERE id = :file"


class BatchAudit:
    """The audit of one batch. `is_stopping` ends it early."""

    def __init__(
        self,
        reader: Reader,
        store: ObjectStore,
        report: Report,
        batch_id: str,
        is_stopping: Callable[[], bool] = lambda: False,
    ) -> None:
        self._reader = reader
        self._store = store
        self._report = report
        self._id = batch_id
        self._is_stopping = is_stopping
        self._batch: dict[str, Any] = {}
        self._prices: Prices | None = None
        self._seen = LineNumbers()
        self._num_gone = 0
        self._num_void = 0

    def run(self) -> bool:
        """Adds everything up. False: there is no such batch."""
        with self._reader.snapshot() as now:
            found = now.one(_BATCH, batch=self._id)
            if found is None:
                return False
            self._batch = found
            self._report.batches += 1
            self._compare_rates(now)
            self._compare_sums(now)
            self._compare_hours(now)
            compare_ledger(now, self._report, found, is_ended=found["status"] in _ENDED)
        self._read_parts()
        self._read_files()
        if self._num_void:
            self._report.note(f"{self._id}: {self._num_void} damaged parts were taken back, and count nowhere.")
        if self._num_gone:
            self._report.note(f"{self._id}: objects of {self._num_gone} parts were cleared away since it ended.")
        return True

    # ---- rows

    def _compare_rates(self, now: Snapshot) -> None:
        """The pinned rates against the price book, which nobody can change."""
        batch = self._batch
        by_line, pinned = decoded(batch["models"]), decoded(batch["rates"])
        if by_line is not None:
            each = {name: self._compared_rates(now, name, pin["rates"]) for name, pin in by_line.items()}
            self._prices = Prices(own={}, standard={}, by_model=each)
        elif pinned is not None:
            self._prices = self._compared_rates(now, batch["model_id"], pinned)

    def _compared_rates(self, now: Snapshot, model: str, pinned: dict[str, Any]) -> Prices:
        """The rates of a model, having compared them with the price book."""
        batch, prices = self._batch, Prices(own=pinned["tier"], standard=pinned["standard"])
        book: dict[tuple[str, str], dict[str, int]] = {}
        values = {"version": batch["price_version"], "model": model, "tier": batch["tier"]}
        for row in now.rows(_PRICES, **values):
            book.setdefault((row["model"], row["tier"]), {})[row["kind"]] = row["nanos_per_mtok"]
        for tier, rates in ((batch["tier"], prices.own), ("standard", prices.standard)):
            own = book.get((model, tier), {})
            listed = own if len(own) == len(_KINDS) else book.get(("default", tier), {})
            for kind in _KINDS:
                self._report.compare(f"{self._id} pinned rates", f"{tier} {kind}", rates[kind], listed.get(kind))
        return prices

    def _compare_sums(self, now: Snapshot) -> None:
        """The columns of the batch, and its usage, against its parts."""
        batch, report = self._batch, self._report
        parts = now.one(_PART_SUMS, batch=self._id) or {}
        usage = now.one(_USAGE_SUMS, batch=self._id) or {}
        has_started = batch["in_progress_ms"] is not None
        is_ended = batch["status"] in _ENDED
        for column, part_column in zip(_COLUMNS, _PART_COLUMNS, strict=True):
            added = int(parts[part_column])
            if column == "failed":
                if not has_started:
                    continue  # rejected lines count from the start on
                never_ran = batch["failed"] - added if is_ended else 0
                if never_ran > 0:
                    report.note(f"{self._id}: {never_ran} lines never ran, and cost nothing.")
                    added += never_ran  # its error file tells whether that is so
            report.compare(f"{self._id} batch", column, batch[column], added)
        report.compare(f"{self._id} batch", "over_budget", batch["over_budget"], int(parts["over_budget"]))
        if has_started and is_ended:
            report.compare(f"{self._id} batch", "total", batch["total"], batch["completed"] + batch["failed"])
        for name, part_column in zip(_USAGE, _USAGE_OF_PART, strict=True):
            report.compare(f"{self._id} usage", name, int(usage[name]), int(parts[part_column]))
        for row in now.rows(_STRAY_USAGE, batch=self._id):
            report.compare(
                f"{self._id} usage row {row['part_id']} without a part", "cost_nanos", row["cost_nanos"], None
            )

    def _compare_hours(self, now: Snapshot) -> None:
        stored = {(row["hour_ms"], row["model"]): row for row in now.rows(_STORED_HOURS, batch=self._id)}
        for row in now.rows(_HOURS, batch=self._id):
            place = f"{self._id} usage_hours {row['hour_ms']}"
            kept = stored.pop((row["hour_ms"], row["model"]), {})
            for name in (*_USAGE, *_USAGE_KEYS):
                added = int(row[name]) if name in _USAGE else row[name]
                self._report.compare(place, name, kept.get(name), added)
        for (hour_ms, _), row in stored.items():
            self._report.compare(f"{self._id} usage_hours {hour_ms}", "cost_nanos", row["cost_nanos"], None)

    # ---- parts

    def _read_parts(self) -> None:
        after = ""
        while True:
            with self._reader.snapshot() as now:
                page = now.rows(_PARTS, batch=self._id, after=after, page=_PAGE)
                if not page:
                    return
                keys = [key for part in page for key in (part["id"], f"void:{part['id']}")]
                usage = {row["part_id"]: row for row in now.rows(_PART_USAGE, many="ids", ids=keys)}
                postings: dict[str, list[dict[str, Any]]] = {}
                keys = [key for part in page for key in (f"part:{part['id']}", f"void:{part['id']}")]
                for row in now.rows(_PART_POSTINGS, many="ids", ids=keys):
                    postings.setdefault(row["key"], []).append(row)
            for part in page:
                if self._is_stopping():
                    return
                self._report.parts += 1
                self._num_void += bool(part["is_void"])
                self._compare_part(part, usage, postings)
                if not part["is_void"]:
                    self._read_part(part)
            after = page[-1]["id"]

    def _compare_part(
        self, part: dict[str, Any], usage: dict[str, dict[str, Any]], postings: dict[str, list[dict[str, Any]]]
    ) -> None:
        """Its usage row and posting, and, if it was taken back, those that did so."""
        id_ = part["id"]
        is_billed = part["unit_id"] is not None
        moves = ((id_, f"part:{id_}", 1, is_billed), (f"void:{id_}", f"void:{id_}", -1, is_billed and part["is_void"]))
        for row_id, key, sign, is_wanted in moves:
            row, posted = usage.get(row_id), postings.get(key, [])
            if not is_wanted:
                self._report.compare(f"{self._id} usage row {row_id}", "cost_nanos", _of(row, "cost_nanos"), None)
                self._report.compare(f"{self._id} ledger {key}", "entries", len(posted), 0)
                continue
            place = f"{self._id} usage row {row_id}"
            for name, column in zip(_USAGE, _USAGE_OF_PART, strict=True):
                self._report.compare(place, name, _of(row, name), sign * part[column])
            wanted = {**self._batch, "model": part["model_id"] or self._batch["model_id"] or ""}
            for name in (*_USAGE_KEYS, "batch_id"):
                self._report.compare(place, name, _of(row, name), wanted["id" if name == "batch_id" else name])
            if sign > 0:
                self._report.compare(place, "created_ms", _of(row, "created_ms"), part["created_ms"])
            amounts = {entry["account"]: entry["amount_nanos"] for entry in posted}
            place, cost_nanos = f"{self._id} ledger {key}", sign * part["cost_nanos"]
            revenue = revenue_of(self._batch["project_id"])
            self._report.compare(place, "revenue", amounts.pop(revenue, None), cost_nanos)
            held = f"reserved:{self._batch['project_id']}"
            self._report.compare(place, held, amounts.pop(held, None), -cost_nanos)
            for account, amount_nanos in amounts.items():
                self._report.compare(place, account, amount_nanos, None)
            for entry in posted[:1]:
                self._report.compare(place, "created_ms", entry["created_ms"], _of(row, "created_ms"))

    def _read_part(self, part: dict[str, Any]) -> None:
        place = f"{self._id} part {part['id']}"
        bitmap = part["bitmap"]
        if bitmap is not None:
            claimed = sum(byte.bit_count() for byte in bytes(bitmap))
            self._report.compare(place, "lines in its bitmap", claimed, part["lines_ok"] + part["lines_err"])
        digest, sums = hashlib.sha256(), Sums()
        try:
            for text in lines(self._unpacked(part["s3_key"], digest)):
                number = self._guarded(add_part_line, place, text, sums)
                if number is not None and not self._seen.add(number):
                    self._report.compare(f"{self._id} line {number}", "times it was delivered", 2, 1)
        except NotFoundError:
            self._explain_absence(part, place)
            return
        except zstandard.ZstdError as error:
            self._report.compare(place, "object", f"damaged ({error})", "readable")
            return
        self._report.compare(place, "sha256 of its object", digest.hexdigest(), part["sha256"])
        for name, column in zip(NUMBERS, _PART_COLUMNS, strict=True):
            self._report.compare(place, column, part[column], sums.number(name))

    def _explain_absence(self, part: dict[str, Any], place: str) -> None:
        """Objects of an ended batch are cleared away, and so are those of a part that was taken back meanwhile."""
        with self._reader.snapshot() as now:
            is_gone = now.number(
                "SELECT COUNT(*) FROM parts p JOIN batches b ON b.id = p.batch_id WHERE p.id = :part AND (p.is_void OR"
                " b.status IN ('completed', 'failed', 'expired', 'cancelled'))",
                part=part["id"],
            )
        if is_gone:
            self._num_gone += 1
        else:
            self._report.compare(place, "object", "missing", "there")

    def _unpacked(self, key: str, digest: Any) -> Iterator[bytes]:
        unpack = zstandard.ZstdDecompressor().decompressobj()
        for chunk in self._store.stream(key):
            digest.update(chunk)
            yield unpack.decompress(chunk)

    # ---- files

    def _read_files(self) -> None:
        batch = self._batch
        if batch["status"] not in _ENDED or batch["in_progress_ms"] is None:
            return
        for kind, wanted in (("output", batch["completed"]), ("error", batch["failed"])):
            if self._is_stopping():
                return
            file_id = batch[f"{kind}_file_id"]
            place = f"{self._id} {kind} file"
            if file_id is None:
                self._report.compare(place, "lines", 0, wanted)
                continue
            with self._reader.snapshot() as now:
                row, now_ms = now.one(_FILE, file=file_id), now.now_ms()
            if row is None:
                self._report.compare(place, "file", "missing", file_id)
            elif not self._is_gone(kind, row, now_ms):
                self._read_file(place, kind, row)

    def _is_gone(self, kind: str, row: dict[str, Any], now_ms: int) -> bool:
        """Whether a result file was deleted or is past its life, which is noted: rows are all there is to add up."""
        is_deleted = row["deleted_ms"] is not None
        if not is_deleted and (row["expires_ms"] is None or row["expires_ms"] > now_ms):
            return False
        ended = f"was deleted on {_day(row['deleted_ms'])}" if is_deleted else "is past its life"
        self._report.note(f"{self._id}: its {kind} file {ended}, and wasn't added up.")
        return True

    def _read_file(self, place: str, kind: str, row: dict[str, Any]) -> None:
        batch, report = self._batch, self._report
        digest, sums = hashlib.sha256(), Sums()
        size = before = over_budget = 0

        def chunks() -> Iterator[bytes]:
            nonlocal size
            for chunk in self._store.stream(row["s3_key"]):
                digest.update(chunk)
                size += len(chunk)
                yield chunk

        def add_error_line(_report: Report, _place: str, text: bytes, _prices: Prices, sums: Sums) -> int:
            nonlocal over_budget
            found = decoded(text.decode())
            sums.failed += 1
            over_budget += bool(found["error"] and found["error"]["code"] == "budget_exceeded")
            return int(found["line"])

        add = add_output_line if kind == "output" else add_error_line
        try:
            for text in lines(chunks()):
                number = self._guarded(add, place, text, sums)
                if number is not None and number <= before:
                    report.compare(place, "line number after that of the line before", number, before + 1)
                before = number or before
                report.lines += 1
        except NotFoundError:
            with self._reader.snapshot() as now:
                again, now_ms = now.one(_FILE, file=row["id"]), now.now_ms()
            if again is None or not self._is_gone(kind, again, now_ms):
                report.compare(place, "object", "missing", "there")
            return
        report.compare(place, "bytes", row["bytes"], size)
        report.compare(place, "sha256", row["sha256"], digest.hexdigest())
        if kind == "error":
            report.compare(place, "lines", sums.failed, batch["failed"])
            report.compare(place, "budget_exceeded lines", over_budget, batch["over_budget"])
            return
        for name, column in zip(NUMBERS, _COLUMNS, strict=True):
            if name != "failed":
                report.compare(f"{self._id} batch, by its output file,", column, batch[column], sums.number(name))

    def _guarded(
        self, add: Callable[[Report, str, bytes, Prices, Sums], int], place: str, text: bytes, sums: Sums
    ) -> int | None:
        """The number of a line, or None if it can't be read, which is a difference."""
        prices = self._prices or Prices(own={}, standard={})
        try:
            return add(self._report, place, text, prices, sums)
        except (ValueError, KeyError, TypeError) as error:
            self._report.compare(place, "line", f"unreadable ({type(error).__name__})", "a line")
            return None


def _day(ms: int) -> str:
    """The day (UTC) of a moment."""
    return datetime.fromtimestamp(ms / 1000, UTC).strftime("%Y-%m-%d")


def _of(row: dict[str, Any] | None, name: str) -> Any:
    """A column of a row that may be missing."""
    return None if row is None else row[name]
