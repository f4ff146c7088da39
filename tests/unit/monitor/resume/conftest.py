"""Cores on the test's directory, the steps that they set aside, and the files that they read."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from trainsync.api.spec import Verify
from trainsync.monitor.commit.committer import Authority
from trainsync.monitor.core.core import CoreSettings, MonitorCore
from trainsync.monitor.ledger.saves import SaveOwner
from trainsync.storage.digest import file_digest
from trainsync.storage.inspect import digests
from trainsync.storage.layout import RunDirectory
from trainsync.storage.saves import manifest, pointers

from tests.unit.monitor.resume.resuming import Seen, Start
from tests.unit.monitor.saves import Clock


@pytest.fixture
def seen() -> Seen:
    return Seen()


@pytest.fixture
def seconds() -> list[float]:
    """The monotonic clock's time."""
    return [0.0]


@pytest.fixture
def start(tmp_path: Path, seen: Seen, seconds: list[float]) -> Iterator[Start]:
    """Starts a core on the same directory, as a restarted monitor would."""
    made: list[MonitorCore] = []

    def make(
        owner: SaveOwner,
        verify: Verify = Verify.SIZE,
        authority: Authority | None = None,
        **settings: int,
    ) -> MonitorCore:
        core = MonitorCore(
            RunDirectory(tmp_path),
            CoreSettings(verify=verify, **settings),  # type: ignore[arg-type]
            clock=Clock(),
            authority=authority,
            observer=seen,
            monotonic=lambda: seconds[0],
        )
        core.claim(owner, "main", None)
        made.append(core)
        return core

    yield make
    for core in made:
        core.stop_reading()


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Files of which every byte was read."""
    found: list[Path] = []

    def digest(path: Path, on_block: Callable[[int], None]) -> str:
        found.append(path)
        return file_digest(path, on_block)

    monkeypatch.setattr(digests, "file_digest", digest)
    return found


@pytest.fixture
def walks(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Steps of which the sizes of all files were looked at."""
    found: list[int] = []
    check = manifest.check_manifest

    def counted(run: RunDirectory, record: manifest.Manifest, *, with_digest: bool) -> None:
        found.append(record.step)
        check(run, record, with_digest=with_digest)

    monkeypatch.setattr(manifest, "check_manifest", counted)
    monkeypatch.setattr(pointers, "check_manifest", counted)
    return found
