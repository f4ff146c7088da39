"""Each test begins and ends with a process that sends no traces."""

from collections.abc import Callable, Iterator

import pytest
from trainsync.tracing import steps


@pytest.fixture(autouse=True)
def _stopped(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    steps.stop()
    yield
    steps.stop(timeout=0)


@pytest.fixture
def send_to(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Sets the endpoint as a pod's template does."""

    def set_endpoint(url: str) -> None:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", url)

    return set_endpoint
