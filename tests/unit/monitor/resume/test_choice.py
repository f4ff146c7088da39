"""Which checkpoint a run goes on from, where bytes have changed and sizes have not."""

import contextlib
import errno
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from trainsync import failpoints
from trainsync.api.protocol import DamageReport, ResumePoint, SaveKind
from trainsync.api.spec import Verify
from trainsync.api.status import ConditionType
from trainsync.monitor import errors
from trainsync.monitor.commit.committer import Authority
from trainsync.monitor.commit.core import CoreSettings, MonitorCore
from trainsync.monitor.commit.observer import NullObserver
from trainsync.monitor.ledger.saves import Owner
from trainsync.storage.digest import file_digest
from trainsync.storage.inspect import digests
from trainsync.storage.layout import RunDirectory
from trainsync.storage.saves import manifest, pointers, quarantine, receipts

from tests.unit.monitor.fakes import eventually
from tests.unit.monitor.saves import (
    CHECKPOINT,
    FIRST,
    SECOND,
    Clock,
    directory,
    receipt,
    request,
    stage,
    write_all,
)

THIRD = Owner(2, "cccccccc2")
Start = Callable[..., MonitorCore]


class Seen(NullObserver):
    """Which steps were set aside."""

    def __init__(self) -> None:
        self.steps: list[int] = []

    def set_aside(self, step: int) -> None:
        self.steps.append(step)


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
        owner: Owner,
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


def train(core: MonitorCore, root: Path, owner: Owner, *steps: int) -> None:
    for step in steps:
        core.saves.register(owner, request(step))
        write_all(root, owner, step)
        core.tick()
        assert pointer(root) == step


def flip(root: Path, step: int, rank: int = 1) -> Path:
    """Change one bit, and nothing else that a look at the directory would show."""
    path = root / f"global_step_{step}/actor/checkpoint_rank_{rank}.pt"
    info, data = path.stat(), bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    os.utime(path, ns=(info.st_atime_ns, info.st_mtime_ns))
    return path


def pointer(root: Path) -> int | None:
    return pointers.read_pointer(RunDirectory(root), CHECKPOINT)


def settle(core: MonitorCore) -> None:
    """Run the core until no read is pending."""
    core.tick()

    def done() -> bool:
        core.poll()
        return not core.busy

    eventually(done)
    core.tick()


def resume(core: MonitorCore, owner: Owner) -> ResumePoint | None:
    """As a client, that asks again."""
    end = time.monotonic() + 20
    while True:
        try:
            return core.resume(owner)
        except errors.VerifyingError:
            assert time.monotonic() < end
            settle(core)


def step_of(point: ResumePoint | None) -> int | None:
    return None if point is None else point.step


def report(core: MonitorCore, owner: Owner, step: int, error: str = "rank 1: differs") -> None:
    digest = manifest.read_manifest(core._run, CHECKPOINT, step).digest
    core.damage(owner, DamageReport(step=step, manifest_digest=digest, error=error))


def message(core: MonitorCore) -> str:
    return next(
        c.message for c in core.view().conditions if c.type is ConditionType.CHECKPOINT_HEALTHY
    )


def is_alive(core: MonitorCore) -> bool:
    """Whether the core's reader reads still."""
    running = core._reader._running
    return running is not None and running.is_alive


def is_committed(root: Path, step: int) -> bool:
    return RunDirectory(root).manifest(CHECKPOINT, step).exists()


# Where the run wants digests.


