"""Doubted checkpoints that are not the newest."""

import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from trainsync import failpoints
from trainsync.api.spec import Verify
from trainsync.monitor import errors
from trainsync.monitor.commit.committer import Authority
from trainsync.storage.digest import file_digest
from trainsync.storage.inspect import digests
from trainsync.storage.layout import RunDirectory
from trainsync.storage.saves import quarantine

from tests.unit.monitor.resume.resuming import (
    THIRD,
    Seen,
    Start,
    flip,
    is_alive,
    is_committed,
    message,
    pointer,
    report,
    resume,
    settle,
    step_of,
    train,
)
from tests.unit.monitor.saves import FIRST, SECOND, request, write_all
from tests.waiting import eventually


@pytest.mark.parametrize("commits_before_it_is_read", [False, True])
def test_what_is_doubted_is_read_and_set_aside_though_it_is_not_the_newest(
    start: Start, tmp_path: Path, seen: Seen, walks: list[int], commits_before_it_is_read: bool
) -> None:
    core = start(FIRST)
    train(core, tmp_path, FIRST, 10, 20)
    flip(tmp_path, 20)
    if commits_before_it_is_read:
        report(core, FIRST, 20)
        train(core, tmp_path, FIRST, 30)
    else:
        train(core, tmp_path, FIRST, 30)
        report(core, FIRST, 20)
    settle(core)
    assert (seen.steps, pointer(tmp_path)) == ([20], 30)
    assert "checkpoint 20 is set aside" in message(core)
    assert sorted(info.step for _, info in core.committed()) == [10, 30]
    assert [is_committed(tmp_path, step) for step in (10, 20, 30)] == [True, False, True]
    assert quarantine.requested_steps(RunDirectory(tmp_path)) == []
    walks.clear()
    for _ in range(5):
        core.tick()
    assert not walks, "it is settled"
    assert step_of(start(SECOND).resume(SECOND)) == 30


def test_a_false_doubt_of_what_is_not_the_newest_is_settled(
    start: Start, tmp_path: Path, seen: Seen, reads: list[Path]
) -> None:
    core = start(FIRST)
    train(core, tmp_path, FIRST, 10, 20)
    report(core, FIRST, 10)
    settle(core)
    assert (len(reads), seen.steps) == (2, [])
    assert "look at the rank's node" in message(core)
    assert quarantine.requested_steps(RunDirectory(tmp_path)) == []
    assert is_committed(tmp_path, 10)


def test_a_doubt_with_no_older_one_left_is_settled_once_there_is_a_newer_one(
    start: Start, tmp_path: Path, seen: Seen, walks: list[int]
) -> None:
    train(start(FIRST), tmp_path, FIRST, 20)
    core = start(SECOND)
    assert step_of(core.resume(SECOND)) == 20
    flip(tmp_path, 20)
    report(core, SECOND, 20)
    settle(core)
    doubt = quarantine.read_request(RunDirectory(tmp_path), 20)
    assert doubt is not None
    assert "no checkpoint is left" in (doubt.verdict or "")
    core = start(SECOND)  # what was read is forgotten, and what was found is on the disk
    train(core, tmp_path, SECOND, 30)
    settle(core)
    assert (seen.steps, pointer(tmp_path)) == ([20], 30)
    assert quarantine.requested_steps(RunDirectory(tmp_path)) == []
    walks.clear()
    for _ in range(5):
        core.tick()
    assert not walks, "it is settled"
    assert step_of(start(THIRD).resume(THIRD)) == 30


def test_it_is_settled_too_where_training_began_anew_below_it(
    start: Start, tmp_path: Path, seen: Seen
) -> None:
    train(start(FIRST), tmp_path, FIRST, 20)
    flip(tmp_path, 20)
    core = start(SECOND)
    report(core, SECOND, 20)
    settle(core)
    core.saves.register(SECOND, request(5))
    write_all(tmp_path, SECOND, 5)
    settle(core)
    settle(core)
    assert (seen.steps, pointer(tmp_path)) == ([20], 5)
    assert quarantine.requested_steps(RunDirectory(tmp_path)) == []


