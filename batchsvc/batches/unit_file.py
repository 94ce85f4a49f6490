"""The unit file: the tokenized requests of one unit, in plan order, as Parquet that any reader can open.

A row is one request: what the engine runs once. Its lines (usually one, several when duplicates were folded) are
delivered each. Bit i of a unit's done bitmap is the i-th line of the file: rows in order, and within a row its
`line_nos` in order. The file's metadata tells how often later units need the prefixes that this one touches.
"""

from __future__ import annotations

import hashlib
import io
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import orjson
import pyarrow as pa
import pyarrow.parquet as pq

_SCHEMA = pa.schema(
    [
        pa.field("line_nos", pa.list_(pa.int64()), nullable=False),
        pa.field("custom_ids", pa.list_(pa.string()), nullable=False),
        pa.field("prompt_ids", pa.list_(pa.int32()), nullable=False),
        pa.field("params", pa.string(), nullable=False),
        pa.field("planned_cached_tokens", pa.int64(), nullable=False),
        pa.field("max_tokens", pa.int64(), nullable=False),
    ]
)
_PREFIX_USES = b"prefix_uses"


class PrefixUse(NamedTuple):
    """A prefix of `depth_tokens` tokens, its digest (hex), and how many later units of the window need it."""

    depth_tokens: int
    digest: str
    later_units: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class UnitRow:
    """One request. `prompt_ids` is int32 [prompt_tokens]; `params` is what batches/body.py makes of the body.

    `planned_cached_tokens` is billed at least for the first line; of every further line the whole prompt is cached.
    """

    line_nos: tuple[int, ...]
    custom_ids: tuple[str, ...]
    prompt_ids: np.ndarray[Any, np.dtype[np.int32]]
    params: dict[str, Any]
    planned_cached_tokens: int
    max_tokens: int

    def cached_tokens(self, member: int) -> int:
        """Planned cached tokens of the row's line number `member` (0-based)."""
        return self.planned_cached_tokens if member == 0 else len(self.prompt_ids)

    def est_tokens(self, member: int) -> int:
        """Predicted work of this line: uncached input, and output. A row runs once: its first line stands for all."""
        if member > 0:
            return 0
        return len(self.prompt_ids) - self.planned_cached_tokens + self.est_output_tokens

    @property
    def most_output_tokens(self) -> int:
        """The most that its answers can have together."""
        return self.num_answers * self.max_tokens

    @property
    def num_answers(self) -> int:
        """How many answers each line gets."""
        return int(self.params.get("n", 1))

    @property
    def is_sure(self) -> bool:
        """Whether nothing but `max_tokens` can end the answer, so that its length is certain."""
        has_ends = self.params.get("stop") or self.params.get("stop_token_ids") or not self.params.get("ignore_eos")
        return self.max_tokens <= 1 or not has_ends

    @property
    def est_output_tokens(self) -> int:
        """Length of the answers before any sibling is known: as in engine/sched/forecast.py, a quarter of the most."""
        guess = max(math.ceil(self.max_tokens / 4), self.params.get("min_tokens", 0))
        return self.num_answers * (self.max_tokens if self.is_sure else min(guess, self.max_tokens))

    @property
    def high_output_tokens(self) -> int:
        """Length of a long answer: what is reserved for it at first."""
        return min(2 * self.est_output_tokens, self.most_output_tokens)


class UnitLine(NamedTuple):
    """One line of a unit: its bit in the done bitmap, its row, and its place among the row's lines."""

    bit: int
    row: int
    member: int


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitFile:
    rows: list[UnitRow]
    prefix_uses: list[PrefixUse]

    @property
    def num_lines(self) -> int:
        return sum(len(row.line_nos) for row in self.rows)

    def lines(self) -> Iterator[UnitLine]:
        """All lines in the order of the done bitmap."""
        bit = 0
        for index, row in enumerate(self.rows):
            for member in range(len(row.line_nos)):
                yield UnitLine(bit, index, member)
                bit += 1


def line_seed(batch_id: str, line_no: int) -> int:
    """Seed of a line that names none, in [0, 2**63): a rerun of the batch repeats it, identical lines differ."""
    digest = hashlib.blake2b(f"{batch_id}:{line_no}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") & (2**63 - 1)


def write(rows: Sequence[UnitRow], prefix_uses: Sequence[tuple[int, str, int]] = ()) -> bytes:
    """The unit as a Parquet file (zstd)."""
    for row in rows:
        assert row.line_nos, "a row is at least one line"
        assert len(row.line_nos) == len(row.custom_ids), "each line of a row has its custom_id"
    lengths = np.fromiter((len(row.prompt_ids) for row in rows), dtype=np.int64, count=len(rows))
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    tokens = np.concatenate([row.prompt_ids for row in rows]) if rows else np.empty(0)
    columns = [
        pa.array([row.line_nos for row in rows], _SCHEMA.field("line_nos").type),
        pa.array([row.custom_ids for row in rows], _SCHEMA.field("custom_ids").type),
        pa.ListArray.from_arrays(pa.array(offsets, pa.int32()), pa.array(tokens.astype(np.int32, copy=False))),
        pa.array([orjson.dumps(row.params).decode() for row in rows], pa.string()),
        pa.array([row.planned_cached_tokens for row in rows], pa.int64()),
        pa.array([row.max_tokens for row in rows], pa.int64()),
    ]
    table = pa.Table.from_arrays(
        [column.cast(field.type) for column, field in zip(columns, _SCHEMA, strict=True)],
        schema=_SCHEMA.with_metadata({_PREFIX_USES: orjson.dumps([list(use) for use in prefix_uses])}),
    )
    sink = io.BytesIO()
    pq.write_table(table, sink, compression="zstd")
    return sink.getvalue()


def read(data: bytes) -> UnitFile:
    """What `write` was given."""
    table = pq.read_table(io.BytesIO(data)).combine_chunks()
    prompts = table.column("prompt_ids").combine_chunks()
    flat, offsets = prompts.flatten().to_numpy(), prompts.offsets.to_numpy() - prompts.offsets[0].as_py()
    rows = [
        UnitRow(
            line_nos=tuple(line_nos),
            custom_ids=tuple(custom_ids),
            prompt_ids=flat[offsets[index] : offsets[index + 1]],
            params=orjson.loads(params),
            planned_cached_tokens=cached,
            max_tokens=max_tokens,
        )
        for index, (line_nos, custom_ids, params, cached, max_tokens) in enumerate(
            zip(
                *(
                    table.column(name).to_pylist()
                    for name in ("line_nos", "custom_ids", "params", "planned_cached_tokens", "max_tokens")
                ),
                strict=True,
            )
        )
    ]
    uses = orjson.loads(table.schema.metadata[_PREFIX_USES])
    return UnitFile(rows=rows, prefix_uses=[PrefixUse(*use) for use in uses])
