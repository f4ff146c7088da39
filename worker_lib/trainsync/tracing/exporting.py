"""Spans to OTLP over HTTP, by OpenTelemetry's SDK.

The SDK keeps spans in a queue of bounded length (``OTEL_BSP_MAX_QUEUE_SIZE``), whose oldest go
when it is full, and sends them in a daemon thread: an endpoint that hangs or refuses holds up
nothing. Its provider is not made the process's own, which the application may have set.
"""

import os
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Final

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.id_generator import IdGenerator
from opentelemetry.sdk.trace.sampling import Decision
from opentelemetry.trace import NonRecordingSpan, SpanContext, Status, StatusCode, TraceFlags

from trainsync.tracing.identity import Key, span_id, trace_id
from trainsync.tracing.recorded import STEP, Attributes, TraceStats

_DELAY_MILLISECONDS: Final = 500.0  # between messages: a process that is killed loses no more
_LOOK_SECONDS: Final = 0.02
_MAX_ERROR: Final = 1024  # characters


class _Ids(IdGenerator):
    """Gives the ids that the calling thread has set, and random ones else."""

    def __init__(self) -> None:
        self._next = threading.local()

    def set(self, trace: int, span: int | None) -> None:
        """For the span that this thread starts next."""
        self._next.trace, self._next.span = trace, span

    def generate_trace_id(self) -> int:
        number: int = self._next.trace
        return number

    def generate_span_id(self) -> int:
        number: int | None = self._next.span
        return int.from_bytes(os.urandom(8), "big") or 1 if number is None else number


class _Counted(SpanExporter):
    """Counts what another exporter sends."""

    def __init__(self, exporter: SpanExporter) -> None:
        self._exporter = exporter
        self.sent = self.refused = 0

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        done = False
        try:
            result = self._exporter.export(spans)
            done = result is SpanExportResult.SUCCESS
        finally:
            if done:
                self.sent += len(spans)
            else:
                self.refused += len(spans)
        return result

    def shutdown(self) -> None:
        self._exporter.shutdown()


class Exporting:
    """Sends the spans of this process to ``url``.

    Raises:
        ValueError: a variable of OpenTelemetry's is not what it should be.
    """

    def __init__(self, url: str, resource: Attributes) -> None:
        self.url: Final = url
        self._ended = 0
        self._lock = threading.Lock()  # guards the count
        self._ids = _Ids()
        self._exporter = _Counted(OTLPSpanExporter())
        given = "OTEL_BSP_SCHEDULE_DELAY" in os.environ
        processor = BatchSpanProcessor(
            self._exporter, schedule_delay_millis=None if given else _DELAY_MILLISECONDS
        )
        # The variables of OpenTelemetry win over what the library says of itself.
        described = Resource.create(dict(resource)).merge(OTELResourceDetector().detect())
        self._provider = TracerProvider(
            resource=described, id_generator=self._ids, shutdown_on_exit=False
        )
        self._provider.add_span_processor(processor)
        self._tracer = self._provider.get_tracer("trainsync")

    @property
    def stats(self) -> TraceStats:
        """A copy of the counters."""
        return TraceStats(self._ended, self._exporter.sent, self._exporter.refused)

    def wait(self, timeout: float) -> bool:
        """Whether all spans were sent or refused within ``timeout`` seconds."""
        # Not `force_flush`, which waits in this thread for an endpoint that hangs.
        deadline = time.monotonic() + timeout
        while (counts := self.stats).sent + counts.refused < counts.ended:
            if time.monotonic() > deadline:
                return False
            time.sleep(_LOOK_SECONDS)
        return True

    def record(
        self,
        incarnation: str,
        step: int,
        name: str,
        began: float,
        ended: float,
        attributes: Attributes,
        key: Key | None,
        under: Key,
        error: BaseException | None,
    ) -> None:
        """See `StepTracer.record`."""
        parent = None if key == () else self._known(incarnation, step, under)
        span = self._start(incarnation, step, name, attributes, key, parent, _nanoseconds(began))
        if error is not None:
            span.set_status(Status(StatusCode.ERROR, str(error)[:_MAX_ERROR]))
            span.set_attribute("error.type", type(error).__qualname__)
        self._end(span, _nanoseconds(ended))

    @contextmanager
    def open(
        self, incarnation: str, step: int, name: str, attributes: Attributes, key: Key | None
    ) -> Iterator[None]:
        """See `StepTracer.span`."""
        around = trace.get_current_span()
        inside = around.get_span_context().trace_id == trace_id(incarnation, step)
        parent = around if inside else self._known(incarnation, step, ())
        span = self._start(incarnation, step, name, attributes, key, parent, time.time_ns())
        try:
            with trace.use_span(span, record_exception=False, set_status_on_exception=True):
                yield
        finally:
            self._end(span, time.time_ns())

    def _known(self, incarnation: str, step: int, key: Key) -> trace.Span:
        """The span of this key, which this or another process records."""
        trace_number = trace_id(incarnation, step)
        # As the sampler says of the step: it has to be asked, and would follow its parent else.
        sampled = self._provider.sampler.should_sample(None, trace_number, "rl.loop")
        wanted = sampled.decision is Decision.RECORD_AND_SAMPLE
        flags = TraceFlags.SAMPLED if wanted else TraceFlags.DEFAULT
        number = span_id(incarnation, step, key)
        context = SpanContext(trace_number, number, is_remote=True, trace_flags=TraceFlags(flags))
        return NonRecordingSpan(context)

    def _start(
        self,
        incarnation: str,
        step: int,
        name: str,
        attributes: Attributes,
        key: Key | None,
        parent: trace.Span | None,
        began: int,
    ) -> trace.Span:
        own = None if key is None else span_id(incarnation, step, key)
        self._ids.set(trace_id(incarnation, step), own)
        # An empty context: the step's span has no parent, whatever span is current here.
        context = Context() if parent is None else trace.set_span_in_context(parent, Context())
        return self._tracer.start_span(
            name, context, attributes={STEP: int(step), **attributes}, start_time=began
        )

    def _end(self, span: trace.Span, ended: int) -> None:
        if span.get_span_context().trace_flags.sampled:
            with self._lock:
                self._ended += 1
        span.end(ended)


def _nanoseconds(seconds: float) -> int:
    return int(seconds * 1e9)
