"""What `usage` and `costs` print and write: sums by group as a table with bars, CSV and Parquet; pure but for files."""

from __future__ import annotations

import csv
import io
import os
import shutil
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from batchsvc.cli.exits import CommandError, Exit
from batchsvc.money import format_dollars

if TYPE_CHECKING:
    from batchsvc.cli.console import Console

# words of --by and the group of the API; `day` is the bucket
GROUPS = {
    "model": "model",
    "project": "project_id",
    "key": "api_key_id",
    "batch": "batch_id",
    "tier": "service_tier",
    "item": "line_item",
}
_METADATA = "metadata."
_EMPTY = {"model": "given back"}  # a refund, goodwill or a credit note has no model
_BAR_COLUMNS = 24
_PLAIN_COLUMNS = 200  # of a table that goes into a file or a pipe


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """Sums by group. A row has a value for each word of `by`, then an integer for each of `measures`."""

    by: tuple[str, ...]
    measures: tuple[str, ...]
    money: str  # the measure that bars show
    rows: list[dict[str, Any]]

    @property
    def total(self) -> dict[str, int]:
        return {name: sum(row[name] for row in self.rows) for name in self.measures}


def parsed_by(text: str, words: Iterable[str]) -> tuple[str, ...]:
    """The words of --by. Raises CommandError for one that isn't among `words` and isn't metadata.KEY."""
    found = tuple(dict.fromkeys(word.strip() for word in text.split(",")))
    for word in found:
        if word not in words and not (word.startswith(_METADATA) and len(word) > len(_METADATA)):
            raise CommandError(f"--by can't be {word!r}: it takes {', '.join(words)} and metadata.KEY.", Exit.USAGE)
    return found


def api_groups(by: Sequence[str]) -> list[str]:
    """What the API has to group by, apart from the day."""
    return [GROUPS.get(word, word) for word in by if word != "day"]


def report(buckets: Iterable[Mapping[str, Any]], by: Sequence[str], measures: Mapping[str, str], money: str) -> Report:
    """Adds buckets up by group. `measures`: name in the report -> field of a result."""
    sums: dict[tuple[str, ...], dict[str, int]] = defaultdict(lambda: dict.fromkeys(measures, 0))
    for bucket in buckets:
        day = datetime.fromtimestamp(bucket["start_time"], UTC).date().isoformat()
        for result in bucket["results"]:
            values = (day if word == "day" else result.get(GROUPS.get(word, word)) for word in by)
            row = sums[tuple("" if value is None else str(value) for value in values)]
            for name, field in measures.items():
                row[name] += result.get(field) or 0
    rows: list[dict[str, Any]] = [{**dict(zip(by, key, strict=True)), **found} for key, found in sums.items()]
    if "day" in by:
        rows.sort(key=lambda row: (row["day"], -row[money], [row[word] for word in by]))
    else:
        rows.sort(key=lambda row: (-row[money], [row[word] for word in by]))
    return Report(by=tuple(by), measures=tuple(measures), money=money, rows=rows)


def rendered(found: Report, *, color: bool) -> str:
    """The table as text, with a bar for the money of each row and a last line of totals."""
    from rich.bar import Bar
    from rich.console import Console as RichConsole
    from rich.table import Table

    table = Table(show_footer=True, box=None, pad_edge=False, header_style="bold", footer_style="bold")
    total = found.total
    for number, word in enumerate(found.by):
        table.add_column(word, "total" if number == 0 else "", no_wrap=True)
    for name in found.measures:
        table.add_column(_head(name), _cell(name, total[name]), justify="right", no_wrap=True)
    table.add_column("", no_wrap=True)
    most = max((abs(row[found.money]) for row in found.rows), default=0)
    for row in found.rows:
        cells = [
            *(row[word] or _EMPTY.get(word, "") for word in found.by),
            *(_cell(name, row[name]) for name in found.measures),
        ]
        table.add_row(*cells, Bar(most or 1, 0, max(row[found.money], 0), width=_BAR_COLUMNS, color="cyan"))
    is_terminal = sys.stdout.isatty()
    width = shutil.get_terminal_size().columns if is_terminal else _PLAIN_COLUMNS
    text = io.StringIO()
    RichConsole(file=text, width=width, force_terminal=color, no_color=not color, highlight=False, markup=False).print(
        table
    )
    return "\n".join(line.rstrip() for line in text.getvalue().splitlines())


def wants_color() -> bool:
    """Whether standard output may be painted on."""
    return sys.stdout.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def write_csv(path: str, columns: Sequence[str], rows: Iterable[Mapping[str, Any]], console: Console) -> None:
    """Rows as CSV into a file, or to standard output for `-`."""
    if path == "-" and console.as_json:
        raise CommandError("Standard output can't carry both --json and CSV: name a file.", Exit.USAGE)
    written = list(rows)
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, lineterminator="\n")
    writer.writeheader()
    writer.writerows(written)
    if path == "-":
        console.out(text.getvalue().removesuffix("\n"))
        return
    with _told_of(path):
        Path(path).write_text(text.getvalue(), encoding="utf-8", newline="")
    console.say(f"Wrote {len(written):,} rows to {path}.")


def write_parquet(path: str, found: Report, console: Console) -> None:
    """The report as Parquet: groups as text, sums as 64-bit integers."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    fields = [(word, pa.string()) for word in found.by] + [(name, pa.int64()) for name in found.measures]
    with _told_of(path):
        pq.write_table(pa.Table.from_pylist(found.rows, schema=pa.schema(fields)), path)
    console.say(f"Wrote {len(found.rows):,} rows to {path}.")


@contextmanager
def _told_of(path: str) -> Iterator[None]:
    """A file that can't be written ends the command with one sentence."""
    try:
        yield
    except OSError as error:
        raise CommandError(f"{path} can't be written: {error.strerror or error}.") from error


def _head(name: str) -> str:
    return name.removesuffix("_nanos").replace("_", " ")


def _cell(name: str, value: int) -> str:
    return format_dollars(value) if name.endswith("_nanos") else f"{value:,}"
