"""Engines in /metrics, in the workers' list and in `batchsvc top`: from heartbeats, by model and lane."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

from batchsvc.batches.tables import Worker
from batchsvc.cli import main
from batchsvc.cli.top import rows, summary
from batchsvc.clock import now_ms
from batchsvc.engine_metrics import Growth, Series, of_worker
from batchsvc.settings import Settings
from tests.batchsvc.batches.door import DIGEST, MODEL, Door

sqlite = pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)

TIMES = ["80", "ms", "1.5", "s", "80", "ms", "1.5", "s"]


@pytest.fixture
def door(settings: Settings) -> Iterator[Door]:
    made = Door(settings)
    yield made
    made.close()


def stats(**changes: Any) -> dict[str, Any]:
    """As an engine worker says it."""

    def lane(factor: int) -> dict[str, Any]:
        times = {"bounds_s": [0.1, 1.0], "counts": [2 * factor, factor, 0], "sum_s": 0.5, "p50_s": 0.08, "p99_s": 1.5}
        counts = {"prompt_tokens": 100, "hit_tokens": 25, "computed_tokens": 100 * factor, "output_tokens": 10 * factor}
        speeds = {"bounds_tps": [5.0, 50.0], "counts": [1, factor, 0], "sum_tps": 30.0, "p50_tps": 9.0, "p99_tps": 20.0}
        shown = {"running": factor, "waiting": 0, "output_tps": 2.5, "ttft": times, "gaps": times, "speeds": speeds}
        return shown | counts

    return {
        "units": 1,
        "used_blocks": 30,
        "num_blocks": 40,
        "hit_tokens": 50,
        "prompt_tokens": 200,
        "busy_ms": 1500,
        "busy_share": 0.97,
        "buffered_bytes": 7,
        "ended": {"ok": 9, "error": 1, "input_tokens": 90, "cached_tokens": 16, "output_tokens": 40},
        "leases_lost": {"fenced": 2, "gone": 0},
        "lanes": {"interactive": lane(1), "batch": lane(3)},
        "step_times": {"bounds_s": [0.1, 1.0], "counts": [5, 1, 0], "sum_s": 1.5, "p50_s": 0.02, "p99_s": 0.4},
        **changes,
    }


def beat(door: Door, worker_id: str, said: dict[str, Any] | None, *, age_s: float = 0.0) -> None:
    with door.db.transaction() as session:
        row = Worker(id=worker_id, model_digest=DIGEST, beat_ms=now_ms() - round(1000 * age_s), stats=said)
        session.merge(row)


def samples(text: str) -> dict[tuple[str, str, str], float]:
    """By name, lane and bucket."""
    return {
        (one.name, one.labels.get("lane", ""), one.labels.get("le", "")): one.value
        for family in text_string_to_metric_families(text)
        for one in family.samples
        if one.labels.get("model") == MODEL
    }


@sqlite
def test_metrics_add_up_the_workers_of_a_model(door: Door) -> None:
    client = door.client()
    beat(door, "h:1:a", stats())
    beat(door, "h:2:b", stats(lanes={}, step_times={}))  # it has said nothing of them yet
    beat(door, "h:3:c", None)
    beat(door, "h:4:d", stats(), age_s=3600)  # dead
    found = samples(client.get("/metrics").text)
    assert found["batchsvc_ttft_seconds_bucket", "batch", "0.1"] == 6
    assert found["batchsvc_ttft_seconds_bucket", "batch", "1.0"] == 9
    assert found["batchsvc_ttft_seconds_bucket", "batch", "+Inf"] == 9
    assert found["batchsvc_ttft_seconds_count", "batch", ""] == 9
    assert found["batchsvc_inter_token_seconds_sum", "interactive", ""] == 0.5
    assert found["batchsvc_step_seconds_count", "", ""] == 6
    assert found["batchsvc_output_tokens_total", "interactive", ""] == 10
    assert found["batchsvc_requests_running", "batch", ""] == 3
    assert found["batchsvc_output_tokens_per_second", "interactive", ""] == 2.5
    assert found["batchsvc_kv_used_ratio", "", ""] == 0.75
    assert found["batchsvc_prefix_hit_ratio", "", ""] == 0.25
    assert found["batchsvc_engine_busy_seconds_total", "", ""] == 3


@sqlite
def test_lines_tokens_and_speeds_of_all_workers(door: Door) -> None:
    client = door.client()
    beat(door, "h:1:a", stats())
    beat(door, "h:2:b", stats())
    beat(door, "h:3:c", {})  # of an older version
    text = client.get("/metrics").text
    labels = f'model="{MODEL}",model_digest="{DIGEST}"'
    for line in (
        f'batchsvc_lines_total{{{labels},outcome="ok"}} 18.0',
        f'batchsvc_lines_total{{{labels},outcome="error"}} 2.0',
        f'batchsvc_line_tokens_total{{kind="input",{labels}}} 180.0',
        f'batchsvc_line_tokens_total{{kind="output",{labels}}} 80.0',
        f'batchsvc_answer_tokens_per_second_bucket{{lane="batch",le="50.0",{labels}}} 8.0',
        f'batchsvc_answer_tokens_per_second_sum{{lane="batch",{labels}}} 60.0',
    ):
        assert line in text.splitlines(), line
    assert "batchsvc_worker_" not in text, "a sum over processes counts nothing twice"


def test_a_worker_shows_the_same_of_itself_under_names_of_its_own() -> None:
    registry = CollectorRegistry()
    registry.register(Own(stats()))
    text = generate_latest(registry).decode()
    assert not re.search(r"^batchsvc_(?!worker_)", text, re.MULTILINE)
    labels = f'model="{MODEL}",model_digest="{DIGEST}"'
    for line in (
        "batchsvc_worker_units 1.0",
        "batchsvc_worker_buffered_bytes 7.0",
        'batchsvc_worker_leases_lost_total{outcome="fenced"} 2.0',
        f"batchsvc_worker_kv_used_ratio{{{labels}}} 0.75",
        f'batchsvc_worker_requests_running{{lane="batch",{labels}}} 3.0',
        f'batchsvc_worker_ttft_seconds_count{{lane="batch",{labels}}} 9.0',
        f'batchsvc_worker_lines_total{{{labels},outcome="error"}} 1.0',
    ):
        assert line in text.splitlines(), line


class Own(Collector):
    """A worker that says this of itself."""

    def __init__(self, said: dict[str, Any]) -> None:
        self._said = said

    def collect(self) -> Iterator[Metric]:
        return of_worker(self._said, (MODEL, DIGEST))


@sqlite
def test_counters_dont_fall_when_a_worker_ends_and_gauges_do(door: Door) -> None:
    client = door.client()
    beat(door, "h:1:a", stats())
    first = samples(client.get("/metrics").text)
    with door.db.transaction() as session:
        session.delete(session.get_one(Worker, "h:1:a"))
    later = samples(client.get("/metrics").text)
    assert [seen["batchsvc_output_tokens_total", "batch", ""] for seen in (first, later)] == [30, 30]
    assert ("batchsvc_requests_running", "batch", "") not in later
    beat(door, "h:1:b", stats())
    assert samples(client.get("/metrics").text)["batchsvc_output_tokens_total", "batch", ""] == 60


@given(st.lists(st.dictionaries(st.sampled_from("abc"), st.integers(0, 50), max_size=3), max_size=20))
def test_sums_grow_by_what_each_worker_did_whoever_comes_and_goes(steps: list[dict[str, int]]) -> None:
    growth, done = Growth(), dict.fromkeys("abc", 0)
    for step in steps:
        for worker, more in step.items():
            done[worker] += more
        seen = growth.look({worker: {Series("x", ()): float(done[worker])} for worker in step})
        assert seen.get(Series("x", ()), 0.0) == sum(done.values())


def test_of_two_looks_at_once_the_older_one_may_come_last() -> None:
    growth, seen = Growth(), Series("x", ())
    assert [growth.look({"a": {seen: count}})[seen] for count in (100.0, 110.0, 100.0, 120.0)] == [100, 110, 110, 120]


@sqlite
def test_an_operator_sees_the_workers(door: Door) -> None:
    client = door.client()
    beat(door, "h:1:a", stats())
    (worker,) = client.get("/v1/admin/workers").json()["data"]
    assert worker["model"] == MODEL and worker["silent_s"] < 60
    assert (worker["kv_share"], worker["hit_share"], worker["busy_share"]) == (0.75, 0.25, 0.97)
    assert worker["lanes"]["interactive"]["ttft_p99_s"] == 1.5
    assert [lane["share"] for lane in worker["lanes"].values()] == [0.25, 0.75]


def run_top(monkeypatch: pytest.MonkeyPatch, door: Door, *arguments: str) -> int:
    monkeypatch.setenv("DATABASE_URL", door.settings.database_url)
    monkeypatch.setenv("REDIS_URL", door.settings.redis_url)
    monkeypatch.setattr(sys, "argv", ["batchsvc", "top", "--from-env", *arguments])
    with pytest.raises(SystemExit) as ended:
        main()
    return int(ended.value.code or 0)


@sqlite
def test_top_shows_lanes_in_plain_lines_or_json(
    door: Door, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_top(monkeypatch, door, "--once") == 0
    assert capsys.readouterr().out == "No engine worker is alive.\n"
    beat(door, "host:17:abc", stats())
    assert run_top(monkeypatch, door, "--once") == 0
    said, head, urgent, batch = capsys.readouterr().out.splitlines()
    assert said == "1 worker: 4 running, 0 waiting, 5 tokens/s"
    assert head.split()[:5] == ["worker", "model", "lane", "running", "waiting"]
    assert urgent.split() == [
        "host:17",
        MODEL,
        "interactive",
        "1",
        "0",
        "2.5",
        "25",
        "%",
        *TIMES,
        "75",
        "%",
        "25",
        "%",
        "97",
        "%",
    ]
    assert batch.split() == ["batch", "3", "0", "2.5", "75", "%", *TIMES]
    assert run_top(monkeypatch, door, "--json") == 0
    assert json.loads(capsys.readouterr().out)["data"][0]["lanes"]["batch"]["running"] == 3


def test_a_live_table_is_made_of_the_same_rows() -> None:
    from batchsvc.batches.engine_view import view
    from batchsvc.cli.top import _table

    def one(worker_id: str, said: dict[str, Any]) -> dict[str, Any]:
        return view(said, worker_id=worker_id, model="m", model_digest="d", is_draining=True, silent_s=1.0)

    page = {"data": [one("h:1:a", stats()), one("h:2:b", {})]}
    table = _table(page)
    assert table.row_count == len(rows(page)) == 4
    assert [row["worker"] for row in rows(page)] == ["h:1 (draining)", "", "h:2 (draining)", ""]
    assert rows(page)[2]["ttft p50"] == "-"
    assert summary(page).startswith("2 workers")
