"""What the fake engine's witness saw: how often each line of a batch began to run, and the tokens that it cost."""

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
    """Everything that engines of a cluster ran so far. `tokens`: (when, unit, how many were generated in a step)."""

    runs: list[Run]
    tokens: list[tuple[float, str, int]]

    def of_units(self, unit_ids: set[str]) -> Testimony:
        tokens = [entry for entry in self.tokens if entry[1] in unit_ids]
        return Testimony([run for run in self.runs if run.unit_id in unit_ids], tokens)

    def starts(self) -> Counter[tuple[str, int]]:
        """(unit, row) -> how often it began to run."""
        return Counter((run.unit_id, run.row) for run in self.runs if run.event == "start")

    def num_tokens(self) -> int:
        """Tokens that were generated, for nothing or not."""
        return sum(count for _, _, count in self.tokens)

    def last_s(self) -> float:
        """Wall time at which an engine last generated something; 0 if none did."""
        return max((at_s for at_s, _, _ in self.tokens), default=0.0)

    def starts_of_lines(self, units: list[Unit], store: ObjectStore) -> Counter[int]:
        """Line number -> how often it began to run, whichever units it was in."""
        per_row, per_line = self.starts(), Counter[int]()
        for unit in units:
            for index, row in enumerate(unit_file.read(store.get(unit.s3_key)).rows):
                for line_no in row.line_nos:
                    per_line[line_no] += per_row[unit.id, index]
        return per_line


def read(path: Path) -> Testimony:
    """The testimony of units so far; a last line that is just being written is left out."""
    runs: list[Run] = []
    tokens: list[tuple[float, str, int]] = []
    text = path.read_text() if path.exists() else ""
    for line in text.split("\n")[:-1]:
        entry = json.loads(line)
        if entry["event"] == "tokens":
            for request_id, count in entry["tokens"].items():
                if ":" in request_id:  # an interactive call has no unit
                    tokens.append((entry["t"], _parts(request_id)[0], count))
        elif ":" in entry["id"]:
            runs.append(Run(entry["event"], *_parts(entry["id"]), entry["t"]))
    return Testimony(runs, tokens)


def _parts(request_id: str) -> tuple[str, int, int]:
    unit_id, epoch, row = request_id.split(":")[:3]
    return unit_id, int(epoch), int(row)
