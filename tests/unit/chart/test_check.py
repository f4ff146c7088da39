import importlib.util
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).parents[3] / "charts" / "trainsync-operator" / "files" / "check.py"


@pytest.fixture
def check() -> Any:
    """The script of `helm test`, which is no part of a package."""
    spec = importlib.util.spec_from_file_location("chart_check", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Operator(BaseHTTPRequestHandler):
    """An operator that is ready and has the wrong metrics."""

    def do_GET(self) -> None:
        self.send_response(200 if self.path in ("/readyz", "/metrics") else 404)
        self.end_headers()
        self.wfile.write(b"# HELP other Of something else.\nother 1.0\n")

    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing."""


@pytest.fixture
def address() -> Iterator[str]:
    with HTTPServer(("127.0.0.1", 0), Operator) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def test_an_operator_that_does_not_answer_is_told(check: Any) -> None:
    check._READY_SECONDS = 0
    with pytest.raises(SystemExit, match="/readyz does not answer with 200"):
        check.wait_until_ready("http://127.0.0.1:1")


def test_an_operator_without_its_metrics_is_told(check: Any, address: str) -> None:
    check.wait_until_ready(address)
    with pytest.raises(SystemExit, match="has no trainsync_operator_leader"):
        check.check_metrics(address)
