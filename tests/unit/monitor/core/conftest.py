"""A core on the test's directory, with a clock that the test advances and writes that it fails."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from trainsync.monitor.commit.committer import Authority
from trainsync.monitor.commit.observer import Observer
from trainsync.monitor.core.core import CoreSettings, MonitorCore
from trainsync.monitor.ledger.saves import SaveOwner
from trainsync.storage.layout import RunDirectory

from tests.unit.monitor.core.cores import Disk, Start
from tests.unit.monitor.saves import FIRST, Clock


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def start(tmp_path: Path, clock: Clock) -> Iterator[Start]:
    """Starts a core on the same directory, as a restarted monitor would."""

    def make(
        *,
        claim: SaveOwner | None = FIRST,
        authority: Authority | None = None,
        observer: Observer | None = None,
        **settings: object,
    ) -> MonitorCore:
        core = MonitorCore(
            RunDirectory(tmp_path),
            CoreSettings(**settings),  # type: ignore[arg-type]
            clock=clock,
            authority=authority,
            observer=observer,
        )
        if claim is not None:
            core.claim(claim, "main", None)
        return core

    yield make


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Disk:
    return Disk(monkeypatch)
