"""A running monitor on a real socket, with an API server in memory."""

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from trainsync.monitor.page.feed import AGES, MaxAges

from tests.unit.monitor.fakes import FakeApi, RunningMonitor, Signer
from tests.waiting import eventually


@pytest.fixture(scope="session")
def signer() -> Signer:
    """Made once: making a key is slow."""
    return Signer()


@pytest.fixture
def api(signer: Signer) -> FakeApi:
    return FakeApi(signer)


@pytest.fixture
def volume(tmp_path: Path) -> Path:
    """The run's directory."""
    return tmp_path / "run"


@pytest.fixture
def page_ages() -> MaxAges:
    """A test that wants another age of the run's page gives it as a parameter."""
    return AGES


@pytest.fixture
def monitor(api: FakeApi, volume: Path, page_ages: MaxAges) -> Iterator[RunningMonitor]:
    """A ready monitor."""
    running = RunningMonitor(api, volume, page_ages=page_ages)
    eventually(lambda: httpx.get(f"{running.url}/readyz").status_code == 200)
    yield running
    running.stop()


@pytest.fixture
def token_file(tmp_path: Path, signer: Signer) -> Path:
    """A token file, as projected by the kubelet."""
    path = tmp_path / "token"
    path.write_text(signer.token())
    return path
