"""OpenTelemetry traces of batches, from the upload to the published results, where OTEL_EXPORTER_OTLP_ENDPOINT is set.

One trace holds what became of an input file: its upload, and each batch of it with its planning, unit runs, parts and
merging. The work goes through several processes and may outlive any of them, so nothing is handed from one to the next:
ids of traces and of spans that have children are hashes of what they are about, which every process knows. A span is
made when its work has ended, with the time at which that began. What a killed process had under way has no span;
whoever goes on with it makes its own, in the same trace.

Spans carry ids and counts: no prompt, no answer, no custom_id, no name that a user chose, no text of an error. Without
the endpoint nothing of OpenTelemetry is imported, and `record` returns at once.
"""

from __future__ import annotations

import hashlib
import logging
import threading
from collections.abc import Mapping
from typing import TYPE_CHECKING

import structlog

from batchsvc.clock import now_ns
from batchsvc.errors import InvalidRequestError

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.sdk.trace import TracerProvider

Attribute = str | int | bool | float

_SCHEDULE_MS = 1_000  # a killed process loses the spans of a second
_CLOSE_MS = 3_000

log = structlog.get_logger(__name__)
_tracing: _Tracing | None = None


class TracingError(InvalidRequestError):
    """Traces are wanted and can't be made."""


def start(endpoint: str | None, service: str) -> None:
    """Send traces from now on, as the process `batchsvc-<service>`; without an endpoint, none.

    Raises TracingError, which names the setting and the way out, if OpenTelemetry isn't installed.
    """
    global _tracing
    if not endpoint:
        return
    try:
        _tracing = _Tracing(endpoint, service)
    except ImportError as error:
        raise TracingError(
            "OTEL_EXPORTER_OTLP_ENDPOINT is set and OpenTelemetry isn't installed: pip install 'batchsvc[otel]', or "
            "unset it.",
            param="OTEL_EXPORTER_OTLP_ENDPOINT",
        ) from error


def stop() -> None:
    """Send what is buffered, for some seconds at most, and make no more spans."""
    global _tracing
    ending, _tracing = _tracing, None
    if ending is not None:
        ending.close()


def is_on() -> bool:
    """Whether spans are made: then it is worth finding out what they are to say."""
    return _tracing is not None


def record(
    name: str,
    said: Mapping[str, Attribute],
    *,
    file_id: str,
    began_ns: int,
    ended_ns: int | None = None,
    own: str | None = None,
    parent: str | None = None,
    is_error: bool = False,
) -> None:
    """Make a span in the trace of this input file that says this. `own` is what it is about, if others may be below
    it; `parent` what the span above is about; without one it is the trace's root."""
    if _tracing is not None:
        _tracing.record(name, said, file_id, began_ns, ended_ns, own, parent, is_error)


def uploaded(file_id: str, *, began_ns: int) -> None:
    """Make the root of a trace: this file can be used from now on."""
    said = {"batchsvc.file.id": file_id}
    record("file.upload", said, file_id=file_id, began_ns=began_ns, own=about_upload(file_id))


def about_upload(file_id: str) -> str:
    """What the root of a trace is about."""
    return f"upload {file_id}"


def about_batch(batch_id: str) -> str:
    """What the span of a batch is about."""
    return f"batch {batch_id}"


def about_unit(unit_id: str, epoch: int) -> str:
    """What the span of a unit's run under one lease is about."""
    return f"unit {unit_id} {epoch}"


def trace_id_of(file_id: str) -> int:
    """The trace of an input file."""
    return int.from_bytes(_hash(f"trace {file_id}")[:16], "big")


def span_id_of(about: str) -> int:
    """The span that is about this."""
    return int.from_bytes(_hash(f"span {about}")[:8], "big")


class _Tracing:
    """The tracer of a process. Thread-safe."""

    def __init__(self, endpoint: str, service: str) -> None:
        from opentelemetry import trace
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.sdk.trace.id_generator import RandomIdGenerator

        forced = threading.local()

        class Ids(RandomIdGenerator):
            """Those that `record` has set on this thread, else random ones."""

            def generate_span_id(self) -> int:
                return getattr(forced, "span_id", None) or super().generate_span_id()

            def generate_trace_id(self) -> int:
                return getattr(forced, "trace_id", None) or super().generate_trace_id()

        # its exporter logs each failure with the endpoint, and a URL may hold a secret
        logging.getLogger("opentelemetry").setLevel(logging.CRITICAL)
        self._forced = forced
        self._trace = trace
        self._provider: TracerProvider = TracerProvider(
            resource=Resource.create({"service.name": f"batchsvc-{service}"}),
            id_generator=Ids(),
            shutdown_on_exit=False,  # it would wait once more, and `stop` has
        )
        exporter = OTLPSpanExporter(endpoint=_traces_url(endpoint))
        self._provider.add_span_processor(BatchSpanProcessor(exporter, schedule_delay_millis=_SCHEDULE_MS))
        self._tracer = self._provider.get_tracer("batchsvc")

    def record(
        self,
        name: str,
        said: Mapping[str, Attribute],
        file_id: str,
        began_ns: int,
        ended_ns: int | None,
        own: str | None,
        parent: str | None,
        is_error: bool,
    ) -> None:
        self._forced.trace_id = trace_id_of(file_id)
        self._forced.span_id = span_id_of(own) if own else None
        try:
            span = self._tracer.start_span(
                name, context=self._below(file_id, parent), start_time=began_ns, attributes=dict(said)
            )
            if is_error:
                span.set_status(self._trace.StatusCode.ERROR)
            span.end(max(ended_ns or now_ns(), began_ns))
        finally:
            self._forced.trace_id = self._forced.span_id = None

    def close(self) -> None:
        """On a thread of its own, which nobody waits for to the end: OpenTelemetry heeds no limit while it sends."""
        closing = threading.Thread(target=self._provider.shutdown, name="tracing-close", daemon=True)
        closing.start()
        closing.join(_CLOSE_MS / 1000)
        if closing.is_alive():
            log.warning("tracing.not_sent", waited_ms=_CLOSE_MS)

    def _below(self, file_id: str, parent: str | None) -> Context:
        """The context of a span below another, whether or not that one was made here, or yet. A trace is sampled as a
        whole: the sampler is asked about its id."""
        if parent is None:
            return self._trace.set_span_in_context(self._trace.INVALID_SPAN)
        trace_id = trace_id_of(file_id)
        asked = self._provider.sampler.should_sample(None, trace_id, "file.upload")
        is_sampled = asked.decision.name == "RECORD_AND_SAMPLE"
        flags = self._trace.TraceFlags(self._trace.TraceFlags.SAMPLED if is_sampled else 0)
        above = self._trace.SpanContext(trace_id, span_id_of(parent), is_remote=True, trace_flags=flags)
        return self._trace.set_span_in_context(self._trace.NonRecordingSpan(above))


def _traces_url(endpoint: str) -> str:
    """OTEL_EXPORTER_OTLP_ENDPOINT is a base URL, as OpenTelemetry's own exporters read it."""
    return endpoint.rstrip("/") + "/v1/traces"


def _hash(text: str) -> bytes:
    return hashlib.sha256(text.encode()).digest()
