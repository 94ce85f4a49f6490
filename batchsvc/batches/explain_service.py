"""Explains a batch or one of its lines from what is stored: the plan in the unit files, the parts, the pinned prices.

The plan's objects are wiped some time after a batch has ended. Then the result files still tell what a line cost, and
the explanation says that the plan is gone. What was deleted is named with its day; the totals stay.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import orjson
from sqlalchemy.orm import Session

from batchsvc.batches import (
    absent,
    deletion_queries,
    explain,
    explain_queries,
    model_pins,
    part_file,
    service,
    unit_file,
    window_file,
)
from batchsvc.batches.lifecycle import TERMINAL
from batchsvc.batches.model_pins import ModelPin
from batchsvc.batches.tables import Batch, Part, Unit
from batchsvc.batches.unit_file import UnitRow
from batchsvc.billing import line_items
from batchsvc.db.session import Database
from batchsvc.errors import NotFoundError
from batchsvc.files import service as files
from batchsvc.money import Rates, parse_dollars
from batchsvc.settings import Settings
from batchsvc.store.s3 import ObjectStore


def explain_batch(session: Session, settings: Settings, project_id: str | None, batch_id: str) -> dict[str, Any]:
    """The totals of a batch by kind of token; for an operator (no `project_id`) the engine's side too."""
    batch = _batch(session, project_id, batch_id)
    shown: dict[str, Any] = {
        "object": "batch.explanation",
        "batch_id": batch.id,
        "status": batch.status,
        "lines": {"total": batch.total, "answered": batch.completed, "failed": batch.failed},
        "input_tokens": batch.input_tokens,
        "cached_tokens": batch.cached_tokens,
        "output_tokens": batch.output_tokens,
        "cost_nanos": batch.cost_nanos,
        "price": None,
        "items": [],
        "saved_by_cache_nanos": 0,
        "saved_by_tier_nanos": batch.standard_nanos - batch.cost_nanos,
        "deleted_at": None if batch.deleted_ms is None else batch.deleted_ms // 1000,
        "gone": absent.what_is_gone(session, batch),
    }
    pins = model_pins.pins_of(batch)
    if batch.models is not None:
        used = explain_queries.used_by_model(session, batch.id)
        uses = {name: _use_of(row, int(row.requests)) for name, row in used.items()}
        shown["models"] = [_of_model(batch, pin, uses.get(pin.id, _NO_USE)) for pin in pins]
        shown["saved_by_cache_nanos"] = sum(one["saved_by_cache_nanos"] for one in shown["models"])
    elif pins:
        shown |= _of_model(batch, pins[0], _use_of(batch, batch.completed))
    if project_id is None:
        workers = [worker for pin in pins for worker in explain_queries.workers(session, pin.digest)]
        shown["engine"] = explain.engine_part(
            [worker.stats for worker in workers if worker.stats],
            cost_per_hour_nanos=parse_dollars(settings.accelerator_cost_per_hour) or 0,
            cost_nanos=batch.cost_nanos,
            tokens=batch.input_tokens + batch.output_tokens,
        )
    return shown


def _of_model(batch: Batch, pin: ModelPin, usage: line_items.Usage) -> dict[str, Any]:
    """What was charged for the lines that ran on a model, by kind of token."""
    rates = Rates(**pin.rates["tier"])
    saved = usage.cached_tokens * (rates.input - rates.cached_input)
    return {
        "price": _price(batch, pin),
        "items": [
            {
                "kind": item.kind,
                "tokens": item.tokens,
                "nanos_per_mtok": item.rate_nanos,
                "amount_nanos": item.amount_nanos,
            }
            for item in line_items.items(pin.id, batch.tier, rates, usage)
        ],
        "saved_by_cache_nanos": saved // 1_000_000,
    }


def _use_of(row: Any, requests: int) -> line_items.Usage:
    return line_items.Usage(
        requests=requests,
        input_tokens=int(row.input_tokens),
        cached_tokens=int(row.cached_tokens),
        output_tokens=int(row.output_tokens),
        cost_nanos=int(row.cost_nanos),
    )


