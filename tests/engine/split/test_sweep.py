"""Simulated pools: every line is answered once, blocks cross as they should, and what a sweep says is what it ran."""

from __future__ import annotations

import json
from pathlib import Path
from xml.etree import ElementTree

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.request import FinishReason
from engine.sched.sim import CostModel, Machine, as_they_came, planned
from engine.split import sweep
from engine.split.sweep import Pools, Setting, main, make_mix

EQUAL = Setting(machine=Machine(), prefill=CostModel(), decode=CostModel(), link_bytes_per_s=1e9, token_bytes=23_040)


@settings(max_examples=30, deadline=None)
@given(
    num_lines=st.integers(1, 20),
    prompt=st.integers(2, 70),
    shared=st.integers(0, 40),
    output=st.integers(1, 20),
    prefill_hosts=st.integers(0, 3),
    decode_hosts=st.integers(1, 3),
    num_blocks=st.sampled_from([None, 12, 30]),
    link=st.sampled_from([1e3, 1e9]),
)
def test_every_line_is_answered_once_on_any_hosts(
    num_lines: int,
    prompt: int,
    shared: int,
    output: int,
    prefill_hosts: int,
    decode_hosts: int,
    num_blocks: int | None,
    link: float,
) -> None:
    lines = make_mix(num_lines, prompt_tokens=prompt + shared, output_tokens=output, shared_tokens=shared)
    setting = Setting(
        machine=Machine(num_blocks=num_blocks, step_tokens=64, max_running=4),
        prefill=CostModel(),
        decode=CostModel(),
        link_bytes_per_s=link,
        token_bytes=100,
    )
    pieces = as_they_came(lines, unit_lines=5)
    pools = Pools(lines, pieces, setting, prefill_hosts=prefill_hosts, decode_hosts=decode_hosts)
    result = pools.run()
    assert result.finished.keys() == set(range(num_lines))
    for number, reason in result.finished.items():
        line = lines[number]
        fits = num_blocks is None or line.num_prompt_tokens + line.output_tokens - 1 <= 16 * num_blocks
        assert (reason is not FinishReason.ERROR) == fits
    answered = [lines[n] for n, reason in result.finished.items() if reason is not FinishReason.ERROR]
    assert result.output_tokens >= sum(line.output_tokens for line in answered)
    for host in (*pools.prefills, *pools.decodes):
        host.scheduler.check_integrity()
        assert not host.scheduler.has_work()
        assert host.busy_s <= result.seconds + 1e-9
    assert not any(pools._open_blocks.values()), "room is promised to nobody"


def test_a_shared_prefix_crosses_once_for_each_decode_host() -> None:
    lines = make_mix(16, prompt_tokens=160, output_tokens=4, shared_tokens=128)
    own = sum(line.num_prompt_tokens // 16 - 8 for line in lines)
    for decode_hosts in (1, 2):
        pools = Pools(lines, planned(lines), EQUAL, prefill_hosts=1, decode_hosts=decode_hosts)
        assert pools.run().sent_blocks == own + 8 * decode_hosts


def test_what_a_sweep_says(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plot = tmp_path / "ratios.svg"
    options = ("--hosts", "3", "--lines", "24", "--prompt", "100", "--output", "10", "--plot", str(plot))
    assert main(options) == 0
    found = json.loads(capsys.readouterr().out)
    assert [row["prefill_hosts"] for row in found["two_pools"]] == [1, 2]
    assert found["best_over_one_pool"] < 1, "equal hosts do better together"
    assert found["one_pool"]["sent_bytes"] == 0 < found["two_pools"][0]["sent_bytes"]
    for row in found["two_pools"]:
        assert row["gap_p99_ms"] < found["one_pool"]["gap_p99_ms"], "apart, no prompt holds a decode up"
        assert 0 < row["prefill_busy"] <= 1
        assert 0 < row["decode_busy"] <= 1
    drawn = ElementTree.parse(plot).getroot()
    assert len(drawn.findall("{*}circle")) == 4
    assert len(drawn.findall("{*}polyline")) == 2


def test_hosts_that_differ_do_better_apart(capsys: pytest.CaptureFixture[str]) -> None:
    costs = ("--cost", "0.02:0.0003:0.000002", "--prefill-cost", "0.03:0.00003:0.00002")
    assert main(("--hosts", "3", "--lines", "32", "--prompt", "800", "--output", "20", *costs)) == 0
    assert json.loads(capsys.readouterr().out)["best_over_one_pool"] > 1


@pytest.mark.parametrize("bad", [("--hosts", "1"), ("--shared", "512"), ("--cost", "fast"), ("--cost", "1:-1:0")])
def test_what_can_not_be_swept_is_said(capsys: pytest.CaptureFixture[str], bad: tuple[str, str]) -> None:
    assert main(bad) == 2
    assert capsys.readouterr().err.count("\n") == 1
    assert sweep._COST.count(":") == 2