def test_a_checkpoint_with_a_flipped_bit_is_set_aside_for_the_one_before(
    start: Start, tmp_path: Path, seen: Seen
) -> None:
    train(start(FIRST, Verify.DIGEST), tmp_path, FIRST, 10, 20)
    path = flip(tmp_path, 20)
    core = start(SECOND, Verify.DIGEST)
    with pytest.raises(errors.VerifyingError, match="checkpoint 20 is read to the last bit"):
        core.resume(SECOND)
    assert step_of(resume(core, SECOND)) == 10
    assert (pointer(tmp_path), seen.steps) == (10, [20])
    assert not is_committed(tmp_path, 20)
    assert RunDirectory(tmp_path).set_aside(CHECKPOINT, 20).exists()
    assert path.exists(), "it can be looked at"
    assert "checkpoint 20 is set aside" in message(core)
    assert f"{path.name}: has digest" in message(core)
    last = core.view().checkpoint.last_committed
    assert last is not None
    assert last.step == 10
    # A monitor that restarts says so too, until the step is saved again.
    core = start(SECOND, Verify.DIGEST)
    assert "checkpoint 20 is set aside" in message(core)
    train(core, tmp_path, SECOND, 20)
    assert "set aside" not in message(core)
    assert step_of(resume(core, SECOND)) == 20


def test_every_checkpoint_on_the_way_to_a_whole_one_is_set_aside(
    start: Start, tmp_path: Path, seen: Seen
) -> None:
    train(start(FIRST, Verify.DIGEST), tmp_path, FIRST, 10, 20, 30)
    flip(tmp_path, 20)
    flip(tmp_path, 30, rank=0)
    assert step_of(resume(start(SECOND, Verify.DIGEST), SECOND)) == 10
    assert sorted(seen.steps) == [20, 30]


def test_all_of_an_attempt_are_told_the_same_and_the_bytes_are_read_once(
    start: Start, tmp_path: Path, reads: list[Path]
) -> None:
    train(start(FIRST, Verify.DIGEST), tmp_path, FIRST, 10, 20)
    core = start(SECOND, Verify.DIGEST)
    points = [resume(core, SECOND) for _ in range(3)]
    assert [step_of(point) for point in points] == [20, 20, 20]
    core = start(SECOND, Verify.DIGEST)  # the monitor restarts
    assert core.resume(SECOND) == points[0]
    assert len(reads) == 2, "each file once"
    train(core, tmp_path, SECOND, 30)
    assert step_of(core.resume(SECOND)) == 30, "its own were read before they were committed"
    assert step_of(resume(start(THIRD, Verify.DIGEST), THIRD)) == 30
    assert len(reads) == 4, "the next attempt reads again"


def test_sizes_alone_are_looked_at_where_the_run_does_not_want_digests(
    start: Start, tmp_path: Path, reads: list[Path]
) -> None:
    train(start(FIRST), tmp_path, FIRST, 10, 20)
    flip(tmp_path, 20)
    assert step_of(start(SECOND).resume(SECOND)) == 20
    assert not reads


@pytest.mark.parametrize("verify", list(Verify))
def test_with_no_older_one_left_nothing_changes_and_it_is_never_step_0(
    start: Start, tmp_path: Path, verify: Verify
) -> None:
    core = start(FIRST, verify, max_to_keep=1)
    train(core, tmp_path, FIRST, 10, 20)
    path = flip(tmp_path, 20)
    core = start(SECOND, verify, max_to_keep=1)
    if verify is Verify.SIZE:
        assert step_of(core.resume(SECOND)) == 20
        report(core, SECOND, 20)
        settle(core)
        core = start(THIRD, verify, max_to_keep=1)
    owner = SECOND if verify is Verify.DIGEST else THIRD
    why = r"maxToKeep: 1.*the bytes of 20 have changed: .*checkpoint_rank_1.pt: has digest"
    for _ in range(2):
        with pytest.raises(errors.NoValidCheckpointError, match=why):
            resume(core, owner)
    assert (pointer(tmp_path), is_committed(tmp_path, 20)) == (20, True)
    assert "no checkpoint is left" in message(core)
    flip(tmp_path, 20)  # the file is restored
    assert path.exists()
    fourth = Owner(3, "dddddddd3")
    assert step_of(resume(start(fourth, verify, max_to_keep=1), fourth)) == 20
    assert quarantine.doubted_steps(RunDirectory(tmp_path)) == []


# Where a rank meets the damage.


