"""`batchsvc quote` against a running stack: the table, the exit codes, and a run at the quoted prices."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from tests.e2e.conftest import Result, Stack, line, read_lines, write_lines

LONG = "You are a careful assistant. Sort the text below into one of four groups and say why in one sentence."


def test_a_file_is_quoted_and_run_at_that_price(stack: Stack, stack_cli: Callable[..., Result], tmp_path: Path) -> None:
    rows = [
        line(i, stack.model, messages=[{"role": "user", "content": f"Ticket {i} is about parcel {i}.\n{LONG}"}])
        for i in range(40)
    ]
    source = write_lines(tmp_path / "in.jsonl", rows)
    quoted = stack_cli("quote", source, "--json")
    assert quoted.code == 0, quoted.err
    quote = quoted.json
    assert (quote["object"], quote["status"], quote["request_counts"]["total"]) == ("quote", "ready", 40)
    assert quote["advice"]["moved_lines"] == 40 and quote["advice"]["saved_nanos"] > 0
    told = stack_cli("quote", source)
    assert told.code == 0, told.err
    for words in ("low", "expected", "high", "Advice: in 40 of 40 lines", "--quote quote_", "You are a careful"):
        assert words in told.out
    sampled = stack_cli("quote", source, "--sample", 10)
    assert "Estimate" in sampled.out and "10 of 40 lines" in sampled.out and "--quote" not in sampled.out
    ran = stack_cli("run", source, "-o", tmp_path / "out.jsonl", "--quote", quote["id"], "--json")
    assert ran.code == 0, ran.err
    assert ran.json["quote_id"] == quote["id"]
    assert ran.json["usage"]["input_tokens"] == quote["usage"]["input_tokens"]
    assert ran.json["usage"]["cost_nanos"] <= quote["cost"]["most_nanos"]
    assert len(read_lines(tmp_path / "out.jsonl")) == 40


def test_refused_input_ends_with_4(stack: Stack, stack_cli: Callable[..., Result], tmp_path: Path) -> None:
    source = write_lines(tmp_path / "bad.jsonl", [line(1, stack.model), b"{broken", line(1, stack.model)])
    refused = stack_cli("quote", source)
    assert refused.code == 4 and "line 2: " in refused.err and "line 3: " in refused.err
    assert stack_cli("quote", source, "--json").json["errors_total"] == 2
    skipped = stack_cli("quote", source, "--skip-invalid")
    assert skipped.code == 0 and "2 of them rejected" in skipped.out
    assert stack_cli("quote", source, "--window", "9h").code == 4
    assert stack_cli("quote", tmp_path / "none.jsonl").code == 2
    changed = write_lines(tmp_path / "good.jsonl", [line(1, stack.model)])
    quote_id = stack_cli("quote", changed, "--json").json["id"]
    write_lines(changed, [line(2, stack.model)])
    late = stack_cli("run", changed, "-o", tmp_path / "o.jsonl", "--quote", quote_id)
    assert late.code == 4 and "SHA-256" in late.err


def test_a_long_file_is_planned_by_the_control_worker(
    stack: Stack, stack_cli: Callable[..., Result], tmp_path: Path
) -> None:
    source = write_lines(tmp_path / "long.jsonl", [line(i, stack.model) for i in range(2_100)])
    quoted = stack_cli("quote", source, "--json")
    assert quoted.code == 0 and "is being planned" in quoted.err
    assert quoted.json["request_counts"]["total"] == 2_100
