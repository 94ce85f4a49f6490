"""Rows of rejected lines and keys of folded ones are kept for a whole window: they take what they hold."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable

import orjson
import pytest

from batchsvc.batches.part_file import error_row
from batchsvc.batches.window import fold_key
from batchsvc.json_bytes import compact_json

MANY = 500


def rejected(number: int) -> bytes:
    return error_row(
        batch_id="b", line_no=number, custom_id=None, code="invalid", message="No.", param=None, status=400
    )


def folded(number: int) -> bytes | None:
    return fold_key({"temperature": 0, "seed": number, "stop": [f"end {number}"]})


@pytest.mark.parametrize("make", [rejected, folded])
def test_what_is_kept_has_no_spare_room(make: Callable[[int], bytes | None]) -> None:
    make(0)
    tracemalloc.start()
    try:
        kept = [make(number) for number in range(MANY)]
        size, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert size < sum(len(one or b"") + 200 for one in kept)


def test_it_says_what_the_encoder_says() -> None:
    value = {"b": [1, None, "ü"], "a": 2.5}
    assert compact_json(value) == orjson.dumps(value)
    assert compact_json(value, orjson.OPT_SORT_KEYS) == orjson.dumps(value, option=orjson.OPT_SORT_KEYS)
