"""What people put where the monitor's own things go: a sentence, and the run goes on."""

import logging
from pathlib import Path

import pytest
from trainsync.api.protocol import SaveKind
from trainsync.monitor.client.local import LocalMonitorClient
from trainsync.storage.layout import RunDirectory
from trainsync.storage.saves.pointers import read_pointer

from tests.unit.monitor.saves import FIRST, SECOND, request, write_all

STEPS = (1, 2)


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    """With both steps committed by the first attempt."""
    client = LocalMonitorClient(tmp_path / "run", attempt=0, incarnation=FIRST.incarnation)
    client.claim("local")
    for step in STEPS:
        client.register(request(step))
        write_all(tmp_path / "run", FIRST, step)
    client.close()
    return RunDirectory(tmp_path / "run")


def resumed(run: RunDirectory) -> int | None:
    client = LocalMonitorClient(run.root, attempt=1, incarnation=SECOND.incarnation)
    try:
        client.claim("local")
        point = client.resume()
        return None if point is None else point.step
    finally:
        client.close()


@pytest.mark.parametrize("kind", list(SaveKind))
def test_a_directory_in_the_place_of_a_pointer_is_moved_aside(
    run: RunDirectory, kind: SaveKind, caplog: pytest.LogCaptureFixture
) -> None:
    pointer = run.pointer(kind)
    pointer.unlink(missing_ok=True)
    pointer.mkdir()
    (pointer / "notes.txt").write_text("somebody's")
    with caplog.at_level(logging.ERROR):
        assert resumed(run) == 2
    assert caplog.text.count("was a directory, expected a file: it is") == 1
    [aside] = run.root.glob(f"{pointer.name}.*.directory")
    assert (aside / "notes.txt").read_text() == "somebody's"
    assert read_pointer(run, SaveKind.CHECKPOINT) == 2


def test_a_step_that_is_a_symbolic_link_is_named_once_and_not_used(
    run: RunDirectory, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run.step(2).rename(tmp_path / "elsewhere")
    run.step(2).symlink_to(tmp_path / "elsewhere")
    with caplog.at_level(logging.INFO):
        assert resumed(run) == 1
    assert caplog.text.count(f"{run.step(2)} is a symbolic link and is not used") == 1
    assert caplog.text.count("ledger rebuilt") == 1
