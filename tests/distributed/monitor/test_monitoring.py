"""A real Prometheus scrapes a real monitor, and its alert tells of a file that the disk damaged."""

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from trainsync.api.protocol import SaveState
from trainsync.monitor.client.http import HttpMonitorClient, HttpSettings
from trainsync.storage.saves import receipts

from monitoring.generated import rules_text
from monitoring.prometheus import Server, Target, running
from monitoring.rules import Pace
from tests.unit.monitor.fakes import FakeApi, RunningMonitor, Signer
from tests.unit.monitor.saves import (
    CHECKPOINT,
    FIRST,
    directory,
    receipt,
    request,
    stage,
    write,
    write_all,
)
from tests.waiting import eventually

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(180)]

# Half an hour becomes a minute.
PACE = Pace(30)
WAIT = 60.0


@pytest.fixture
def signer() -> Signer:
    return Signer()


@pytest.fixture
def monitor(signer: Signer, tmp_path: Path) -> Iterator[RunningMonitor]:
    made = RunningMonitor(FakeApi(signer), tmp_path / "run")
    eventually(lambda: httpx.get(f"{made.url}/readyz").status_code == 200)
    yield made
    made.stop()


@pytest.fixture
def client(monitor: RunningMonitor, signer: Signer, tmp_path: Path) -> Iterator[HttpMonitorClient]:
    token = tmp_path / "token"
    token.write_text(signer.token())
    made = HttpMonitorClient(
        monitor.url,
        attempt=FIRST.attempt,
        incarnation=FIRST.incarnation,
        token_file=token,
        settings=HttpSettings(),
    )
    made.claim("main")
    yield made
    made.close()


@pytest.fixture
def prometheus(monitor: RunningMonitor, tmp_path: Path) -> Iterator[Server]:
    folder = tmp_path / "prometheus"
    folder.mkdir()
    target = Target("monitor", monitor.url.removeprefix("http://"))
    with running(folder, [target], rules_text(PACE)) as server:
        yield server


def write_damaged(root: Path, step: int) -> None:
    """A rank's part whose bytes change between its digest and the look of the monitor."""
    entry = stage(root, FIRST, step, 1)
    file = directory(root, FIRST, step).files / entry.path
    content = bytearray(file.read_bytes())
    content[0] ^= 1
    file.write_bytes(content)
    record = receipt(FIRST, step, 1, CHECKPOINT, entry)
    receipts.write_receipt(directory(root, FIRST, step), record)


def save(client: HttpMonitorClient, root: Path, step: int, *, damaged: bool) -> SaveState:
    client.register(request(step))
    if damaged:
        write(root, FIRST, step, 0)
        write_damaged(root, step)
    else:
        write_all(root, FIRST, step)
    return client.save_status(CHECKPOINT, step, wait_seconds=20).state


def test_a_damaged_file_fires_the_alert_and_good_saves_end_it(
    client: HttpMonitorClient, prometheus: Server, tmp_path: Path
) -> None:
    root = tmp_path / "run"
    aborts = 'trainsync_checkpoint_aborts_total{kind="checkpoint",cause="bad_file"}'
    # A count that begins above 0 is no increase.
    eventually(lambda: [s.points[-1][1] for s in prometheus.query(aborts)] == [0], WAIT)
    eventually(lambda: prometheus.down() == {}, WAIT)
    assert save(client, root, 5, damaged=True) is SaveState.ABORTED
    eventually(lambda: "TrainsyncCommitFailing" in prometheus.firing(), WAIT)
    (labels,) = prometheus.firing()["TrainsyncCommitFailing"]
    wanted = {"namespace": "training", "run": "run", "kind": "checkpoint", "severity": "critical"}
    assert {key: labels[key] for key in wanted} == wanted
    for step in (10, 15, 20):
        assert save(client, root, step, damaged=False) is SaveState.COMMITTED
    eventually(lambda: "TrainsyncCommitFailing" not in prometheus.firing(), WAIT)
    last = "trainsync_checkpoint_last_committed_step"
    eventually(lambda: [s.points[-1][1] for s in prometheus.query(last)] == [20], WAIT)
    (found,) = prometheus.query("namespace_run:trainsync_volume_available:ratio")
    assert 0 < found.points[-1][1] <= 1
