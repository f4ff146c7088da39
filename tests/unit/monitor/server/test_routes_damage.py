"""A damaged checkpoint over the real service: reports, waits and status."""

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
from trainsync.api.protocol import DamageReport
from trainsync.monitor import errors
from trainsync.monitor.client.http import HttpMonitorClient, HttpSettings
from trainsync.monitor.client.retry import RetryPolicy
from trainsync.monitor.ledger.saves import SaveOwner
from trainsync.storage.digest import file_digest
from trainsync.storage.inspect import digests
from trainsync.storage.layout import RunDirectory
from trainsync.storage.saves import manifest

from tests.unit.monitor.fakes import FakeApi, RunningMonitor
from tests.unit.monitor.resume.resuming import flip, is_committed
from tests.unit.monitor.saves import CHECKPOINT, FIRST, SECOND, request, write_all
from tests.unit.monitor.server.clients import QUICK
from tests.waiting import eventually

Connect = Callable[[SaveOwner], HttpMonitorClient]


@pytest.fixture
def connect(monitor: RunningMonitor, api: FakeApi, token_file: Path) -> Iterator[Connect]:
    """A job claims the next attempt."""
    made: list[HttpMonitorClient] = []

    def claim(owner: SaveOwner) -> HttpMonitorClient:
        api.set_status(owner.attempt, 0)
        client = HttpMonitorClient(
            monitor.url,
            attempt=owner.attempt,
            incarnation=owner.incarnation,
            token_file=token_file,
            settings=HttpSettings(
                retry=QUICK,
                report_retry=QUICK,
                claim_retry=RetryPolicy(
                    attempts=200, deadline_seconds=20, longest_wait_seconds=0.2
                ),
            ),
        )
        client.claim("main")
        made.append(client)
        return client

    yield claim
    for client in made:
        client.close()


def train(client: HttpMonitorClient, root: Path, *steps: int) -> None:
    for step in steps:
        client.register(request(step))
        write_all(root, SaveOwner(client.attempt, client.incarnation), step)
        assert client.save_status(CHECKPOINT, step, 20).manifest_digest is not None


def test_ranks_wait_for_the_reading_and_are_told_the_same(
    connect: Connect, monitor: RunningMonitor, volume: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train(connect(FIRST), volume, 10, 20)
    flip(volume, 20)
    go = threading.Event()

    def slow(path: Path, on_block: Callable[[int], None]) -> str:
        assert go.wait(20)
        return file_digest(path, on_block)

    monkeypatch.setattr(digests, "file_digest", slow)
    client = connect(SECOND)
    with ThreadPoolExecutor(4) as pool:
        ranks = [pool.submit(client.resume) for _ in range(4)]
        client.register(request(40))  # others are served meanwhile
        assert not any(rank.done() for rank in ranks)
        go.set()
        points = [rank.result(20) for rank in ranks]
    assert {None if point is None else point.step for point in points} == {10}
    text = httpx.get(f"{monitor.url}/metrics").text
    assert 'trainsync_checkpoint_set_aside_total{namespace="training",run="run"} 1.0' in text


def test_what_a_rank_reports_shows_in_status_and_on_the_page(
    connect: Connect, monitor: RunningMonitor, api: FakeApi, volume: Path
) -> None:
    train(connect(FIRST), volume, 10, 20)
    client = connect(SECOND)
    point = client.resume()
    assert point is not None
    assert point.step == 20
    flip(volume, 20)  # after the monitor has read it, and before the ranks have
    digest = manifest.read_manifest(RunDirectory(volume), CHECKPOINT, 20).digest
    client.report_damage(DamageReport(step=20, manifest_digest=digest, error="rank 3: differs"))
    eventually(lambda: not is_committed(volume, 20))

    def shown() -> bool:
        status = api.writes[-1][1].get("checkpoint", {})
        return "checkpoint 20 is set aside" in status.get("lastError", "") and (
            status["lastCommitted"]["step"] == 10
        )

    eventually(shown)
    assert "checkpoint 20 is set aside" in httpx.get(f"{monitor.url}/").text
    with pytest.raises(errors.ResumeLostError, match="next attempt resumes from step 10"):
        client.resume()
    with pytest.raises(errors.InvalidRequestError):
        client.report_damage(DamageReport.model_construct(step=-1, manifest_digest="", error="x"))
