"""One trace from the upload to the published results, also where a worker was killed on the way."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from batchsvc import tracing
from batchsvc.batches.tables import Batch
from tests.faults.cluster import Cluster
from tests.faults.judge import Verdict
from tests.otlp import collecting

pytestmark = pytest.mark.faults
Judge = Callable[..., Verdict]
NAMES = {
    "file.upload": "batchsvc-api",
    "batch.create": "batchsvc-api",
    "batch.plan": "batchsvc-control",
    "unit.run": "batchsvc-engine",
    "part.write": "batchsvc-engine",
    "batch.finalize": "batchsvc-control",
    "batch.publish": "batchsvc-control",
    "batch": "batchsvc-control",
}


@pytest.mark.quick_faults
def test_one_trace_goes_on_beyond_a_killed_worker(cluster: Cluster, judge: Judge) -> None:
    with collecting() as collector:
        cluster.env["OTEL_EXPORTER_OTLP_ENDPOINT"] = collector.url
        cluster.start("control")
        victim = cluster.start("engine", failpoints="lines.finished=kill@4", BATCHSVC_FAKE_TOKENS_PER_S=300)
        job = cluster.submit(60)
        victim.died()
        begun = {unit.id: unit.epoch for unit in cluster.units(job) if unit.epoch and unit.state != "done"}
        assert begun, "it was in the middle of something"
        cluster.start("engine")
        cluster.wait(job, "completed")
        collector.until(lambda: {span.name for span in collector.spans} == set(NAMES), "every kind of span")
        units = {unit.id for unit in cluster.units(job)}
        collector.until(
            lambda: {span.said["batchsvc.unit.id"] for span in collector.named("unit.run")} >= units, "every unit"
        )
        spans = list(collector.spans)
        file_id = cluster.batch(job).input_file_id
        assert {span.trace_id for span in spans} == {f"{tracing.trace_id_of(file_id):032x}"}, "one trace"
        assert all(span.service == NAMES[span.name] for span in spans)
        by_id = {span.span_id: span for span in spans}
        assert len(by_id) == len(spans), "each span once"
        above = {"batch": "file.upload", "part.write": "unit.run", "batch.publish": "batch.finalize"}
        for span in spans:
            if span.name == "file.upload":
                assert not span.parent_id
            elif span.name != "part.write":  # a killed worker's run has no span, but its parts say where it was
                assert by_id[span.parent_id].name == above.get(span.name, "batch"), span
        done = [span.said for span in collector.named("unit.run") if span.said["batchsvc.outcome"] == "done"]
        again = {said["batchsvc.unit.id"]: said["batchsvc.unit.epoch"] for said in done}
        assert all(again[unit_id] > epoch for unit_id, epoch in begun.items()), "somebody else went on with it"
        assert sum(span.said["batchsvc.part.lines_ok"] for span in collector.named("part.write")) <= 60
        (whole,) = collector.named("batch")
        assert whole.said["batchsvc.batch.status"] == "completed" and whole.said["batchsvc.batch.lines"] == 60
        assert all(span.began_ns <= span.ended_ns for span in spans)
        everything = b"".join(collector.bodies)
        custom_id = "\x03c60"  # as a field of protobuf, with its length: the digits alone come in many an id
        for secret in (job.canary, custom_id, cluster.project_id, *cluster.secrets):
            assert secret.encode() not in everything, "no contents, no names, no secrets"
    judge(job)


def test_a_batch_that_ends_before_it_runs_has_its_trace_too(cluster: Cluster) -> None:
    """One whose lines are broken, and one that nobody planned in time; a repeated task adds nothing."""
    with collecting() as collector:
        cluster.env["OTEL_EXPORTER_OTLP_ENDPOINT"] = collector.url
        file_id = cluster.upload([{"custom_id": "a", "method": "GET", "url": "/", "body": {}}])
        late, failed = (cluster.create(file_id).json()["id"] for _ in range(2))
        with cluster.db.transaction() as session:
            row = session.get_one(Batch, late)
            row.expires_ms = row.created_ms + 1
        cluster.start("control", TEST_HINTS=3)
        collector.until(lambda: len(collector.named("batch")) == 2, "both have ended")
        found = {span.said["batchsvc.batch.id"]: span for span in collector.named("batch")}
        assert found[failed].said["batchsvc.batch.status"] == "failed"
        assert found[late].said["batchsvc.batch.status"] == "expired"
        assert {span.trace_id for span in collector.spans} == {f"{tracing.trace_id_of(file_id):032x}"}
        planned = [span.said["batchsvc.batch.id"] for span in collector.named("batch.plan")]
        assert failed in planned and len(set(planned)) == len(planned), "what did nothing says nothing"