def explain_line(
    db: Database, store: ObjectStore, project_id: str | None, batch_id: str, custom_id: str
) -> dict[str, Any]:
    """One line, by its custom_id; for an operator (no `project_id`) of any project's batch. Raises NotFoundError for
    one that the batch doesn't have."""
    with db.reading() as session:
        batch = _batch(session, project_id, batch_id)
        windows = explain_queries.windows(session, batch_id)
        gone = absent.what_is_gone(session, batch)
    if batch.deleted_ms is not None:
        raise _nothing_left(batch_id, gone)
    is_cleared = False
    for window in windows:
        data = _object(store, window.line_nos_key) if window.line_nos_key else None
        if data is None:
            is_cleared = True
            continue
        lines = window_file.read(data)
        if custom_id in lines.custom_ids:
            line_no = lines.line_nos[list(lines.custom_ids).index(custom_id)]
            return _with_gone(_Line(db, store, batch, window.no, line_no, custom_id).explained(), batch, gone)
    row = _from_files(db, store, batch, custom_id) if is_cleared else None
    if row is None and is_cleared and gone:
        raise _nothing_left(batch_id, gone)
    if row is None:
        raise NotFoundError(f"The batch {batch_id} has no line with custom_id '{custom_id[:100]}'.", param="custom_id")
    shown = _shown(batch, row["line"], custom_id) | {"cached": {"why": _GONE}}
    return _with_gone(_with_result(shown, batch, row), batch, gone)


def _batch(session: Session, project_id: str | None, batch_id: str) -> Batch:
    """A batch of a project, or with None of any, even if it was deleted. Raises NotFoundError."""
    if project_id is None:
        found = explain_queries.batch(session, batch_id)
        if found is not None:
            return found
        project_id = ""  # nobody's: refused in the same words
    return deletion_queries.batch_ever(session, project_id, batch_id) or service.get(session, project_id, batch_id)


def _with_gone(shown: dict[str, Any], batch: Batch, gone: list[str]) -> dict[str, Any]:
    """A line without a result isn't pending when its batch has ended: what it came to was deleted."""
    is_gone = shown["status"] == "pending" and batch.status in TERMINAL and bool(gone)
    return shown | {"status": "deleted" if is_gone else shown["status"], "gone": gone}


def _nothing_left(batch_id: str, gone: list[str]) -> NotFoundError:
    return NotFoundError(
        f"Lines of {batch_id} can't be told apart any more: {' '.join(gone)} Its totals stay: `batchsvc explain "
        f"{batch_id}`.",
        code="content_deleted",
        param="custom_id",
    )


_NO_USE = line_items.Usage(requests=0, input_tokens=0, cached_tokens=0, output_tokens=0, cost_nanos=0)
_GONE = "The plan of this batch was cleared away after it had ended."


@dataclass
class _Place:
    """Where a line is in the plan."""

    units: list[Unit]  # those that share the file; one was split from the other
    row: UnitRow
    member: int
    bit: int


@dataclass
class _Line:
    db: Database
    store: ObjectStore
    batch: Batch
    window_no: int
    line_no: int
    custom_id: str

    def explained(self) -> dict[str, Any]:
        batch = self.batch
        with self.db.reading() as session:
            units = explain_queries.units(session, batch.id, self.window_no)
            parts = explain_queries.parts(session, batch.id, self.window_no)
        shown = _shown(batch, self.line_no, self.custom_id) | {"window": self.window_no}
        try:
            place = self._place(units)
            part, line = self._result(place, parts)
            row = orjson.loads(line.row) if line else None
            if place is not None:
                model_id = place.units[0].model_id
                shown |= _priced(batch, model_id)
                same_model = [unit for unit in units if unit.model_id == model_id]
                shown |= self._planned(place, same_model, part, row)
            if line is not None and line.steps:
                shown["engine_steps"] = line.steps
        except NotFoundError:  # objects of an ended batch are cleared away, a file at a time
            part, row = None, None
            shown["cached"] = {"why": _GONE}
        if part is not None:
            shown["part"] = {
                "id": part.id,
                "created_at": part.created_ms // 1000,
                "lines": part.lines_ok + part.lines_err,
            }
        row = row or _from_files(self.db, self.store, batch, self.custom_id)
        return _with_result(shown, batch, row)

    def _place(self, units: list[Unit]) -> _Place | None:
        """None: no unit has the line, because the planner rejected it."""
        for key in dict.fromkeys(unit.s3_key for unit in units):
            file = unit_file.read(self.store.get(key))
            for line in file.lines():
                row = file.rows[line.row]
                if row.line_nos[line.member] == self.line_no:
                    return _Place([unit for unit in units if unit.s3_key == key], row, line.member, line.bit)
        return None

    def _result(self, place: _Place | None, parts: list[Part]) -> tuple[Part | None, part_file.PartLine | None]:
        """The part that delivered the line, and the line in it."""
        ids = {unit.id for unit in place.units} if place else {None}
        for part in parts:
            has = place is None or int.from_bytes(part.bitmap or b"", "little") >> place.bit & 1
            if part.unit_id in ids and has:
                for line in part_file.decode(self.store.get(part.s3_key)):
                    if line.line_no == self.line_no:
                        return part, line
        return None, None

    def _planned(
        self, place: _Place, units: list[Unit], part: Part | None, result: dict[str, Any] | None
    ) -> dict[str, Any]:
        row, bit = place.row, place.bit
        open_units = [unit for unit in place.units if not int.from_bytes(unit.done_bitmap, "little") >> bit & 1]
        delivered = [unit for unit in place.units if part is not None and unit.id == part.unit_id]
        unit = (delivered or open_units or place.units)[0]
        failed = int((unit.attempts or {}).get(str(bit), 0))
        usage = _usage(result)
        same = None
        if place.member == 0 and row.planned_cached_tokens == len(row.prompt_ids):
            same = next(
                (
                    other
                    for other in self._earlier(units, row)
                    if other.prompt_ids.tobytes() == row.prompt_ids.tobytes()
                ),
                None,
            )
        prefix = explain.SharedPrefix(0, None)
        if place.member == 0 and same is None:
            prefix = explain.shared_prefix(row.prompt_ids, self._earlier(units, row))
        cached = explain.cached_part(row, place.member, prefix, same, usage[1] if usage else None)
        return {
            "unit": {
                "id": unit.id,
                "no": unit.no,
                "lines": unit.num_lines,
                "position": bit,
                "split_from": unit.parent_id,
            },
            "attempts": {"failed": failed, "unit_was_leased": unit.epoch},
            "max_tokens": row.max_tokens,
            "prompt_tokens": len(row.prompt_ids),
            "cached": cached,
        }

    def _earlier(self, units: list[Unit], row: UnitRow) -> Iterator[UnitRow]:
        """The requests of the window before this one, in plan order."""
        for key in dict.fromkeys(unit.s3_key for unit in units):
            for other in unit_file.read(self.store.get(key)).rows:
                if other.line_nos[0] == row.line_nos[0]:
                    return
                yield other