def test_what_a_rank_reports_is_read_and_set_aside_for_the_next_attempt(
    start: Start, tmp_path: Path, seen: Seen
) -> None:
    train(start(FIRST), tmp_path, FIRST, 10, 20)
    flip(tmp_path, 20)
    core = start(SECOND)
    assert step_of(core.resume(SECOND)) == 20
    report(core, SECOND, 20)
    settle(core)
    assert (pointer(tmp_path), seen.steps) == (10, [20])
    assert "checkpoint 20 is set aside" in message(core)
    # Others of this attempt have the damaged one.
    with pytest.raises(errors.ResumeLostError, match=r"from step 20, .* next .* from step 10"):
        core.resume(SECOND)
    assert step_of(start(THIRD).resume(THIRD)) == 10


def test_an_attempt_waits_for_what_a_rank_of_the_one_before_reported(
    start: Start, tmp_path: Path, seen: Seen
) -> None:
    train(start(FIRST), tmp_path, FIRST, 10, 20)
    flip(tmp_path, 20)
    report(start(SECOND), SECOND, 20)  # whose monitor ends before it has read anything
    core = start(THIRD)
    with pytest.raises(errors.VerifyingError):
        core.resume(THIRD)
    assert step_of(resume(core, THIRD)) == 10
    assert seen.steps == [20]


def test_a_rank_that_is_wrong_costs_one_reading_and_its_node_is_named(
    start: Start, tmp_path: Path, seen: Seen, reads: list[Path]
) -> None:
    train(start(FIRST), tmp_path, FIRST, 10, 20)
    core = start(SECOND)
    core.resume(SECOND)
    for rank in range(3):
        report(core, SECOND, 20, f"node-7, rank {rank}: has digest 1, expected 2")
        settle(core)
    assert len(reads) == 2, "each file once, however many say so"
    assert (pointer(tmp_path), seen.steps) == (20, [])
    assert "look at the rank's node: node-7" in message(core)
    assert step_of(core.resume(SECOND)) == 20
    assert step_of(start(THIRD).resume(THIRD)) == 20
    assert quarantine.doubted_steps(RunDirectory(tmp_path)) == []


def test_a_report_that_comes_after_the_reading_is_read_for(
    start: Start, tmp_path: Path, seen: Seen
) -> None:
    train(start(FIRST, Verify.DIGEST), tmp_path, FIRST, 10, 20)
    core = start(SECOND, Verify.DIGEST)
    assert step_of(resume(core, SECOND)) == 20
    flip(tmp_path, 20)
    report(core, SECOND, 20)
    settle(core)
    assert seen.steps == [20]


def test_reports_of_others_change_nothing(start: Start, tmp_path: Path, reads: list[Path]) -> None:
    train(start(FIRST), tmp_path, FIRST, 10, 20)
    flip(tmp_path, 20)
    core = start(SECOND)
    with pytest.raises(errors.FencedError):
        report(core, FIRST, 20)
    for step, digest in ((20, "sha256:other"), (40, "sha256:none")):
        core.damage(SECOND, DamageReport(step=step, manifest_digest=digest, error="differs"))
    settle(core)
    assert not reads
    assert step_of(core.resume(SECOND)) == 20


# What must not set anything aside.


def test_a_volume_that_cannot_be_read_sets_nothing_aside(
    start: Start,
    tmp_path: Path,
    seen: Seen,
    seconds: list[float],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    train(start(FIRST, Verify.DIGEST), tmp_path, FIRST, 10, 20)
    core = start(SECOND, Verify.DIGEST)
    for number in (errno.EIO, errno.ESTALE):

        def refuse(path: Path, _: object, number: int = number) -> str:
            raise OSError(number, os.strerror(number), str(path))

        with monkeypatch.context() as patch:
            patch.setattr(digests, "file_digest", refuse)
            for _ in range(2):
                with pytest.raises(errors.StorageUnavailableError, match=os.strerror(number)):
                    resume(core, SECOND)
        assert (pointer(tmp_path), seen.steps) == (20, [])
        with pytest.raises(errors.StorageUnavailableError):
            core.resume(SECOND)
        seconds[0] += 61
    assert step_of(resume(core, SECOND)) == 20


def test_a_rank_with_a_bad_disk_sets_nothing_aside_and_is_not_read_for_without_end(
    start: Start, tmp_path: Path, seen: Seen, monkeypatch: pytest.MonkeyPatch
) -> None:
    train(start(FIRST), tmp_path, FIRST, 10, 20)
    core = start(SECOND)
    tries: list[Path] = []

    def refuse(path: Path, _: object) -> str:
        tries.append(path)
        raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))

    monkeypatch.setattr(digests, "file_digest", refuse)
    report(core, SECOND, 20)
    for _ in range(5):
        settle(core)
    assert len(tries) == 2
    assert (pointer(tmp_path), seen.steps) == (20, [])
    assert os.strerror(errno.EIO) in message(core)


