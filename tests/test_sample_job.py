"""The job that README begins with is what a newcomer should see: varied, realistic, greedy, and it shares a prefix."""

from __future__ import annotations

import json
from pathlib import Path

from engine.load.fetch import locate
from engine.text import load_text

LINES = [json.loads(line) for line in (Path(__file__).parent / "data/tickets.jsonl").read_bytes().splitlines()]


def test_64_greedy_requests_that_differ() -> None:
    assert len({line["custom_id"] for line in LINES}) == len(LINES) == 64
    assert {(line["method"], line["url"]) for line in LINES} == {("POST", "/v1/chat/completions")}
    bodies = [line["body"] for line in LINES]
    assert {(body["model"], body["temperature"]) for body in bodies} == {("smollm2-135m", 0)}
    assert min(body["max_tokens"] for body in bodies) >= 30
    assert len({body["messages"][-1]["content"] for body in bodies}) == 64


def test_they_share_a_system_prompt_of_about_500_tokens() -> None:
    (system,) = {line["body"]["messages"][0]["content"] for line in LINES}
    assert {line["body"]["messages"][0]["role"] for line in LINES} == {"system"}
    assert 450 <= len(load_text(locate("smollm2-135m")).tokenizer.encode(system)) <= 550
