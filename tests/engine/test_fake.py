"""The fake engine answers like an engine, always the same, and testifies to what it runs."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from engine.fake import FakeEngine
from engine.request import FinishReason
from engine.text import load_text
from tests.engine.oracle import request


def test_answers_depend_on_prompt_and_seed_alone() -> None:
    requests = [request(f"r{i}", [1, 2, i % 5], 30, seed=i % 2) for i in range(20)]
    one = list(FakeEngine(None, max_running=1, step_tokens=3).run(requests))
    two = list(FakeEngine(None, max_running=64).run(reversed(requests)))[::-1]
    assert one == two
    assert len({c.text for c in one}) == 10
    for made, completion in zip(requests, one, strict=True):
        assert completion.request_id == made.id
        assert completion.text
        assert 1 <= len(completion.token_ids) == completion.usage.output_tokens <= 30
        assert completion.finish_reason in (FinishReason.STOP, FinishReason.LENGTH)
    assert {c.finish_reason for c in one} == {FinishReason.STOP, FinishReason.LENGTH}


def test_lengths_obey_the_parameters() -> None:
    exact, least, single = FakeEngine(None).run(
        [
            request("exact", [1], 700, ignore_eos=True),
            request("least", [1], 700, min_tokens=200),
            request("single", [1], 1),
        ]
    )
    assert len(exact.token_ids) == 700 and exact.usage.steps >= single.usage.steps == 1
    assert len(least.token_ids) >= 200
    assert len(single.token_ids) == 1


def test_a_stop_string_cuts_the_text() -> None:
    (whole,) = FakeEngine(None).run([request("r", [1, 2], 30, ignore_eos=True)])
    stop = whole.text.split()[5]
    (cut,) = FakeEngine(None).run([request("r", [1, 2], 30, ignore_eos=True, stop=(stop,))])
    assert cut.text == whole.text[: whole.text.index(stop)]
    assert cut.finish_reason is FinishReason.STOP
    assert len(cut.token_ids) < 30


def test_the_witness_sees_every_execution_begin_and_end(tmp_path: Path) -> None:
    witness = tmp_path / "witness.jsonl"
    engine = FakeEngine(None, witness=witness, max_running=3, step_tokens=10)
    engine.add(request("cut", [9], 5_000, ignore_eos=True))
    engine.step()
    seen = [json.loads(line)["event"] for line in witness.read_text().splitlines()]
    assert seen == ["start", "tokens"], "flushed at once"
    engine.abort("cut")
    list(engine.run(request(f"r{i}", [i], 9) for i in range(7)))
    entries = [json.loads(line) for line in witness.read_text().splitlines()]
    events = Counter((e["event"], e["id"]) for e in entries if "id" in e)
    assert events == Counter(
        (event, name) for event in ("start", "end") for name in ["cut", *(f"r{i}" for i in range(7))]
    )
    list(engine.run([request("r0", [0], 9)]))
    engine.close()
    lines = [json.loads(line) for line in witness.read_text().splitlines()]
    assert sum(e == {"event": "start", "id": "r0", "t": e["t"]} for e in lines) == 2, "a second execution is seen"


def test_at_most_max_running_run_and_steps_give_new_tokens() -> None:
    engine = FakeEngine(None, max_running=2, step_tokens=16)
    for i in range(5):
        engine.add(request(f"r{i}", [i], 12, ignore_eos=True))
    streams: dict[str, list[int]] = {}
    while engine.has_work():
        output = engine.step()
        assert sum(map(len, output.new_tokens.values())) <= 16
        assert engine.stats().running <= 2
        for name, tokens in output.new_tokens.items():
            streams.setdefault(name, []).extend(tokens)
        for completion in output.completions:
            assert tuple(streams[completion.request_id]) == completion.token_ids
    assert len(streams) == 5
    assert engine.num_unfinished() == 0


def test_a_bad_prompt_is_an_error_completion_as_with_the_engine(tiny_model: Path) -> None:
    engine = FakeEngine(load_text(tiny_model))
    codes = [c.error_code for c in engine.run([request("a", []), request("b", [1] * 512), request("c", [999_999])])]
    assert codes == ["invalid_value", "context_length_exceeded", "invalid_value"]


def test_aborts_reach_waiting_and_running_requests() -> None:
    engine = FakeEngine(None, max_running=1, step_tokens=4)
    for name in ("runs", "waits", "stays"):
        engine.add(request(name, [1], 10, ignore_eos=True))
    engine.step()
    engine.abort("waits")
    engine.abort("runs")
    reasons = {}
    while engine.has_work():
        reasons |= {c.request_id: (c.finish_reason, len(c.token_ids)) for c in engine.step().completions}
    assert reasons == {
        "runs": (FinishReason.ABORT, 4),
        "waits": (FinishReason.ABORT, 0),
        "stays": (FinishReason.LENGTH, 10),
    }


@pytest.mark.parametrize("module", ["engine.fake", "engine.engine", "engine.sched.scheduler", "engine.sched.order"])
def test_the_pure_core_loads_no_torch(module: str) -> None:
    code = f"import sys, {module}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
