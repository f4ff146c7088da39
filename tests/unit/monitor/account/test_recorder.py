"""The account through a monitor's core, on a volume, over deaths of monitors."""

import json
import logging
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from trainsync.api.protocol import ProgressReport
from trainsync.api.spec import Role
from trainsync.api.status import RolePods
from trainsync.monitor import errors
from trainsync.monitor.account import places, recorder
from trainsync.monitor.account.recorder import WRITE_SECONDS
from trainsync.monitor.commit.committer import Authority
from trainsync.monitor.core.core import CoreSettings, MonitorCore
from trainsync.storage.layout import RunDirectory
from trainsync.storage.saves import incarnations, receipts

from tests.unit.monitor.core.cores import Disk, healthy
from tests.unit.monitor.saves import (
    CHECKPOINT,
    FIRST,
    Clock,
    directory,
    receipt,
    request,
    stage,
)

PODS = {Role.TRAINER: RolePods(role="Trainer", held=4, held_gpus=4)}
Start = Callable[..., MonitorCore]


class Steady:
    """Seconds that only go on, while the wall clock may jump."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def steady() -> Steady:
    return Steady()


@pytest.fixture
def start(tmp_path: Path, clock: Clock, steady: Steady) -> Start:
    def make(**more: object) -> MonitorCore:
        settings = CoreSettings(run_uid=str(more.pop("uid", "uid")))
        core = MonitorCore(RunDirectory(tmp_path), settings, clock=clock, monotonic=steady, **more)  # type: ignore[arg-type]
        core.claim(FIRST, "main", None)
        core.gpus = 4.0
        return core

    return make


@pytest.fixture
def go(clock: Clock, steady: Steady) -> Callable[[float], None]:
    def go(seconds: float) -> None:
        clock.go(seconds)
        steady.now += seconds

    return go


def report(core: MonitorCore, step: int, seconds: float) -> None:
    core.report_progress(FIRST, ProgressReport(step=step, loop_seconds=seconds, waited_seconds=0))


def classes(core: MonitorCore) -> dict[str, int]:
    found = core.view().account
    return {} if found is None else {k: s for k, s in found.roles[0].classes.items() if s}


def test_the_next_monitor_goes_on_with_the_account(
    start: Start, go: Callable[[float], None]
) -> None:
    core = start()
    core.see_pods(PODS, "Starting")
    go(10.0)
    report(core, 1, 5.0)
    core.tick()  # writes it
    go(20.0)
    report(core, 2, 25.0)  # lost with the monitor, which does not write it
    go(20.0)
    again = start()
    assert classes(again) == {"restart": 20, "train": 20}
    report(again, 3, 45.0)
    assert classes(again) == {"restart": 20, "train": 180}


def test_a_step_back_of_an_attempt_is_a_repeat_also_for_the_next_monitor(
    start: Start, go: Callable[[float], None], tmp_path: Path
) -> None:
    core = start()
    core.see_pods(PODS, "Running")
    go(20.0)
    report(core, 2, 20.0)
    go(WRITE_SECONDS)
    core.tick()
    later = type(FIRST)(1, "bbbbbbbb")
    again = start()
    again.claim(later, "main", None)
    again.expect(None)
    assert again.resume(later) is None
    go(20.0)
    again.report_progress(later, ProgressReport(step=4, loop_seconds=20.0, waited_seconds=0.0))
    # Two of the four steps were trained before.
    assert classes(again) == {"train": 80 + 40, "repeat": 40, "restart": 4 * WRITE_SECONDS}


def test_a_restart_in_place_is_charged_as_one_also_by_the_next_monitor(
    start: Start, go: Callable[[float], None]
) -> None:
    core = start()
    core.see_pods(PODS, "Running")
    go(20.0)
    report(core, 2, 20.0)
    name = incarnations.successor(FIRST.incarnation)
    core.renew(FIRST, name, "rank 1 died")
    restarted = type(FIRST)(0, name)
    assert core.resume(restarted) is None
    go(WRITE_SECONDS)
    core.tick()
    go(5.0)
    core.report_progress(restarted, ProgressReport(step=1, loop_seconds=5.0, waited_seconds=0.0))
    assert classes(core) == {"train": 80, "repeat": 20, "restart": 4 * WRITE_SECONDS}


def test_a_save_is_charged_with_what_it_blocked_its_slowest_rank(
    start: Start, go: Callable[[float], None], tmp_path: Path
) -> None:
    core = start()
    core.see_pods(PODS, "Running")
    go(10.0)
    report(core, 1, 10.0)
    core.saves.register(FIRST, request(1))
    for rank, seconds in ((0, 1.0), (1, 2.0)):
        entry = stage(tmp_path, FIRST, 1, rank)
        record = replace(receipt(FIRST, 1, rank, CHECKPOINT, entry), blocked_seconds=seconds)
        receipts.write_receipt(directory(tmp_path, FIRST, 1), record)
    core.tick()
    go(10.0)
    report(core, 2, 20.0)
    assert classes(core) == {"save": 8, "train": 72}


def test_jumps_of_the_wall_clock_do_not_count(start: Start, clock: Clock, steady: Steady) -> None:
    core = start()
    core.see_pods(PODS, "Running")
    for jump in (3600.0, -7200.0):
        clock.now += timedelta(seconds=jump)
        steady.now += 10.0
        core.see_pods(PODS, "Complete")
    assert classes(core) == {"idle": 80}


def test_a_clock_that_went_back_between_two_monitors_makes_no_negative_seconds(
    start: Start, clock: Clock, steady: Steady
) -> None:
    core = start()
    core.see_pods(PODS, "Running")
    steady.now += 60.0
    core.see_pods(PODS, "Complete")
    core.tick()
    clock.now -= timedelta(days=1)
    again = start()
    steady.now += 10.0
    again.see_pods(PODS, "Complete")
    assert classes(again) == {"idle": 4 * 70}


@pytest.mark.parametrize("damage", [b"{", b'{"version": 2}', b"[]"])
def test_a_damaged_account_begins_anew_and_says_so(
    start: Start, tmp_path: Path, damage: bytes, caplog: pytest.LogCaptureFixture,
    go: Callable[[float], None],
) -> None:  # fmt: skip
    file = RunDirectory(tmp_path).account
    file.parent.mkdir(parents=True)
    file.write_bytes(damage)
    with caplog.at_level(logging.WARNING):
        core = start()
    assert "the account begins anew" in caplog.text
    core.see_pods(PODS, "Running")
    go(10.0)
    core.see_pods(PODS, "Complete")
    assert classes(core) == {"idle": 40}


def test_the_account_of_another_run_in_the_same_directory_is_not_taken_over(
    start: Start, go: Callable[[float], None]
) -> None:
    core = start()
    core.see_pods(PODS, "Running")
    go(60.0)
    core.see_pods(PODS, "Complete")
    core.tick()
    assert classes(start()) == {"idle": 240}
    assert classes(start(uid="another")) == {}


def test_a_full_volume_costs_no_second_and_no_health(
    start: Start, go: Callable[[float], None], monkeypatch: pytest.MonkeyPatch, tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    core = start()
    core.see_pods(PODS, "Running")
    before = healthy(core)
    disk = Disk(monkeypatch)
    disk.fail("ACCOUNT", 1)
    with caplog.at_level(logging.WARNING):
        core.tick()
    assert "the account is not written" in caplog.text
    assert healthy(core) == before
    go(WRITE_SECONDS)
    core.see_pods(PODS, "Complete")
    core.tick()
    assert RunDirectory(tmp_path).account.exists()
    assert classes(core) == {"idle": 4 * round(WRITE_SECONDS)}


def test_a_monitor_without_the_lease_writes_no_account(
    start: Start, go: Callable[[float], None], tmp_path: Path
) -> None:
    held = True

    def gate() -> None:
        if not held:
            raise errors.NotReadyError("the Lease is not held")

    core = start(authority=Authority(gate=gate))
    core.see_pods(PODS, "Running")
    held = False
    go(60.0)
    core.see_pods(PODS, "Complete")
    core.tick()
    assert not RunDirectory(tmp_path).account.exists()


def test_a_local_run_has_no_account(start: Start, go: Callable[[float], None]) -> None:
    core = start()
    report(core, 1, 5.0)
    go(60.0)
    report(core, 2, 65.0)
    core.tick()
    assert core.view().account is None


@pytest.mark.parametrize(
    "damage",
    [
        lambda found: found.update(since=1e300),
        lambda found: found["roles"]["Trainer"]["pods"][0].update(held=1e300),
        lambda found: found["roles"]["Trainer"]["pods"].clear(),
    ],
    ids=["time", "weight", "no pods"],
)
def test_an_account_whose_numbers_cannot_be_begins_anew_and_the_monitor_lives(
    start: Start,
    go: Callable[[float], None],
    tmp_path: Path,
    damage: Callable[[dict[str, Any]], None],
) -> None:
    core = start()
    core.see_pods(PODS, "Running")
    go(WRITE_SECONDS)
    core.tick()
    file = RunDirectory(tmp_path).account
    found = json.loads(file.read_text())
    damage(found)
    file.write_text(json.dumps(found))
    again = start()
    again.see_pods(PODS, "Running")
    go(10.0)
    report(again, 1, 10.0)
    assert classes(again) == {"train": 40}


def test_an_account_that_is_refused_holds_up_no_commit_and_is_read_when_it_can_be(
    start: Start,
    go: Callable[[float], None],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    core = start()
    core.see_pods(PODS, "Running")
    go(10.0)
    report(core, 1, 10.0)
    core.tick()
    read = places.records.read_regular

    def refuse(path: Path) -> bytes:
        if path.name == "ACCOUNT.json":
            raise OSError(5, "Input/output error")
        return read(path)

    monkeypatch.setattr(places.records, "read_regular", refuse)
    again = start()
    again.see_pods(PODS, "Running")
    again.tick()
    assert again.ready
    assert classes(again) == {}
    assert "Input/output error" in caplog.text
    monkeypatch.setattr(places.records, "read_regular", read)
    go(WRITE_SECONDS)
    again.tick()
    assert classes(again) == {"train": 40}


def test_an_account_that_cannot_be_written_because_of_a_link_holds_up_no_tick(
    start: Start, go: Callable[[float], None], tmp_path: Path
) -> None:
    core = start()
    core.see_pods(PODS, "Running")
    internal = RunDirectory(tmp_path).account.parent
    moved = tmp_path / "moved"
    internal.rename(moved)
    internal.symlink_to(moved)
    go(WRITE_SECONDS)
    core.tick()
    assert core.ready


def test_an_error_of_the_books_ends_the_account_and_nothing_else(
    start: Start, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    core = start()
    core.see_pods(PODS, "Running")
    monkeypatch.setattr(recorder.Account, "trained", lambda *_: 1 / 0)
    report(core, 1, 1.0)
    assert core.view().account is None
    assert "the account begins anew" in caplog.text


def test_an_account_in_which_nothing_changes_is_not_written_again(
    start: Start, go: Callable[[float], None], tmp_path: Path
) -> None:
    core = start()
    core.see_pods(PODS, "Running")
    go(WRITE_SECONDS)
    core.tick()
    file = RunDirectory(tmp_path).account
    first = file.stat().st_ino, file.stat().st_mtime_ns
    for _ in range(3):
        go(WRITE_SECONDS)
        core.see_pods(PODS, "Running")
        core.tick()
    assert (file.stat().st_ino, file.stat().st_mtime_ns) == first
