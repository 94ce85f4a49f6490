"""The fake engine answers like an engine, always the same, and testifies to what it runs."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from batchsvc.batches.tools_body import ToolUse, calls_form
from engine.fake import FakeEngine
from engine.request import FinishReason, Request
from engine.structure.grammar import spec_of
from engine.text import load_text
from engine.text.calls import CallFormat, parse_calls
from tests.engine.oracle import request
from tests.schemas import random_schema


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
    assert (cut.finish_reason, cut.stopped_by, whole.stopped_by) == (FinishReason.STOP, stop, None)
    assert len(cut.token_ids) < 30


def formed(name: str, kind: str, value: Any, **params: Any) -> Request:
    made = request(name, [1, 2, len(name)], **{"max_tokens": 400, **params})
    return replace(made, params=replace(made.params, grammar=spec_of(kind, value)))


def test_answers_have_the_form_that_is_asked_for() -> None:
    made = [formed(f"r{seed}", "json", random_schema(seed), seed=seed) for seed in range(40)]
    one, two = list(FakeEngine(None, step_tokens=7).run(made)), list(FakeEngine(None).run(reversed(made)))[::-1]
    assert one == two
    for seed, done in enumerate(one):
        assert done.finish_reason is not FinishReason.ERROR, done.error_message
        if done.finish_reason is FinishReason.STOP:
            jsonschema.validate(json.loads(done.text), random_schema(seed), cls=jsonschema.Draft202012Validator)
        assert done.text and len(done.token_ids) == done.usage.output_tokens


@pytest.mark.parametrize(
    ("kind", "value", "wanted"),
    [
        ("choice", ["ja", "weiß nicht 🙂"], "ja|weiß nicht 🙂"),
        ("regex", r"[A-Z]{2}-\d{3}", r"[A-Z]{2}-\d{3}"),
        ("grammar", 'root ::= "x" | "y" root', "y*x"),
    ],
)
def test_forms_of_every_kind_are_followed(kind: str, value: Any, wanted: str) -> None:
    found = [done.text for done in FakeEngine(None).run(formed(f"r{i}", kind, value, seed=i) for i in range(9))]
    assert all(re.fullmatch(wanted, text) for text in found), found


def test_a_form_obeys_the_parameters_and_one_that_nothing_follows_costs_its_request() -> None:
    endless = {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}}
    cut, least, stopped, bad, worse, good = FakeEngine(None).run(
        [
            formed("cut", "regex", "a{90}b", max_tokens=5),
            formed("least", "regex", "a+", min_tokens=20),
            formed("stopped", "choice", ["one two three"], stop=(" two",), logprobs=1),
            formed("bad", "json", {"not": {}}),
            formed("worse", "json", endless),
            formed("good", "choice", ["yes"]),
        ]
    )
    assert cut.finish_reason in (FinishReason.LENGTH, FinishReason.STOP) and len(cut.token_ids) <= 5
    assert len(least.token_ids) >= 20 and least.finish_reason is FinishReason.STOP
    assert (stopped.text, stopped.stopped_by) == ("one", " two") and len(stopped.logprobs or ()) == 1
    assert (bad.finish_reason, bad.error_code) == (FinishReason.ERROR, "grammar_not_usable")
    assert (worse.finish_reason, worse.error_code) == (FinishReason.ERROR, "grammar_not_usable")
    assert good.text == "yes"


def test_calls_that_must_come_can_be_read() -> None:
    schema = {"type": "object", "properties": {"stars": {"enum": [1, 2, 3]}}, "required": ["stars"]}
    tool = {"type": "function", "function": {"name": "rate", "parameters": schema}}
    use = ToolUse(tools=[tool], must_call=("rate",), max_calls=2)
    for call_format in CallFormat:
        made = request("r", [1, 2], 200, seed=3)
        asked = replace(made, params=replace(made.params, grammar=calls_form(use, call_format)))
        (done,) = FakeEngine(None).run([asked])
        calls = parse_calls(done.text, call_format).calls
        assert calls and all(json.loads(call.arguments)["stars"] in (1, 2, 3) for call in calls)


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