def test_what_differs_in_memory_alone_is_whole(
    start: Start, tmp_path: Path, seen: Seen, monkeypatch: pytest.MonkeyPatch
) -> None:
    train(start(FIRST, Verify.DIGEST), tmp_path, FIRST, 10, 20)
    read: set[Path] = set()

    def differs_once(path: Path, on_block: Callable[[int], None]) -> str:
        found = file_digest(path, on_block) if path in read else "xxh3-128:" + 32 * "0"
        read.add(path)
        return found

    monkeypatch.setattr(digests, "file_digest", differs_once)
    assert step_of(resume(start(SECOND, Verify.DIGEST), SECOND)) == 20
    assert seen.steps == []
    assert read, "its files were read"


def test_a_monitor_that_lost_its_lease_while_it_read_sets_nothing_aside(
    start: Start, tmp_path: Path, seen: Seen
) -> None:
    train(start(FIRST), tmp_path, FIRST, 10, 20)
    flip(tmp_path, 20)
    held = [True]

    def gate() -> None:
        if not held[0]:
            raise errors.NotReadyError("the Lease is not held")

    core = start(SECOND, authority=Authority(gate=gate))
    report(core, SECOND, 20)
    core.tick()
    held[0] = False
    for _ in range(50):
        core.poll()
        time.sleep(0.005)
    assert (is_committed(tmp_path, 20), seen.steps) == (True, [])
    held[0] = True
    settle(core)
    assert (is_committed(tmp_path, 20), seen.steps) == (False, [20])


