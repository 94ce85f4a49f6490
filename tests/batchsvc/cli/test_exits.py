"""The table of exit codes, and how --allow-errors and the end of a batch lead to them."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchsvc.cli.exits import TABLE, CommandError, Exit, allowed_errors, help_table
from batchsvc.cli.outcome import exit_of


def ended(status: str, *, total: int = 0, failed: int = 0, codes: tuple[str, ...] = ()) -> dict[str, Any]:
    errors = {"object": "list", "data": [{"code": code, "line": 1, "message": "m", "param": None} for code in codes]}
    counts = {"total": total, "completed": total - failed, "failed": failed}
    return {"id": "batch_1", "status": status, "request_counts": counts, "errors": errors if codes else None}


def test_the_table_names_every_code() -> None:
    assert set(TABLE) == set(Exit)
    assert {int(code) for code in Exit} == {0, 1, 2, 3, 4, 5, 6, 130}
    for code in Exit:
        assert f"{code.value:>3}  " in help_table()


@pytest.mark.parametrize(
    ("batch", "allow", "code"),
    [
        (ended("completed", total=10), None, Exit.OK),
        (ended("completed", total=10, failed=1), None, Exit.ERROR_LINES),
        (ended("completed", total=10, failed=1), "1", Exit.OK),
        (ended("completed", total=10, failed=2), "1", Exit.ERROR_LINES),
        (ended("completed", total=200, failed=3), "1.5%", Exit.OK),
        (ended("completed", total=200, failed=4), "1.5%", Exit.ERROR_LINES),
        (ended("completed", total=10, failed=10), "100%", Exit.OK),
        (ended("failed", codes=("invalid_json_line",)), "100%", Exit.REFUSED),
        (ended("failed", codes=("token_limit_exceeded",)), None, Exit.ENDED_EARLY),
        (ended("expired", total=10), "100%", Exit.ENDED_EARLY),
        (ended("cancelled", total=10), None, Exit.ENDED_EARLY),
    ],
)
def test_how_a_batch_ended_is_its_exit_code(batch: dict[str, Any], allow: str | None, code: Exit) -> None:
    assert exit_of(batch, allow) == code


@pytest.mark.parametrize("text", ["", "x", "-1", "1.5", "101%", "%", "1e3", "1 0", "٣"])
def test_another_form_of_allow_errors_is_wrong_usage(text: str) -> None:
    with pytest.raises(CommandError) as refused:
        allowed_errors(text, 10)
    assert refused.value.code == Exit.USAGE


@given(percent=st.integers(0, 100), fraction=st.integers(0, 99), total=st.integers(0, 10_000_000))
def test_a_percentage_is_exact(percent: int, fraction: int, total: int) -> None:
    if percent == 100:
        fraction = 0
    share = Fraction(percent * 100 + fraction, 10_000)
    assert allowed_errors(f"{percent}.{fraction:02d}%", total) == int(share * total)
