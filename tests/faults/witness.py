"""What the fake engine's witness saw: how often each line of a batch began to run, under which epochs."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from batchsvc.batches import unit_file
from batchsvc.batches.tables import Unit
from batchsvc.store.s3 import ObjectStore


class Run(NamedTuple):
    """A request that an engine began or ended: row `row` of a unit's file, under an epoch."""

    event: str
    unit_id: str
    epoch: int
    row: int
    at_s: float


@dataclass(frozen=True)
class Testimony:
    """Everything that engines of a cluster ran so far."""

    runs: list[Run]

    def of_units(self, unit_ids: set[str]) -> Testimony:
        return Testimony([run for run in self.runs if run.unit_id in unit_ids])

    def starts(self) -> Counter[tuple[str, int]]:
        """(unit, row) -> how often it began to run."""
        return Counter((run.unit_id, run.row) for run in self.runs if run.event == "start")

    def last_s(self) -> float:
        """Wall time at which an engine last began or ended something; 0 if none did."""
        return max((run.at_s for run in self.runs), default=0.0)

    def starts_of_lines(self, units: list[Unit], store: ObjectStore) -> Counter[int]:
        """Line number -> how often it began to run, whichever units it was in."""
        per_row, per_line = self.starts(), Counter[int]()
        for unit in units:
            for index, row in enumerate(unit_file.read(store.get(unit.s3_key)).rows):
                for line_no in row.line_nos:
                    per_line[line_no] += per_row[unit.id, index]
        return per_line


def read(path: Path) -> Testimony:
    """The testimony so far; a last line that is just being written is left out."""
    if not path.exists():
        return Testimony([])
    said = [json.loads(line) for line in path.read_text().split("\n")[:-1] if line.endswith("}")]
    return Testimony([Run(entry["event"], *_parts(entry["id"]), entry["t"]) for entry in said])


def _parts(request_id: str) -> tuple[str, int, int]:
    unit_id, epoch, row = request_id.split(":")[:3]
    return unit_id, int(epoch), int(row)