def test_while_nothing_is_left_the_files_are_not_looked_at_again_and_again(
    start: Start, tmp_path: Path, walks: list[int], seconds: list[float]
) -> None:
    def lose(phase: str) -> None:  # a file, as soon as the save is committed
        if phase == "manifest":
            (tmp_path / "global_step_5/actor/checkpoint_rank_0.pt").unlink()

    train(start(FIRST), tmp_path, FIRST, 20)
    flip(tmp_path, 20)
    failpoints.enable(failpoints.COMMIT, lose)
    core = start(SECOND)
    report(core, SECOND, 20)
    settle(core)
    core.saves.register(SECOND, request(5))
    write_all(tmp_path, SECOND, 5)
    settle(core)
    walks.clear()
    for _ in range(5):
        core.tick()
    assert not walks
    seconds[0] += 60
    core.tick()
    assert walks


def test_a_doubt_of_what_lacks_a_file_is_told_and_not_read(
    start: Start, tmp_path: Path, reads: list[Path]
) -> None:
    core = start(FIRST)
    train(core, tmp_path, FIRST, 10, 20)
    flip(tmp_path, 10).unlink()
    report(core, FIRST, 10)
    settle(core)
    assert not reads
    assert "checkpoint 10 is damaged" in message(core)
    assert quarantine.requested_steps(RunDirectory(tmp_path)) == []
    assert pointer(tmp_path) == 20


def test_without_the_lease_nothing_older_is_set_aside(
    start: Start, tmp_path: Path, seen: Seen
) -> None:
    held = [True]

    def gate() -> None:
        if not held[0]:
            raise errors.NotReadyError("the Lease is not held")

    core = start(FIRST, authority=Authority(gate=gate))
    train(core, tmp_path, FIRST, 10, 20)
    flip(tmp_path, 10)
    report(core, FIRST, 10)
    core.tick()
    assert core.busy
    eventually(lambda: not is_alive(core))
    held[0] = False
    with pytest.raises(errors.NotReadyError):
        core._resuming.advance()
    assert (is_committed(tmp_path, 10), seen.steps) == (True, [])
    held[0] = True
    settle(core)
    assert (is_committed(tmp_path, 10), seen.steps) == (False, [10])


class Paused:
    """Readings wait until `go`."""

    def __init__(self) -> None:
        self.go = threading.Event()

    def __call__(self, path: Path, on_block: Callable[[int], None]) -> str:
        assert self.go.wait(20)
        return file_digest(path, on_block)


@pytest.fixture
def paused(monkeypatch: pytest.MonkeyPatch) -> Iterator[Paused]:
    found = Paused()
    monkeypatch.setattr(digests, "file_digest", found)
    yield found
    found.go.set()


def test_a_resume_does_not_wait_while_an_older_one_is_read(
    start: Start, tmp_path: Path, paused: Paused
) -> None:
    train(start(FIRST), tmp_path, FIRST, 10, 20)
    core = start(SECOND)
    report(core, SECOND, 10)
    core.tick()
    assert core.busy
    assert step_of(core.resume(SECOND)) == 20
    assert core.busy


def test_however_many_ask_the_files_are_looked_at_once_for_a_reading(
    start: Start, tmp_path: Path, walks: list[int], paused: Paused
) -> None:
    train(start(FIRST), tmp_path, FIRST, 10, 20)
    core = start(SECOND, Verify.DIGEST)
    walks.clear()
    for _ in range(10):
        with pytest.raises(errors.VerifyingError, match="checkpoint 20 is read"):
            core.resume(SECOND)
        core.poll()
    assert walks == [20, 20], "for the pointer, and for the bytes"
    paused.go.set()
    assert step_of(resume(core, SECOND)) == 20
