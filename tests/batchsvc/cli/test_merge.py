"""Result lines come back in input order, whatever the chunks, and a line is what ends with a newline, nothing else."""

from __future__ import annotations

import itertools
import json

from hypothesis import given
from hypothesis import strategies as st

from batchsvc.cli.merge import in_input_order, latest, lines_of


def row(number: int) -> bytes:
    return json.dumps({"custom_id": f"r{number}", "line": number}).encode()


@given(failed=st.lists(st.booleans(), max_size=40))
def test_two_ordered_streams_become_one(failed: list[bool]) -> None:
    rows = [row(i + 1) for i in range(len(failed))]
    output = [line for line, is_error in zip(rows, failed, strict=True) if not is_error]
    errors = [line for line, is_error in zip(rows, failed, strict=True) if is_error]
    assert list(in_input_order(iter(output), iter(errors))) == rows


def test_lines_without_numbers_keep_their_order_answers_first() -> None:
    output, errors = [b'{"custom_id": "b"}', b'{"custom_id": "a"}'], [b'{"custom_id": "c"}']
    assert list(in_input_order(output, errors)) == output + errors


@given(
    lines=st.lists(st.text(st.characters(exclude_characters="\n", exclude_categories=("Cs",)), min_size=1), max_size=8),
    cuts=st.lists(st.integers(0, 200), max_size=6),
    ends=st.booleans(),
)
def test_chunks_are_cut_at_newlines_only(lines: list[str], cuts: list[int], ends: bool) -> None:
    whole = "\n".join(lines).encode() + (b"\n" if ends and lines else b"")
    edges = sorted({0, len(whole), *(cut for cut in cuts if cut < len(whole))})
    chunks = [whole[a:b] for a, b in itertools.pairwise(edges)]
    assert list(lines_of(chunks)) == [line.encode() for line in lines]


@given(st.lists(st.sets(st.integers(1, 30)), min_size=1, max_size=4))
def test_a_chain_of_batches_says_of_each_line_what_the_youngest_says(ages: list[set[int]]) -> None:
    streams = [
        [json.dumps({"age": age, "line": number}).encode() for number in sorted(numbers)]
        for age, numbers in enumerate(ages)
    ]
    youngest = {number: age for age, numbers in enumerate(ages) for number in numbers}
    found = [json.loads(line) for line in latest(streams)]
    assert [(line["line"], line["age"]) for line in found] == sorted(youngest.items())