def _shown(batch: Batch, line_no: int, custom_id: str) -> dict[str, Any]:
    return {
        "object": "batch.line",
        "batch_id": batch.id,
        "custom_id": custom_id,
        "line": line_no,
        "status": "pending",
        "window": None,
        "unit": None,
        "part": None,
        "attempts": None,
        "engine_steps": None,
        "cached": None,
        "usage": None,
        "cost_nanos": None,
        "price": None,
        "arithmetic": None,
        "error": None,
        **_priced(batch, None),
    }


def _with_result(shown: dict[str, Any], batch: Batch, row: dict[str, Any] | None) -> dict[str, Any]:
    usage = _usage(row)
    if row is None:
        return shown
    pin = model_pins.pin_of(batch, row["response"]["body"].get("model") if usage else None)
    if usage is None or pin is None:
        response = row.get("response")
        error = row.get("error") or (response or {}).get("body", {}).get("error")
        says = {"status": "failed", "error": error, "cost_nanos": 0, "arithmetic": "A line that failed costs nothing."}
        return shown | says
    tokens = dict(zip(("input_tokens", "cached_tokens", "output_tokens"), usage[:3], strict=True))
    return shown | {
        "status": "answered",
        "usage": tokens,
        "cost_nanos": usage[3],
        "price": _price(batch, pin),
        "arithmetic": explain.arithmetic(Rates(**pin.rates["tier"]), **tokens),
    }


def _usage(row: dict[str, Any] | None) -> tuple[int, int, int, int] | None:
    """Input, cached and output tokens, and the cost, of a line of the output file; None of any other."""
    if row is None or row.get("error") or not row.get("response") or row["response"]["status_code"] != 200:
        return None
    usage = row["response"]["body"]["usage"]
    return *part_file.usage_of(usage), usage["cost_nanos"]


def _from_files(db: Database, store: ObjectStore, batch: Batch, custom_id: str) -> dict[str, Any] | None:
    """A line of the result files, found by reading them; None if they are gone or don't have it."""
    with db.reading() as session:
        found = [
            files.find_stored(session, batch.project_id, file_id)
            for file_id in (batch.output_file_id, batch.error_file_id)
            if file_id
        ]
    mark = b'"custom_id":' + orjson.dumps(custom_id)
    for file in filter(None, found):
        rest = b""
        try:
            for chunk in store.stream(file.s3_key):
                *lines, rest = (rest + chunk).split(b"\n")
                for line in lines:
                    if mark in line and (row := orjson.loads(line))["custom_id"] == custom_id:
                        return dict(row)
        except NotFoundError:
            continue
    return None


def _object(store: ObjectStore, key: str) -> bytes | None:
    try:
        return store.get(key)
    except NotFoundError:
        return None


def _priced(batch: Batch, model_id: str | None) -> dict[str, Any]:
    """The price of a line that runs on this model, if it is pinned."""
    pin = model_pins.pin_of(batch, model_id)
    return {} if pin is None else {"price": _price(batch, pin)}


def _price(batch: Batch, pin: ModelPin) -> dict[str, Any]:
    rates = Rates(**pin.rates["tier"])
    return explain.price_part(rates, version=batch.price_version, model=pin.id, tier=batch.tier)
