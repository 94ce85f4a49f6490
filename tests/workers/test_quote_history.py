"""Quotes go by the answers of what ended before: of the same endpoint, and by the answer where lines have several."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from batchsvc.settings import Settings
from tests.batchsvc.batches.planned import URL, jsonl, line
from tests.batchsvc.batches.quoting import Quoting, quoting
from tests.workers.test_quote_bill import run

LINES, ANSWERS, TOKENS = 40, 4, 5


@pytest.fixture
def door(sqlite_settings: Settings, tiny: tuple[Path, str]) -> Iterator[Quoting]:
    with quoting(sqlite_settings, tiny[0]) as made:
        yield made


def finish(door: Quoting, data: bytes, url: str = URL) -> int:
    """Runs these lines. Returns the output tokens of all of them."""
    answer = door.create(door.upload(data), endpoint=url)
    assert answer.status_code == 200, answer.text
    batch_id = answer.json()["id"]
    door.planned.plan(batch_id)
    batch = run(door, [batch_id], crashes=False).batch(batch_id)
    assert batch.completed == LINES
    return batch.output_tokens


def quoted(door: Quoting, **body: Any) -> tuple[str, dict[str, int]]:
    """What a quote of ten lines goes by, and what it says of the cost of their answers."""
    quote = door.quote(jsonl(*(line(f"q{number}", f"Question {number}", **body) for number in range(10))))
    return quote["output_basis"], quote["cost"]["output_nanos"]


def test_only_answers_of_the_same_endpoint_count_and_each_by_itself(door: Quoting) -> None:
    before = quoted(door, max_tokens=400)
    assert before[0] == "max_tokens" and 0 < before[1]["expected"] < before[1]["high"]
    url = "/v1/embeddings"
    head = {"method": "POST", "url": url}
    texts = (
        head | {"custom_id": f"c{n}", "body": {"model": "tiny", "input": f"Text {n}"}} for n in range(1, LINES + 1)
    )
    assert finish(door, jsonl(*texts), url) == 0
    assert quoted(door, max_tokens=400) == before

    several = {"n": ANSWERS, "max_tokens": TOKENS, "ignore_eos": True}
    asked = jsonl(*(line(f"c{n}", f"Ticket {n}", **several) for n in range(1, LINES + 1)))
    assert finish(door, asked) == LINES * ANSWERS * TOKENS
    single = 10 * TOKENS * 40_000 // 1_000  # nano-dollars of ten such answers
    assert quoted(door, max_tokens=400) == ("finished_lines", {"low": single, "expected": single, "high": single})
    assert quoted(door, max_tokens=400, n=2)[1]["expected"] == 2 * single
