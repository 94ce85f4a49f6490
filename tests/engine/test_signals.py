"""What an engine tells of its speed: counts by bucket, quantiles of the last, rates over ten seconds; real and fake."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.config import EngineConfig
from engine.engine import Engine
from engine.errors import RequestError
from engine.fake import FakeEngine
from engine.request import Lane
from engine.sched.counters import Counters
from engine.signals import GAP_BOUNDS_S, SPEED_BOUNDS_TPS, TTFT_BOUNDS_S, Signals, Times, quantile
from tests.engine.oracle import OracleRunner, request


def make_engine(**settings: object) -> Engine:
    config = EngineConfig(model="", block_tokens=4, step_tokens=32, max_running=8, **settings)
    return Engine(config, runner=OracleRunner(4, 64))


@given(st.lists(st.floats(0, 1000), min_size=1, max_size=50))
def test_each_value_is_in_the_bucket_whose_bound_it_doesnt_exceed(values: list[float]) -> None:
    times = Times(TTFT_BOUNDS_S)
    for value in values:
        times.observe(value)
    found = times.shown()
    below = 0
    for bound_s, count in zip(found["bounds_s"], found["counts"], strict=False):
        below += count
        assert below == sum(value <= bound_s for value in values)
    assert sum(found["counts"]) == len(values)
    assert found["sum_s"] == pytest.approx(sum(values), rel=1e-6, abs=1e-6)
    ordered = sorted(values)
    assert ordered[(len(values) - 1) // 2] == found["p50_s"]
    assert found["p99_s"] == ordered[-1], "the largest of so few"


def test_quantiles() -> None:
    assert quantile([], 0.5) is None
    assert [quantile(range(1, 101), share) for share in (0.0, 0.5, 0.99, 1.0)] == [1, 50, 99, 100]


def test_times_are_told_by_lane_and_from_the_arrival() -> None:
    signals = Signals()
    signals.arrive("u", 1.0)
    signals.arrive("b", 1.0)
    signals.token("u", "u", Lane.INTERACTIVE, 1.2)
    for now_s in (1.25, 1.25, 1.35):  # the first two came at once
        signals.token("u", "u", Lane.INTERACTIVE, now_s)
    signals.token("b", "b", Lane.BATCH, 41.0)
    lanes = signals.shown(Counters(), 50.0)["lanes"]
    assert [sum(lanes[name]["ttft"]["counts"]) for name in ("interactive", "batch")] == [1, 1]
    assert lanes["interactive"]["ttft"]["p50_s"] == pytest.approx(0.2)
    assert lanes["batch"]["ttft"]["p50_s"] == pytest.approx(40.0)
    assert sum(lanes["interactive"]["gaps"]["counts"]) == 2
    assert lanes["interactive"]["gaps"]["p99_s"] == pytest.approx(0.1)


def test_the_speed_of_an_answer_is_that_of_its_tokens_after_the_first() -> None:
    signals = Signals()
    for now_s in (1.0, 1.5, 1.5, 2.0):
        signals.token("u", "u", Lane.INTERACTIVE, now_s)
    signals.token("short", "short", Lane.INTERACTIVE, 3.0)
    for seq_id in ("u", "short", "unknown"):
        signals.end(seq_id)
    speeds = signals.shown(Counters(), 50.0)["lanes"]["interactive"]["speeds"]
    assert (speeds["sum_tps"], sum(speeds["counts"])) == (3.0, 1), "3 tokens in a second; one token has no speed"
    assert speeds["bounds_tps"] == list(SPEED_BOUNDS_TPS)
    assert not signals._began


def test_tokens_a_second_are_those_of_the_last_ten_seconds() -> None:
    signals, counters = Signals(), Counters()
    seen = []
    for second in range(40):
        counters.lanes[Lane.BATCH].output_tokens += 50 if second < 20 else 0
        seen.append(signals.shown(counters, float(second))["lanes"]["batch"]["output_tps"])
    assert seen[15] == pytest.approx(50, rel=0.1)
    assert seen[24] == pytest.approx(25, rel=0.1)
    assert seen[39] == 0


@pytest.mark.parametrize("kind", ["real", "fake"])
def test_an_engine_tells_what_it_ran_as_plain_data_and_forgets_what_ended(kind: str) -> None:
    engine = make_engine() if kind == "real" else FakeEngine(None, step_tokens=8)
    for number in range(6):
        engine.add(request(f"r{number}", [1 + number] * 9, 5, lane=number % 2, ignore_eos=True))
    engine.add(request("bad", [], 5))
    with pytest.raises(RequestError):
        engine.add(request("r0", [1], 5))
    engine.step()
    engine.abort("r5")
    while engine.has_work():
        engine.step()
    found = json.loads(json.dumps(engine.signals()))
    urgent, batch = found["lanes"]["interactive"], found["lanes"]["batch"]
    assert (urgent["prompt_tokens"], urgent["output_tokens"]) == (27, 15)
    assert sum(urgent["ttft"]["counts"]) == 3
    assert sum(found["step_times"]["counts"]) == engine.stats().steps
    assert [lane[name] for lane in (urgent, batch) for name in ("running", "waiting")] == [0, 0, 0, 0]
    assert found["step_times"]["bounds_s"] == list(GAP_BOUNDS_S)
    assert not engine._signals._arrived_s and not engine._signals._told_s


def test_steps_are_measured_for_the_dial_where_there_are_targets() -> None:
    for settings, is_measured in (({}, False), ({"itl_target_ms": 50.0}, True)):
        engine = make_engine(**settings)
        before = engine._dial._measured.costs
        list(engine.run([request("r", [1, 2, 3], 4)]))
        assert (engine._dial._measured.costs != before) == is_measured


def test_the_fake_engine_runs_interactive_requests_first_and_takes_places_from_batch_work() -> None:
    engine = FakeEngine(None, max_running=2, step_tokens=4)
    for number in range(4):
        engine.add(request(f"b{number}", [1 + number], 40, ignore_eos=True))
    engine.step()
    engine.add(request("u", [9], 6, lane=Lane.INTERACTIVE, ignore_eos=True))
    served = engine.step().new_tokens
    assert next(iter(served)) == "u" and len(served) == 2
    ended = []
    while engine.has_work():
        ended += [completion.request_id for completion in engine.step().completions]
    assert ended[0] == "u" and sorted(ended) == ["b0", "b1", "b2", "b3", "u"]
    assert engine.stats().preemptions == 1
