"""Ranks of a local run that have no monitor to ask go on from the step that its host decides."""

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from trainsync.api.protocol import DamageReport, ResumePoint
from trainsync.api.spec import Verify
from trainsync.monitor import errors
from trainsync.monitor.client import resume_wait
from trainsync.monitor.client.disk import DiskMonitorClient
from trainsync.monitor.client.local import LocalMonitorClient
from trainsync.monitor.core.core import CoreSettings
from trainsync.monitor.ledger.saves import SaveOwner
from trainsync.storage.layout import RunDirectory
from trainsync.storage.saves import manifest, pointers, quarantine

from tests.unit.monitor.resume.resuming import flip, is_committed
from tests.unit.monitor.saves import CHECKPOINT, FIRST, SECOND, request, write_all
from tests.waiting import eventually

Host = Callable[..., LocalMonitorClient]


@pytest.fixture
def host(tmp_path: Path) -> Iterator[Host]:
    """The process that hosts the monitor."""
    made: list[LocalMonitorClient] = []

    def make(owner: SaveOwner, verify: Verify) -> LocalMonitorClient:
        client = LocalMonitorClient(
            tmp_path,
            attempt=owner.attempt,
            incarnation=owner.incarnation,
            settings=CoreSettings(verify=verify),
            tick_seconds=0.02,
        )
        client.claim("local")
        made.append(client)
        return client

    yield make
    for client in made:
        client.close()


def train(client: LocalMonitorClient, root: Path, *steps: int) -> None:
    for step in steps:
        client.register(request(step))
        write_all(root, SaveOwner(client.attempt, client.incarnation), step)
        assert client.save_status(CHECKPOINT, step, 20).manifest_digest is not None


def rank(root: Path, verify: Verify, owner: SaveOwner = SECOND) -> DiskMonitorClient:
    return DiskMonitorClient(
        root, attempt=owner.attempt, incarnation=owner.incarnation, verify=verify
    )


@pytest.mark.parametrize("host_asks", [True, False])
def test_a_rank_waits_until_the_host_has_read_what_the_run_wants_read(
    host: Host, tmp_path: Path, host_asks: bool
) -> None:
    train(host(FIRST, Verify.DIGEST), tmp_path, 10, 20, 30)
    flip(tmp_path, 30)
    flip(tmp_path, 20)
    with ThreadPoolExecutor(4) as pool:
        ranks = [pool.submit(rank(tmp_path, Verify.DIGEST).resume) for _ in range(3)]
        monitor = host(SECOND, Verify.DIGEST)
        points = [monitor.resume()] if host_asks else []
        points += [found.result(20) for found in ranks]
    assert {None if point is None else point.step for point in points} == {10}
    assert not is_committed(tmp_path, 20)
    # A rank may have asked after the host had answered; the host sees that at its next look.
    eventually(lambda: quarantine.requested_steps(RunDirectory(tmp_path)) == [])
    assert monitor.resume() == points[0]


def test_a_rank_requests_no_verification_where_sizes_are_enough(host: Host, tmp_path: Path) -> None:
    train(host(FIRST, Verify.SIZE), tmp_path, 10)
    point = rank(tmp_path, Verify.SIZE).resume()
    assert isinstance(point, ResumePoint)
    assert point.step == 10
    assert not RunDirectory(tmp_path).quarantine_requests.exists()


def test_a_rank_hears_that_nothing_whole_is_left(host: Host, tmp_path: Path) -> None:
    train(host(FIRST, Verify.DIGEST), tmp_path, 10)
    flip(tmp_path, 10)
    monitor = host(SECOND, Verify.DIGEST)
    for client in (rank(tmp_path, Verify.DIGEST), monitor, rank(tmp_path, Verify.DIGEST)):
        with pytest.raises(errors.NoValidCheckpointError, match="bytes of 10 have changed"):
            client.resume()
    assert is_committed(tmp_path, 10)


def test_what_a_rank_reports_reaches_the_host_of_the_next_attempt(
    host: Host, tmp_path: Path
) -> None:
    train(host(FIRST, Verify.SIZE), tmp_path, 10, 20)
    flip(tmp_path, 20)
    digest = manifest.read_manifest(RunDirectory(tmp_path), CHECKPOINT, 20).digest
    first = rank(tmp_path, Verify.SIZE, FIRST)
    first.report_damage(DamageReport(step=20, manifest_digest=digest, error="differs"))
    other = rank(tmp_path, Verify.SIZE)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(other.resume)
        point = host(SECOND, Verify.SIZE).resume()
        assert waiting.result(20) == point
    assert point is not None
    assert point.step == 10


def test_a_rank_without_a_host_does_not_wait_for_ever(
    host: Host, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = host(FIRST, Verify.DIGEST)
    train(first, tmp_path, 10)
    first.close()
    ask = rank(tmp_path, Verify.DIGEST)._resume
    with pytest.raises(errors.VerifyingError, match=r"not known within 0\.3 s: .*has not read"):
        resume_wait.until_verified(ask, 0.3)


def test_a_rank_that_waits_looks_at_the_doubt_alone(
    host: Host, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = host(FIRST, Verify.DIGEST)
    train(first, tmp_path, 10)
    first.close()
    monkeypatch.setattr("trainsync.monitor.client.disk._REQUEST_SECONDS", 0.01)
    looks: list[Path] = []
    twenty = threading.Event()
    run = RunDirectory(tmp_path)

    def counted(run: RunDirectory, step: int) -> quarantine.QuarantineRequest | None:
        looks.append(run.quarantine_request(step))
        if len(looks) == 20:
            twenty.set()
        return quarantine.read_request(run, step)

    monkeypatch.setattr("trainsync.monitor.client.disk.read_request", counted)
    walks: list[int] = []
    check = pointers.check_manifest

    def walk(run: RunDirectory, record: manifest.Manifest, *, with_digest: bool) -> None:
        walks.append(record.step)
        check(run, record, with_digest=with_digest)

    monkeypatch.setattr(pointers, "check_manifest", walk)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(rank(tmp_path, Verify.DIGEST).resume)
        assert twenty.wait(20)
        assert walks == [10]
        quarantine.remove_request(run, 10)  # as the host does that has read it
        point = waiting.result(20)
    assert point is not None
    assert (point.step, walks) == (10, [10, 10])


def test_what_another_run_of_the_name_saved_waits_for_the_host(host: Host, tmp_path: Path) -> None:
    first = host(FIRST, Verify.SIZE)
    train(first, tmp_path, 10)
    first.close()  # it would answer at once
    again = DiskMonitorClient(
        tmp_path,
        attempt=FIRST.attempt,
        incarnation=FIRST.incarnation,
        run_uid="again",
        verify=Verify.DIGEST,
    )
    with pytest.raises(errors.VerifyingError):
        again._resume(0.0)


def test_a_host_that_is_closed_reads_no_further(
    host: Host, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train(host(FIRST, Verify.DIGEST), tmp_path, 10)
    monkeypatch.setattr(resume_wait, "_ONE_WAIT_SECONDS", 0.05)
    begun, go = threading.Event(), threading.Event()
    blocks: list[int] = []

    def slow(_path: Path, on_block: Callable[[int], None]) -> str:
        begun.set()
        assert go.wait(20)
        on_block(1 << 30)
        blocks.append(1)
        return "never"

    monkeypatch.setattr("trainsync.storage.inspect.digests.file_digest", slow)
    monitor = host(SECOND, Verify.DIGEST)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(monitor.resume)
        assert begun.wait(20)
        monitor.close()
        go.set()
        with pytest.raises(errors.ClientClosedError):
            waiting.result(20)
    assert not blocks