def test_requests_are_answered_while_a_checkpoint_is_read(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train(start(FIRST, Verify.DIGEST), tmp_path, FIRST, 10, 20)
    go = threading.Event()

    def slow(path: Path, on_block: Callable[[int], None]) -> str:
        assert go.wait(20)
        return file_digest(path, on_block)

    monkeypatch.setattr(digests, "file_digest", slow)
    core = start(SECOND, Verify.DIGEST)
    with pytest.raises(errors.VerifyingError, match=r"0\.0 of 0\.0 GB"):
        core.resume(SECOND)
    train(core, tmp_path, SECOND, 30)
    assert core.busy
    go.set()
    settle(core)
    assert step_of(core.resume(SECOND)) == 30


def test_an_attempt_that_could_not_wait_has_not_made_the_next_one_wait(
    start: Start, tmp_path: Path, reads: list[Path]
) -> None:
    core = start(FIRST, Verify.DIGEST)
    train(core, tmp_path, FIRST, 10, 20)
    core.claim(SECOND, "main", None)
    with pytest.raises(errors.VerifyingError):
        core.resume(SECOND)
    settle(core)
    core.claim(THIRD, "main", None)
    assert step_of(core.resume(THIRD)) == 20
    assert len(reads) == 2
    fourth = Owner(3, "dddddddd3")
    core.claim(fourth, "main", None)
    assert step_of(resume(core, fourth)) == 20
    assert len(reads) == 4, "the answer was used: bytes may have changed since"


def test_a_monitor_killed_anywhere_while_it_sets_aside_is_finished_by_the_next(
    start: Start, tmp_path: Path, seen: Seen, monkeypatch: pytest.MonkeyPatch
) -> None:
    class KilledError(BaseException):
        pass

    def kill(*_: object) -> None:
        raise KilledError

    train(start(FIRST), tmp_path, FIRST, 10, 20)
    flip(tmp_path, 20)
    owners = [Owner(number, f"eeeeeeee{number}") for number in range(1, 5)]
    for owner, where in zip(
        owners,
        [
            (manifest, "set_aside"),
            (manifest.atomic, "fsync_directory"),
            (quarantine, "remove_doubt"),
        ],
        strict=False,
    ):
        core = start(owner)
        if is_committed(tmp_path, 20):
            report(core, owner, 20)
        with monkeypatch.context() as patch:
            core.tick()
            eventually(lambda core=core: not is_alive(core))  # type: ignore[misc]
            patch.setattr(*where, kill)
            with contextlib.suppress(KilledError):
                core.poll()
    assert not is_committed(tmp_path, 20)
    core = start(owners[-1])
    assert step_of(resume(core, owners[-1])) == 10
    assert pointer(tmp_path) == 10
    assert quarantine.doubted_steps(RunDirectory(tmp_path)) == []


def test_the_kinds_are_not_mixed_up(start: Start, tmp_path: Path) -> None:
    core = start(FIRST, Verify.DIGEST)
    train(core, tmp_path, FIRST, 10)
    core.saves.register(FIRST, request(20, SaveKind.STATE_DICT))
    write_all(tmp_path, FIRST, 20, SaveKind.STATE_DICT)
    core.tick()
    core = start(SECOND, Verify.DIGEST)
    assert step_of(resume(core, SECOND)) == 10
    assert pointers.read_pointer(RunDirectory(tmp_path), SaveKind.STATE_DICT) == 20


# Where a state dict lists the same files.


def train_both(core: MonitorCore, root: Path, owner: Owner, *steps: int) -> None:
    """Save state dicts, and checkpoints that reuse their files."""
    for step in steps:
        for kind in (SaveKind.STATE_DICT, CHECKPOINT):
            core.saves.register(owner, request(step, kind, reuse=kind is CHECKPOINT))
            write_all(root, owner, step, kind)
        core.tick()
        assert pointer(root) == step


def train_own(core: MonitorCore, root: Path, owner: Owner, step: int) -> None:
    """Save a checkpoint with weights of its own, under the names that state dicts have."""
    core.saves.register(owner, request(step))
    save = directory(root, owner, step)
    for rank in range(2):
        path = f"actor/{SaveKind.STATE_DICT.value}_rank_{rank}.pt"
        entry = stage(root, owner, step, rank, path=path)
        receipts.write_receipt(save, receipt(owner, step, rank, CHECKPOINT, entry))
    core.tick()
    assert core.saves.save_status(owner, CHECKPOINT, step).error is None
    assert pointer(root) == step


def flip_weights(root: Path, step: int) -> None:
    path = root / f"global_step_{step}/actor/{SaveKind.STATE_DICT.value}_rank_0.pt"
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def state_dict_pointer(root: Path) -> int | None:
    return pointers.read_pointer(RunDirectory(root), SaveKind.STATE_DICT)


def test_the_state_dict_with_the_same_damage_is_quarantined_and_blocks_no_resume(
    start: Start, tmp_path: Path, seen: Seen
) -> None:
    train_both(start(FIRST, Verify.DIGEST), tmp_path, FIRST, 10, 20)
    flip_weights(tmp_path, 20)
    core = start(SECOND, Verify.DIGEST)
    assert step_of(resume(core, SECOND)) == 10
    assert (pointer(tmp_path), state_dict_pointer(tmp_path), seen.steps) == (10, 10, [20])
    last = core.view().checkpoint.last_state_dict
    assert last is not None
    assert last.step == 10
    assert "set aside with the state dict that shares its files" in message(core)
    train_own(core, tmp_path, SECOND, 20)
    assert core.view().checkpoint.last_error is None
    assert step_of(resume(start(THIRD, Verify.DIGEST), THIRD)) == 20


def test_a_whole_state_dict_beside_a_damaged_checkpoint_stays(start: Start, tmp_path: Path) -> None:
    train_both(start(FIRST, Verify.DIGEST), tmp_path, FIRST, 10, 20)
    flip(tmp_path, 20)
    assert step_of(resume(start(SECOND, Verify.DIGEST), SECOND)) == 10
    assert (pointer(tmp_path), state_dict_pointer(tmp_path)) == (10, 20)


def test_the_last_state_dict_may_be_set_aside_and_its_pointer_comes_with_the_next(
    start: Start, tmp_path: Path
) -> None:
    core = start(FIRST, Verify.DIGEST)
    train(core, tmp_path, FIRST, 10)
    train_both(core, tmp_path, FIRST, 20)
    flip_weights(tmp_path, 20)
    core = start(SECOND, Verify.DIGEST)
    assert step_of(resume(core, SECOND)) == 10
    assert state_dict_pointer(tmp_path) is None
    train_both(core, tmp_path, SECOND, 15)
    assert state_dict_pointer(tmp_path) == 15
    assert core.view().checkpoint.last_error is None


@pytest.mark.parametrize("killed_at", ["set_aside", "repair_pointer", "remove_doubt"])
@pytest.mark.parametrize("older", [[10], []], ids=["an older state dict", "the last state dict"])
def test_a_monitor_killed_between_the_two_is_finished_by_the_next(
    start: Start,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    killed_at: str,
    older: list[int],
) -> None:
    class KilledError(BaseException):
        pass

    real, calls = manifest.set_aside, []

    def kill(*args: object) -> bool:
        calls.append(args)
        if killed_at != "set_aside" or len(calls) == 2:
            raise KilledError
        return real(*args)  # type: ignore[arg-type]  # passed on as they came

    core = start(FIRST)
    train(core, tmp_path, FIRST, 5)
    train_both(core, tmp_path, FIRST, *older, 20)
    flip_weights(tmp_path, 20)
    core = start(SECOND)
    assert step_of(core.resume(SECOND)) == 20
    report(core, SECOND, 20)
    core.tick()
    eventually(lambda: not is_alive(core))
    owner = {"set_aside": manifest, "repair_pointer": pointers, "remove_doubt": quarantine}[
        killed_at
    ]
    with monkeypatch.context() as patch:
        patch.setattr(owner, killed_at, kill)
        with pytest.raises(KilledError):
            core.poll()
    core = start(THIRD)
    assert step_of(resume(core, THIRD)) == (10 if older else 5)
    assert state_dict_pointer(tmp_path) == (10 if older else None)
    assert quarantine.doubted_steps(RunDirectory(tmp_path)) == []
    train_own(core, tmp_path, THIRD, 20)
    assert "set aside" not in message(core)


# Where what is doubted is not the newest.


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
    assert quarantine.doubted_steps(RunDirectory(tmp_path)) == []
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
    assert quarantine.doubted_steps(RunDirectory(tmp_path)) == []
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
    doubt = quarantine.read_doubt(RunDirectory(tmp_path), 20)
    assert doubt is not None
    assert "no checkpoint is left" in (doubt.verdict or "")
    core = start(SECOND)  # what was read is forgotten, and what was found is on the disk
    train(core, tmp_path, SECOND, 30)
    settle(core)
    assert (seen.steps, pointer(tmp_path)) == ([20], 30)
    assert quarantine.doubted_steps(RunDirectory(tmp_path)) == []
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
    assert quarantine.doubted_steps(RunDirectory(tmp_path)) == []


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
    assert quarantine.doubted_steps(RunDirectory(tmp_path)) == []
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


def test_what_another_run_of_the_name_saved_is_read_though_the_attempt_is_the_same(
    start: Start, tmp_path: Path, reads: list[Path]
) -> None:
    train(start(FIRST, run_uid="before"), tmp_path, FIRST, 10)
    core = start(FIRST, Verify.DIGEST, run_uid="again")
    assert step_of(resume(core, FIRST)) == 10
    assert len(reads) == 2
