"""Rows to requests, completions to lines: folded lines fan out, done ones don't run, cached tokens count in full."""

from __future__ import annotations

import hashlib

import numpy as np
import orjson
from hypothesis import given
from hypothesis import strategies as st

from batchsvc.batches import unit_file
from batchsvc.batches.unit_file import UnitFile, UnitRow
from batchsvc.batches.unit_queries import ClaimedUnit
from batchsvc.money import Rates, line_cost_nanos
from engine.request import Completion, FinishReason, Usage
from engine.sched.order import plan_window
from tests.workers.conftest import RATES
from workers.translate import open_rows, to_expectation, to_lines, to_request


def claimed(num_lines: int, done: int = 0) -> ClaimedUnit:
    return ClaimedUnit(
        id="unit_a",
        epoch=3,
        batch_id="batch_a",
        window_no=0,
        no=0,
        s3_key="k",
        sha256="",
        num_lines=num_lines,
        done_bitmap=done.to_bytes((num_lines + 7) // 8, "little"),
        salt="salt",
        model_id="tiny",
        created_s=1,
        rates={"tier": RATES, "standard": {name: 2 * rate for name, rate in RATES.items()}},
    )


def file_of(folds: list[int], planned: int = 1, prompt_tokens: int = 8) -> UnitFile:
    rows, next_line = [], 1
    for fold in folds:
        line_nos = tuple(range(next_line, next_line + fold))
        next_line += fold
        rows.append(
            UnitRow(
                line_nos=line_nos,
                custom_ids=tuple(f"c{n}" for n in line_nos),
                prompt_ids=np.arange(prompt_tokens, dtype=np.int32),
                params={"temperature": 0.5, "seed": None, "stop": ["x"]},
                planned_cached_tokens=planned,
                max_tokens=5,
            )
        )
    return UnitFile(rows=rows, prefix_uses=[])


@given(st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=40), min_size=1, max_size=12))
def test_what_is_expected_is_what_later_units_begin_with(prompts: list[list[int]]) -> None:
    """Through plan and unit file: each use names a real prefix, by digest too, and as many later units have it."""
    packed = [np.asarray(prompt, ">u4").tobytes() for prompt in prompts]
    plan = plan_window(packed, [None] * len(packed), [1] * len(packed), unit_lines=2, unit_tokens=10**6)
    units = [[prompts[row.members[0]] for row in plan.rows[unit]] for unit in plan.units]
    for number, unit_prompts in enumerate(units):
        rows = [
            UnitRow(
                line_nos=(1,),
                custom_ids=("c",),
                prompt_ids=np.asarray(prompt, np.int32),
                params={},
                planned_cached_tokens=0,
                max_tokens=1,
            )
            for prompt in unit_prompts
        ]
        file = unit_file.read(unit_file.write(rows, plan.prefix_uses[number]))
        expectation = to_expectation(claimed(len(rows)), file)
        if expectation is None:
            assert not plan.prefix_uses[number]
            continue
        assert expectation.salt == "salt"
        for depth, count in expectation.uses:
            prefix = list(expectation.prompt_ids[:depth])
            assert len(prefix) == depth
            later = [any(prompt[:depth] == prefix for prompt in unit) for unit in units[number + 1 :]]
            assert sum(later) == count
        digests = {use.digest for use in file.prefix_uses}
        assert digests == {
            hashlib.blake2b(np.asarray(expectation.prompt_ids[:depth], ">u4").tobytes(), digest_size=16).hexdigest()
            for depth, _ in expectation.uses
        }


@given(folds=st.lists(st.integers(1, 4), min_size=1, max_size=6), data=st.data())
def test_exactly_the_lines_that_lack_a_result_run(folds: list[int], data: st.DataObject) -> None:
    num_lines = sum(folds)
    done = data.draw(st.integers(0, 2**num_lines - 1))
    unit, file = claimed(num_lines, done), file_of(folds)
    finished = {}
    for row in open_rows(unit, file):
        usage = Usage(8, 0, 2)
        completion = Completion(
            request_id=row.request_id, token_ids=(1, 2), text="t", finish_reason=FinishReason.LENGTH, usage=usage
        )
        for line in to_lines(unit, row, completion):
            assert line.bit not in finished
            finished[line.bit] = line.line.line_no
    assert finished == {bit: bit + 1 for bit in range(num_lines) if not done >> bit & 1}


@given(planned=st.integers(0, 8), hit=st.integers(0, 8), output=st.integers(0, 9))
def test_a_line_is_billed_the_larger_of_planned_and_hit(planned: int, hit: int, output: int) -> None:
    unit, file = claimed(2), file_of([2], planned=planned)
    (row,) = open_rows(unit, file)
    completion = Completion(
        request_id=row.request_id,
        token_ids=(0,) * output,
        text="t",
        finish_reason=FinishReason.STOP,
        usage=Usage(8, hit, output),
    )
    first, folded = (line.line for line in to_lines(unit, row, completion))
    assert first.cached_tokens == max(planned, hit) and folded.cached_tokens == 8
    for line in (first, folded):
        tokens = {"input_tokens": 8, "cached_tokens": line.cached_tokens, "output_tokens": output}
        assert line.cost_nanos == line_cost_nanos(Rates(**RATES), **tokens)
        usage = orjson.loads(line.row)["response"]["body"]["usage"]
        assert usage["cost_nanos"] == line.cost_nanos
        assert usage["prompt_tokens_details"]["cached_tokens"] == line.cached_tokens


def test_a_line_without_a_seed_has_one_of_its_own() -> None:
    unit, file = claimed(2), file_of([1, 1])
    first, second = (to_request(unit, row) for row in open_rows(unit, file))
    assert first.params.seed != second.params.seed and first.params.stop == ("x",)
    assert to_request(unit, next(open_rows(unit, file))).params.seed == first.params.seed


def test_aborts_leave_no_line_and_failures_an_error_line() -> None:
    unit, file = claimed(1), file_of([1])
    (row,) = open_rows(unit, file)
    ended = {"request_id": row.request_id, "token_ids": (), "text": "", "usage": Usage(8, 0, 0)}
    assert not to_lines(unit, row, Completion(finish_reason=FinishReason.ABORT, **ended))
    for code, status in (("context_length_exceeded", 400), ("numerics", 500)):
        failed = Completion(finish_reason=FinishReason.ERROR, error_code=code, error_message="m", **ended)
        (line,) = to_lines(unit, row, failed)
        assert not line.line.is_ok and line.line.cost_nanos == 0
        assert orjson.loads(line.line.row)["response"]["status_code"] == status
