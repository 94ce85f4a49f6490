"""What tests of the workers make by hand: parts of claimed units, as an engine worker would."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from batchsvc import ids
from batchsvc.batches import line_set, part_file, unit_file
from batchsvc.batches.unit_queries import ClaimedUnit, NewPart
from batchsvc.store import keys
from engine.request import Completion, FinishReason, Usage
from tests.workers.conftest import World
from workers.translate import FinishedLine, open_rows, to_lines


def finish(world: World, unit: ClaimedUnit, most_lines: int | None = None) -> list[FinishedLine]:
    """Results for lines that a unit still lacks, the first ones in plan order."""
    rows = list(open_rows(unit, unit_file.read(world.store.get(unit.s3_key))))
    lines: list[FinishedLine] = []
    for row in rows:
        usage = Usage(len(row.row.prompt_ids), 0, 2, steps=3)
        done = Completion(
            request_id=row.request_id,
            token_ids=(7, 8),
            text=f"answer of epoch {unit.epoch}",
            finish_reason=FinishReason.STOP,
            usage=usage,
        )
        lines += to_lines(unit, row, done)
    return lines[:most_lines]


def new_part(unit: ClaimedUnit, lines: Sequence[FinishedLine], data: bytes, key: str, part_id: str) -> NewPart:
    parts = [line.line for line in lines]
    return NewPart(
        id=part_id,
        s3_key=key,
        sha256=hashlib.sha256(data).hexdigest(),
        size_bytes=len(data),
        bitmap=sum(1 << line.bit for line in lines).to_bytes((unit.num_lines + 7) // 8, "little"),
        line_nos=line_set.encode(line.line_no for line in parts),
        lines_ok=sum(line.is_ok for line in parts),
        lines_err=sum(not line.is_ok for line in parts),
        input_tokens=sum(line.input_tokens for line in parts),
        cached_tokens=sum(line.cached_tokens for line in parts),
        output_tokens=sum(line.output_tokens for line in parts),
        cost_nanos=sum(line.cost_nanos for line in parts),
        standard_nanos=sum(line.standard_nanos for line in parts),
    )


def put_part(world: World, unit: ClaimedUnit, lines: Sequence[FinishedLine]) -> NewPart:
    """A stored part that doesn't count yet."""
    part_id = ids.part_id()
    data = part_file.encode([line.line for line in lines])
    key = keys.part(unit.batch_id, unit.epoch, part_id)
    world.store.put(key, data)
    return new_part(unit, lines, data, key, part_id)
