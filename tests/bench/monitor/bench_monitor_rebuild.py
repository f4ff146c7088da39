"""Start of a monitor with 10,000 committed checkpoints on disk.

Measured until the ledger answers, with pointers checked and staging swept. The limit is the time to
only read the same manifests.
"""

import shutil
import statistics
import tempfile
from datetime import UTC, datetime
from pathlib import Path

from pydantic import TypeAdapter
from trainsync.monitor.core.core import CoreSettings, MonitorCore
from trainsync.storage import records
from trainsync.storage.layout import RunDirectory
from trainsync.storage.saves import claims, pointers
from trainsync.storage.saves.manifest import Manifest
from trainsync.storage.saves.receipts import FileEntry, Participant

from tests.bench.harness import Figure, seconds, spread
from tests.unit.monitor.saves import CHECKPOINT, FIRST

CHECKPOINTS = 10_000
FILES = 24  # eight ranks with model, optimizer and extra state
ROUNDS = 3
NOW = datetime(2026, 1, 1, tzinfo=UTC)


def _fill(run: RunDirectory) -> None:
    adapter = TypeAdapter(Manifest)
    parts = [(name, rank) for name in ("extra_state", "model", "optim") for rank in range(8)]
    for step in range(1, CHECKPOINTS + 1):
        files = [
            FileEntry(f"actor/{name}_world_size_8_rank_{rank}.pt", 0, "xxh3-128:" + "0" * 32)
            for name, rank in parts
        ]
        manifest = Manifest(
            kind=CHECKPOINT,
            step=step,
            attempt=FIRST.attempt,
            incarnation=FIRST.incarnation,
            run_uid=claims.LOCAL_UID,
            created_at=NOW,
            participants=tuple(Participant(name, rank) for name, rank in parts),
            files=tuple(files),
        )
        run.step(step).mkdir(parents=True)
        run.manifest(CHECKPOINT, step).write_bytes(records.encode(adapter, manifest))
    # Only the newest checkpoint's files are checked.
    for entry in files:
        path = run.step(CHECKPOINTS) / entry.path
        path.parent.mkdir(exist_ok=True)
        path.touch()
    pointers.move_pointer(run, CHECKPOINT, CHECKPOINTS)


def _rebuild(run: RunDirectory) -> None:
    core = MonitorCore(run, CoreSettings(), clock=lambda: NOW)
    core.tick()
    shown = core.view().checkpoint
    assert core.ready
    assert shown.last_committed is not None
    assert shown.last_committed.step == CHECKPOINTS
    assert shown.last_error is None


def _read(run: RunDirectory) -> None:
    for step in run.steps():
        run.manifest(CHECKPOINT, step).read_bytes()


def run() -> list[Figure]:
    """`ledger_rebuild_10000_seconds`: median over rounds."""
    directory = RunDirectory(Path(tempfile.mkdtemp(prefix="trainsync-bench-")))
    try:
        _fill(directory)
        _read(directory)
        plain = [seconds(lambda: _read(directory)) for _ in range(ROUNDS)]
        rebuilt = [seconds(lambda: _rebuild(directory)) for _ in range(ROUNDS)]
    finally:
        shutil.rmtree(directory.root, ignore_errors=True)
    return [
        Figure(
            name="ledger_rebuild_10000_seconds",
            figure=statistics.median(rebuilt),
            unit="s",
            goal="<= 5",
            peer="reading the same manifests from the page cache",
            details={
                "checkpoints": CHECKPOINTS,
                "files_in_each": FILES,
                "rounds": ROUNDS,
                "times_reading": statistics.median(rebuilt) / statistics.median(plain),
                **spread("rebuild_seconds", rebuilt),
                **spread("reading_seconds", plain),
            },
        )
    ]
