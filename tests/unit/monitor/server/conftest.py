"""Clients of the test's monitor."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.unit.monitor.fakes import RunningMonitor
from tests.unit.monitor.server.clients import Clients


@pytest.fixture
def clients(monitor: RunningMonitor, token_file: Path) -> Iterator[Clients]:
    make = Clients(monitor.url, token_file)
    yield make
    for client in make.made:
        client.close()
