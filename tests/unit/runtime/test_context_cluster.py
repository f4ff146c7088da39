"""RunContext of a TrainingRun's pod, over HTTP against a server that answers as a monitor does."""

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from trainsync.monitor.errors import ClaimRefusedError, FencedError
from trainsync.runtime.context import RunContext

from tests.waiting import eventually


class Monitor:
    """Grants the first claim, refuses others, and fences on command; records requests."""

    def __init__(self) -> None:
        self.requests: list[tuple[str, dict[str, str], dict[str, Any]]] = []
        self.holder: str | None = None
        self.fenced = False
        monitor = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                monitor.requests.append((self.path, dict(self.headers), body))
                status, answer = monitor.answer(self.path, body)
                data = json.dumps(answer).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *args: object) -> None:
                """Quiet."""

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"

    def answer(self, path: str, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        if path == "/v1/claims":
            self.holder = self.holder or body["incarnation"]
            if self.holder != body["incarnation"]:
                return 409, {"code": "claim_refused", "message": f"{self.holder} holds it"}
        elif self.fenced:
            return 409, {"code": "fenced", "message": "attempt 4 is in force"}
        return 200, {}


@pytest.fixture
def monitor() -> Iterator[Monitor]:
    made = Monitor()
    thread = threading.Thread(target=made.server.serve_forever, daemon=True)
    thread.start()
    yield made
    made.server.shutdown()
    made.server.server_close()
    thread.join(10)


@pytest.fixture
def environ(monitor: Monitor, tmp_path: Path) -> dict[str, str]:
    (tmp_path / "token").write_text("secret-token\n")
    return {
        "TRAINSYNC_RUN_NAME": "run",
        "TRAINSYNC_RUN_NAMESPACE": "ns",
        "TRAINSYNC_RUN_UID": "0b0e",
        "TRAINSYNC_CLUSTER": "main",
        "TRAINSYNC_ATTEMPT": "3",
        "TRAINSYNC_MONITOR_URL": monitor.url,
        "TRAINSYNC_TOKEN_FILE": str(tmp_path / "token"),
        "TRAINSYNC_CHECKPOINT_DIR": str(tmp_path / "run"),
    }


def test_the_job_claims_its_attempt_with_token_and_headers(
    monitor: Monitor, environ: dict[str, str]
) -> None:
    with RunContext.from_env(environ=environ) as context:
        assert not context.is_local
        assert (context.attempt, context.incarnation) == (3, monitor.holder)
        assert context.ray_namespace == "trainsync-run-3"
    path, headers, body = monitor.requests[0]
    assert path == "/v1/claims"
    assert body == {"attempt": 3, "incarnation": context.incarnation, "cluster": "main"}
    assert headers["Authorization"] == "Bearer secret-token"
    assert headers["X-Trainsync-Attempt"] == "3"
    assert headers["X-Trainsync-Incarnation"] == context.incarnation


def test_a_second_start_of_the_entrypoint_is_refused(
    monitor: Monitor, environ: dict[str, str]
) -> None:
    with (
        RunContext.from_env(environ=environ) as first,
        pytest.raises(ClaimRefusedError, match=f"{first.incarnation} holds it"),
    ):
        RunContext.from_env(environ=environ)


def test_a_process_of_the_job_joins_without_claiming(
    monitor: Monitor, environ: dict[str, str]
) -> None:
    with (
        RunContext.from_env(environ=environ) as driver,
        RunContext.from_env(environ=environ | driver.env()) as joined,
    ):
        assert joined.incarnation == driver.incarnation
        joined.report(1)
        eventually(lambda: joined.reports.sent == 1)
    assert [path for path, _, _ in monitor.requests] == ["/v1/claims", "/v1/progress"]
    assert monitor.requests[1][1]["X-Trainsync-Incarnation"] == driver.incarnation


def test_an_older_attempt_learns_from_its_report_that_it_must_stop(
    monitor: Monitor, environ: dict[str, str]
) -> None:
    with RunContext.from_env(environ=environ) as context:
        context.report(1)
        eventually(lambda: context.reports.sent == 1)
        monitor.fenced = True
        context.report(2)
        eventually(lambda: context.reports.failed == 1)
        with pytest.raises(FencedError, match="attempt 4 is in force"):
            context.report(3)
