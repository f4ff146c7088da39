"""A receiver of traces by OTLP over HTTP, as a collector is one: it reads OpenTelemetry's protobuf.

https://opentelemetry.io/docs/specs/otlp/#otlphttp
"""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)


@dataclass(frozen=True)
class Span:
    """A span as it came over the wire; ``parent`` is empty for the step's own; times in seconds."""

    name: str
    trace: str
    id: str
    parent: str
    began: float
    ended: float
    attributes: dict[str, Any]
    resource: dict[str, Any]
    failed: bool


@dataclass
class Receiver:
    """Keeps what came; ``status`` is its answer; while ``open`` is not set it does not answer."""

    status: int = 200
    open: threading.Event = field(default_factory=threading.Event)
    url: str = ""
    spans: list[Span] = field(default_factory=list)
    requests: int = 0

    def wait(self, condition: Callable[[list[Span]], bool], seconds: float = 20.0) -> list[Span]:
        """The spans, as soon as the condition holds for them."""
        deadline = time.monotonic() + seconds
        while not condition(list(self.spans)):
            names = sorted(span.name for span in self.spans)
            assert time.monotonic() < deadline, f"after {seconds:g} s there are {names}"
            time.sleep(0.02)
        return list(self.spans)

    def traces(self) -> dict[int, list[Span]]:
        """The spans of each step; all of a step have to be of one trace, and no other step's."""
        steps: dict[int, list[Span]] = {}
        for span in list(self.spans):
            steps.setdefault(span.attributes["trainsync.step"], []).append(span)
        ids = [{span.trace for span in spans} for spans in steps.values()]
        assert all(len(one) == 1 for one in ids), "a step is in several traces"
        assert len(set().union(*ids)) == len(ids), "a trace is of several steps"
        return steps


@contextmanager
def receiving(status: int = 200, *, hangs: bool = False) -> Iterator[Receiver]:
    """A receiver on a free port; ``hangs``: it takes requests and answers none until the end."""
    receiver = Receiver(status)
    if not hangs:
        receiver.open.set()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            receiver.requests += 1
            receiver.open.wait(60)
            if receiver.status == 200:
                assert self.path == "/v1/traces"
                receiver.spans += _spans(ExportTraceServiceRequest.FromString(body))
            try:
                self.send_response(receiver.status)
                self.send_header("Content-Type", "application/x-protobuf")
                self.end_headers()
                self.wfile.write(ExportTraceServiceResponse().SerializeToString())
            except OSError:
                pass  # the sender waits no longer

        def log_message(self, format: str, *args: object) -> None:
            """Nothing: the tests read what came."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    receiver.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield receiver
    finally:
        receiver.open.set()
        server.shutdown()
        server.server_close()
        thread.join(10)


def _spans(request: ExportTraceServiceRequest) -> Iterator[Span]:
    for group in request.resource_spans:
        resource = _attributes(group.resource.attributes)
        for scope in group.scope_spans:
            for span in scope.spans:
                yield Span(
                    span.name,
                    span.trace_id.hex(),
                    span.span_id.hex(),
                    span.parent_span_id.hex(),
                    span.start_time_unix_nano / 1e9,
                    span.end_time_unix_nano / 1e9,
                    _attributes(span.attributes),
                    resource,
                    span.status.code == span.status.STATUS_CODE_ERROR,
                )


def _attributes(pairs: Any) -> dict[str, Any]:
    return {
        pair.key: getattr(pair.value, kind)
        for pair in pairs
        if (kind := pair.value.WhichOneof("value"))
    }
