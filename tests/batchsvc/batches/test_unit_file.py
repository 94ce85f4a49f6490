"""The unit file gives back what it was given, and orders its lines as the done bitmap does."""

from __future__ import annotations

import io

import numpy as np
import pyarrow.parquet as pq
from hypothesis import given, settings
from hypothesis import strategies as st

from batchsvc.batches import unit_file
from batchsvc.batches.unit_file import UnitRow

TEXT = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=20)
LINES = st.lists(st.tuples(st.integers(1, 2**40), TEXT), min_size=1, max_size=5)


@st.composite
def unit_rows(draw: st.DrawFn) -> UnitRow:
    lines = draw(LINES)
    prompt = draw(st.lists(st.integers(0, 2**31 - 1), max_size=30))
    return UnitRow(
        line_nos=tuple(line for line, _ in lines),
        custom_ids=tuple(text for _, text in lines),
        prompt_ids=np.array(prompt, dtype=np.int32),
        params={"temperature": draw(st.floats(0, 2)), "seed": draw(st.none() | st.integers(0, 2**63 - 1)), "stop": []},
        planned_cached_tokens=draw(st.integers(0, 100)),
        max_tokens=draw(st.integers(1, 1000)),
    )


@settings(max_examples=30, deadline=None)
@given(st.lists(unit_rows(), max_size=12), st.lists(st.tuples(st.integers(1, 99), TEXT, st.integers(0, 9)), max_size=5))
def test_a_unit_file_gives_back_its_rows_and_prefix_uses(rows: list[UnitRow], uses: list[tuple[int, str, int]]) -> None:
    back = unit_file.read(unit_file.write(rows, uses))
    assert [tuple(use) for use in back.prefix_uses] == uses
    assert len(back.rows) == len(rows)
    for new, old in zip(back.rows, rows, strict=True):
        assert (new.line_nos, new.custom_ids, new.params) == (old.line_nos, old.custom_ids, old.params)
        assert (new.planned_cached_tokens, new.max_tokens) == (old.planned_cached_tokens, old.max_tokens)
        assert new.prompt_ids.dtype == np.int32
        assert np.array_equal(new.prompt_ids, old.prompt_ids)
    lines = list(back.lines())
    assert [line.bit for line in lines] == list(range(back.num_lines))
    assert [back.rows[line.row].line_nos[line.member] for line in lines] == [n for row in rows for n in row.line_nos]


def test_further_lines_of_a_folded_row_are_cached_whole() -> None:
    row = UnitRow(
        line_nos=(3, 9),
        custom_ids=("a", "b"),
        prompt_ids=np.arange(40, dtype=np.int32),
        params={},
        planned_cached_tokens=16,
        max_tokens=5,
    )
    assert (row.cached_tokens(0), row.cached_tokens(1)) == (16, 40)


def test_the_columns_are_those_of_the_design_and_compressed_with_zstd() -> None:
    file = pq.ParquetFile(io.BytesIO(unit_file.write([], [])))
    assert file.schema_arrow.names == [
        "line_nos",
        "custom_ids",
        "prompt_ids",
        "params",
        "planned_cached_tokens",
        "max_tokens",
    ]


def test_line_seeds_repeat_and_differ() -> None:
    seeds = [unit_file.line_seed("batch_x", line) for line in range(2000)]
    assert seeds == [unit_file.line_seed("batch_x", line) for line in range(2000)]
    assert len(set(seeds)) == 2000  # a false alarm has odds of 2e6 / 2**63
    assert min(seeds) >= 0
    assert max(seeds) < 2**63
    assert unit_file.line_seed("batch_y", 1) != unit_file.line_seed("batch_x", 1)
