"""`models size --split` as it is typed: one pool usually wins, it says by how much, and bad options get a sentence."""

from __future__ import annotations

import json
import sys

import pytest

from batchsvc.cli import main

LARGE = ("--model", "llama-70b", "--context", "8k", "--split")


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["batchsvc", "models", "size", *arguments])
    with pytest.raises(SystemExit) as ended:
        main()
    return int(ended.value.code or 0)


def test_one_pool_wins_on_the_cards_there_are(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, *LARGE, "--mix", "2048:256:50", "--json") == 0
    found = json.loads(capsys.readouterr().out)["split"]
    assert (found["prompt_tokens"], found["cached_tokens"], found["output_tokens"]) == (2048, 1024, 256)
    assert [split["decode_card"] for split in found["splits"]] == ["H100"] * len(found["splits"])
    cheapest = min(pool["cost_nanos_per_1000_requests"] for pool in found["pools"])
    assert all(split["cost_nanos_per_1000_requests"] >= cheapest for split in found["splits"])
    assert not found["pays"]
    assert found["sentence"].startswith("One pool of MI300X wins: ")


def test_the_table_ends_with_the_verdict(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(monkeypatch, *LARGE) == 0
    said = capsys.readouterr().out
    assert "prompts of 1,024 tokens, answers of 256" in said
    assert "  one pool, H100 " in said
    assert "  MI300X + H100 " in said
    assert "wins: apart, the arithmetic of prompts can't hide behind the reading of decodes" in " ".join(said.split())


def test_without_the_option_nothing_is_said_of_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, *LARGE[:-1], "--json") == 0
    assert "split" not in json.loads(capsys.readouterr().out)


@pytest.mark.parametrize(
    ("bad", "says"),
    [
        (("--mix", "fast"), "--mix takes tokens of a prompt and of an answer"),
        (("--mix", "0:5"), "--mix takes tokens of a prompt and of an answer"),
        (("--mix", "200000:5"), "this model's context holds"),
        (("--prefill-card", "abacus"), "There is no card 'abacus'"),
        (("--card", "80:5000"), "Nobody knows how fast card computes"),
        (("--prefill-card", "80:5000"), "Nobody knows how fast card computes"),
    ],
)
def test_what_can_not_be_reckoned_is_one_sentence(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], bad: tuple[str, ...], says: str
) -> None:
    assert run(monkeypatch, *LARGE, *bad) == 2
    error = capsys.readouterr().err
    assert says in error
    assert error.count("\n") == 1
