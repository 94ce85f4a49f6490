"""The objects of a planned window, from its lines: the same bytes, whoever makes them and how often."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from batchsvc import ids
from batchsvc.batches import line_set, part_file, unit_file
from batchsvc.batches.embedding_body import planned_cached_tokens
from batchsvc.batches.part_file import PartLine
from batchsvc.batches.plan_queries import RejectedPart
from batchsvc.batches.unit_file import UnitRow
from batchsvc.batches.window import PlannedRequest
from batchsvc.settings import Settings
from batchsvc.store import keys
from engine.sched.order import PrefixUse, WindowPlan, plan_window


class UnitObject(NamedTuple):
    """A unit: its requests, and the file that holds them."""

    rows: list[UnitRow]
    data: bytes
    sha256: str

    @property
    def num_lines(self) -> int:
        return sum(len(row.line_nos) for row in self.rows)

    @property
    def est_tokens(self) -> int:
        """Predicted work: uncached input and predicted output tokens."""
        return sum(row.est_tokens(0) for row in self.rows)

    @property
    def sure_tokens(self) -> int:
        """What is certain of it."""
        return sum(row.est_tokens(0) for row in self.rows if row.is_sure)


def error_part(batch_id: str, plan_epoch: int, rejected: Sequence[PartLine]) -> tuple[RejectedPart, bytes]:
    """The part of a window's rejected lines, and its object."""
    part_id, data = ids.part_id(), part_file.encode(rejected)
    part = RejectedPart(
        id=part_id,
        s3_key=keys.part(batch_id, plan_epoch, part_id),
        sha256=hashlib.sha256(data).hexdigest(),
        size_bytes=len(data),
        num_lines=len(rejected),
        line_nos=line_set.encode(line.line_no for line in rejected),
    )
    return part, data


def by_model(requests: Sequence[PlannedRequest]) -> dict[str, list[PlannedRequest]]:
    """Requests by the model that they run on, which is planned for itself: nothing is shared between models."""
    found: dict[str, list[PlannedRequest]] = {}
    for request in requests:
        found.setdefault(request.model_id, []).append(request)
    return found


def unit_objects(requests: Sequence[PlannedRequest], settings: Settings) -> Iterator[UnitObject]:
    """The units of a window in plan order."""
    for rows, uses in planned_units(requests, settings):
        data = unit_file.write(rows, uses)
        yield UnitObject(rows, data, hashlib.sha256(data).hexdigest())


def planned_units(
    requests: Sequence[PlannedRequest], settings: Settings
) -> Iterator[tuple[list[UnitRow], list[PrefixUse]]]:
    """The rows of each unit in plan order, and the prefixes that later ones need."""
    plan = plan_window(
        [request.prompt for request in requests],
        [request.fold_key for request in requests],
        [request.params["max_tokens"] * request.params.get("n", 1) for request in requests],
        unit_lines=settings.unit_lines,
        unit_tokens=settings.unit_tokens,
    )
    for index, piece in enumerate(plan.units):
        yield _rows(plan, piece, requests), plan.prefix_uses[index]


def _rows(plan: WindowPlan, piece: slice, requests: Sequence[PlannedRequest]) -> list[UnitRow]:
    rows = []
    for planned in plan.rows[piece]:
        first = requests[planned.members[0]]
        rows.append(
            UnitRow(
                line_nos=tuple(requests[member].line_no for member in planned.members),
                custom_ids=tuple(requests[member].custom_id for member in planned.members),
                prompt_ids=np.frombuffer(first.prompt, dtype=">u4").astype(np.int32),
                params=first.params,
                planned_cached_tokens=planned_cached_tokens(
                    first.params, planned.planned_cached_tokens, first.prompt_tokens
                ),
                max_tokens=first.params["max_tokens"],
            )
        )
    return rows
