"""Two local monitors of one directory: that of the older attempt commits nothing any more."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from trainsync.api.protocol import ParticipantRef, ReceiptHint, SaveState
from trainsync.monitor import errors
from trainsync.monitor.client.local import LocalMonitorClient
from trainsync.monitor.client.local_fencing import ClaimGate
from trainsync.storage.layout import RunDirectory
from trainsync.storage.saves.manifest import read_manifest

from tests.unit.monitor.saves import CHECKPOINT, FIRST, SECOND, request, write, write_all


@pytest.fixture
def older(tmp_path: Path) -> Iterator[LocalMonitorClient]:
    client = LocalMonitorClient(
        tmp_path, attempt=0, incarnation=FIRST.incarnation, tick_seconds=0.02
    )
    client.claim("local")
    yield client
    client.close()


def test_an_older_attempts_monitor_that_lives_on_commits_nothing_after_the_newer_claim(
    older: LocalMonitorClient, tmp_path: Path
) -> None:
    older.register(request(10))
    write(tmp_path, FIRST, 10, 0)
    # It looks at the disk when told to, so that the older attempt's staging stays for a while.
    newer = LocalMonitorClient(
        tmp_path, attempt=1, incarnation=SECOND.incarnation, tick_seconds=3600
    )
    newer.claim("local")
    write(tmp_path, FIRST, 10, 1)  # now it would be complete
    with pytest.raises(errors.FencedError, match="attempt 1 is claimed"):
        older.save_status(CHECKPOINT, 10)
    newer.register(request(10))
    write_all(tmp_path, SECOND, 10)
    for rank in range(2):
        newer.receipt(ReceiptHint(kind=CHECKPOINT, step=10, participant=_who(rank)))
    status = newer.save_status(CHECKPOINT, 10)
    assert status.state is SaveState.COMMITTED
    older.close()  # its last look at the disk changes nothing
    newest = read_manifest(RunDirectory(tmp_path), CHECKPOINT, 10)
    assert newest.digest == status.manifest_digest
    assert newest.manifest.attempt == 1
    newer.close()


def test_a_monitor_that_has_not_claimed_its_attempt_leaves_the_saves_of_the_one_before_alone(
    older: LocalMonitorClient, tmp_path: Path
) -> None:
    newer = LocalMonitorClient(
        tmp_path, attempt=1, incarnation=SECOND.incarnation, tick_seconds=0.01
    )
    for ask in (newer.resume, lambda: newer.register(request(10))):
        with pytest.raises(errors.NotReadyError, match="call claim first"):
            ask()
    older.register(request(10))
    write_all(tmp_path, FIRST, 10)
    assert older.save_status(CHECKPOINT, 10, wait_seconds=20).state is SaveState.COMMITTED
    newer.claim("local")
    assert read_manifest(RunDirectory(tmp_path), CHECKPOINT, 10).manifest.attempt == 0
    newer.close()


def _who(rank: int) -> ParticipantRef:
    return ParticipantRef(component="model", rank=rank)


def test_claims_of_other_runs_and_older_attempts_do_not_close_the_gate(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    gate = ClaimGate(run, "uid", 2)
    gate()  # nothing is claimed yet
    run.claims.mkdir(parents=True)
    for name in ("uid-1-main.json", "uid-2-main.json", "uid-more-9-main.json", ".uid-9-x.json.tmp"):
        (run.claims / name).touch()
    gate()
    (run.claims / "uid-3-main.json").touch()
    with pytest.raises(errors.FencedError, match="attempt 3"):
        gate()


def test_claims_that_cannot_be_read_close_the_gate_for_now(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    run.claims.parent.mkdir(parents=True)
    run.claims.touch()  # not a directory
    with pytest.raises(errors.NotReadyError, match="cannot be read"):
        ClaimGate(run, "uid", 0)()
