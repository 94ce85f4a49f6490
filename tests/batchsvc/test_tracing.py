"""Traces by OTLP: ids that every process agrees on, sampling as a whole, and nothing at all without an endpoint."""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from batchsvc import tracing
from batchsvc.settings import Settings, SettingsError
from tests.otlp import Collector, collecting

SERVICES = {"DATABASE_URL": "sqlite:////x", "REDIS_URL": "redis://127.0.0.1"}


@pytest.fixture
def collector() -> Iterator[Collector]:
    with collecting() as made:
        yield made
    tracing.stop()


def record_a_life() -> None:
    """As several processes would, in any order."""
    unit = tracing.about_unit("unit_1", 2)
    tracing.record("part.write", {"n": 3}, file_id="file_1", began_ns=50, ended_ns=60, parent=unit)
    tracing.record(
        "unit.run", {}, file_id="file_1", began_ns=40, ended_ns=70, own=unit, parent=tracing.about_batch("batch_1")
    )
    above = tracing.about_upload("file_1")
    tracing.record(
        "batch", {}, file_id="file_1", began_ns=20, ended_ns=90, own=tracing.about_batch("batch_1"), parent=above
    )
    tracing.uploaded("file_1", began_ns=10)


def test_spans_find_each_other_without_meeting(collector: Collector) -> None:
    tracing.start(collector.url + "/", "engine")
    assert tracing.is_on()
    record_a_life()
    tracing.stop()
    assert not tracing.is_on()
    spans = {span.name: span for span in collector.spans}
    assert len(spans) == len(collector.spans) == 4
    assert {span.trace_id for span in spans.values()} == {f"{tracing.trace_id_of('file_1'):032x}"}
    assert spans["file.upload"].parent_id == ""
    assert spans["batch"].parent_id == spans["file.upload"].span_id
    assert spans["unit.run"].parent_id == spans["batch"].span_id
    assert spans["part.write"].parent_id == spans["unit.run"].span_id
    assert (spans["unit.run"].began_ns, spans["unit.run"].ended_ns) == (40, 70)
    assert spans["part.write"].said == {"n": 3} and spans["part.write"].service == "batchsvc-engine"


def test_each_file_has_its_own_trace() -> None:
    ids = {tracing.trace_id_of(f"file_{number}") for number in range(100)}
    assert len(ids) == 100 and all(0 < one < 2**128 for one in ids)
    about = [
        tracing.about_upload("x"),
        tracing.about_batch("x"),
        tracing.about_unit("x", 1),
        tracing.about_unit("x", 2),
    ]
    assert len({tracing.span_id_of(one) for one in about}) == 4


def test_a_sampler_takes_traces_whole(collector: Collector, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", "parentbased_traceidratio")
    monkeypatch.setenv("OTEL_TRACES_SAMPLER_ARG", "0.5")
    tracing.start(collector.url, "api")
    for number in range(40):
        tracing.uploaded(f"file_{number}", began_ns=1)
        tracing.record("x", {}, file_id=f"file_{number}", began_ns=1, parent=tracing.about_upload(f"file_{number}"))
    tracing.stop()
    counts = [sum(span.trace_id == one for span in collector.spans) for one in {s.trace_id for s in collector.spans}]
    assert set(counts) == {2} and 5 <= len(counts) <= 35, "by the hashes of these names, not by chance"


def test_a_collector_that_is_away_costs_nobody_anything(collector: Collector) -> None:
    collector.status = 400
    tracing.start(collector.url, "api")
    tracing.uploaded("file_1", began_ns=1)
    tracing.stop()
    assert len(collector.bodies) == 1 and collector.spans == []


@pytest.mark.parametrize("is_listening", [False, True], ids=["refused", "silent"])
def test_the_end_waits_for_no_collector(is_listening: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """OpenTelemetry alone would wait half a minute for one that accepts calls and never answers."""
    monkeypatch.setattr(tracing, "_CLOSE_MS", 200)
    waited: list[float | None] = []
    join = threading.Thread.join

    def noted(thread: threading.Thread, timeout: float | None = None) -> None:
        if thread.name == "tracing-close":
            waited.append(timeout)
        join(thread, timeout)

    monkeypatch.setattr(threading.Thread, "join", noted)
    with socket.socket() as port:
        port.bind(("127.0.0.1", 0))
        if is_listening:
            port.listen()
        tracing.start(f"http://127.0.0.1:{port.getsockname()[1]}", "api")
        tracing.uploaded("file_1", began_ns=1)
        tracing.stop()
        ending = [thread for thread in threading.enumerate() if thread.name == "tracing-close"]
        assert waited == [0.2] and not tracing.is_on()
        assert ending or not is_listening, "it is let go of while it still waits"
        assert all(thread.daemon for thread in ending), "nor does the end of the process"


def test_nothing_is_made_or_imported_without_an_endpoint(tmp_path: Path) -> None:
    script = (  # redis imports the interface of metrics by itself, where it is installed
        "import sys, workers.__main__, batchsvc.app; from batchsvc import tracing; tracing.start(None, 'api');"
        "tracing.uploaded('file_1', began_ns=1); tracing.stop();"
        "print([one for one in sys.modules if one.startswith(('opentelemetry.exporter', 'opentelemetry.sdk.trace'))])"
    )
    done = subprocess.run(
        [sys.executable, "-P", "-c", script], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"


def test_without_the_extra_the_start_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry", None)
    with pytest.raises(tracing.TracingError, match=r"OTEL_EXPORTER_OTLP_ENDPOINT.*batchsvc\[otel\]"):
        tracing.start("http://127.0.0.1:4318", "api")
    assert not tracing.is_on()


def test_an_endpoint_that_is_no_url_stops_the_start() -> None:
    with pytest.raises(SettingsError, match="OTEL_EXPORTER_OTLP_ENDPOINT"):
        Settings.from_env({**SERVICES, "OTEL_EXPORTER_OTLP_ENDPOINT": "collector:4317"})
    assert Settings.from_env(SERVICES).otlp_endpoint is None
