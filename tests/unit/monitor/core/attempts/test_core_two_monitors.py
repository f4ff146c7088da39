"""A monitor that is stopped amid its work, and wakes up when its successor has gone on."""

from collections.abc import Callable
from pathlib import Path

import pytest
from trainsync.api.protocol import ParticipantRef, ReceiptHint
from trainsync.monitor import errors
from trainsync.monitor.commit.committer import Authority
from trainsync.monitor.core.core import CoreSettings, MonitorCore
from trainsync.storage import atomic
from trainsync.storage.errors import PointerChangedError
from trainsync.storage.layout import RunDirectory
from trainsync.storage.saves import manifest, pointers

from tests.unit.monitor.saves import CHECKPOINT, FIRST, Clock, request, write_all


class Pair:
    """Two monitors of one run, each keeping one step; `holder` has the Lease."""

    def __init__(self, root: Path) -> None:
        self.root, self.run, self.clock = root, RunDirectory(root), Clock()
        self.holder = "a"
        self.a, self.b = self.monitor("a"), self.monitor("b")
        self.a.claim(FIRST, "main", None)
        self.slept = False

    def monitor(self, name: str) -> MonitorCore:
        def gate() -> None:
            if self.holder != name:
                raise errors.NotReadyError(f"{name} does not hold the Lease")

        settings = CoreSettings(max_to_keep=1)
        return MonitorCore(self.run, settings, clock=self.clock, authority=Authority(gate=gate))

    def save(self, core: MonitorCore, step: int) -> None:
        core.saves.register(FIRST, request(step))
        write_all(self.root, FIRST, step)
        core.tick()

    def sleep(self, meanwhile: Callable[[], None]) -> None:
        """A is stopped here, once; its successor takes over."""
        if not self.slept:
            self.slept, self.holder = True, "b"
            meanwhile()

    def committed(self) -> tuple[int | None, list[int]]:
        return pointers.read_pointer(self.run, CHECKPOINT), manifest.committed_steps(
            self.run, CHECKPOINT
        )


@pytest.fixture
def pair(tmp_path: Path) -> Pair:
    return Pair(tmp_path)


def sleep_before_the_rename(
    monkeypatch: pytest.MonkeyPatch, pair: Pair, meanwhile: Callable[[], None]
) -> None:
    """As in an fsync that takes longer than the Lease."""
    written = atomic._write_temporary

    def slow(path: Path, data: bytes) -> Path:
        temporary = written(path, data)
        if path == pair.run.pointer(CHECKPOINT):
            pair.sleep(meanwhile)
        return temporary

    monkeypatch.setattr(atomic, "_write_temporary", slow)


def sleep_while_it_looks(
    monkeypatch: pytest.MonkeyPatch, pair: Pair, meanwhile: Callable[[], object]
) -> None:
    """As with thousands of files to compare."""
    check = pointers.check_manifest

    def slow(*args: object, **kwargs: object) -> None:
        check(*args, **kwargs)  # type: ignore[arg-type] # whatever it takes is passed on
        pair.sleep(meanwhile)

    monkeypatch.setattr(pointers, "check_manifest", slow)


def test_a_monitor_that_slept_while_it_looked_for_the_newest_leaves_its_successors_pointer(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair.save(pair.a, 1)
    sleep_while_it_looks(monkeypatch, pair, lambda: pair.save(pair.b, 2))
    with pytest.raises(errors.NotReadyError):
        pair.a.resume(FIRST)
    assert pair.slept
    assert pair.committed() == (2, [2])


@pytest.mark.parametrize("damage", [None, "x", "99"])
def test_a_monitor_that_slept_before_it_renamed_the_pointer_leaves_its_successors(
    pair: Pair, monkeypatch: pytest.MonkeyPatch, damage: str | None
) -> None:
    pair.save(pair.a, 1)
    if damage is not None:
        pair.run.pointer(CHECKPOINT).write_text(damage)
    sleep_before_the_rename(monkeypatch, pair, lambda: pair.save(pair.b, 3))
    with pytest.raises(errors.NotReadyError):
        if damage is None:
            pair.a.saves.register(FIRST, request(2))
            write_all(pair.root, FIRST, 2)
            for rank in range(2):
                who = ParticipantRef(component="model", rank=rank)
                told = ReceiptHint(kind=CHECKPOINT, step=2, participant=who)
                pair.a.saves.receipt_hint(FIRST, told)
        else:
            pair.a.resume(FIRST)
    assert pair.slept
    assert pair.committed() == (3, [3])
    assert not list(pair.root.glob(".*.tmp"))


def test_a_repair_looks_again_when_the_pointer_moved_meanwhile(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where no gate closes, as for a moment on a cut network."""
    pair.save(pair.a, 1)
    sleep_while_it_looks(monkeypatch, pair, lambda: pair.save(pair.b, 2))
    newest, problems = pointers.repair_pointer(pair.run, CHECKPOINT)
    assert newest is not None
    assert (newest.manifest.step, problems) == (2, [])
    assert pair.committed() == (2, [2])


def test_a_repair_gives_up_on_a_pointer_that_is_moved_again_and_again(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair.save(pair.a, 1)
    looks = []

    def moved(*args: object, **kwargs: object) -> None:
        looks.append(args)
        pair.run.pointer(CHECKPOINT).write_text(f"{len(looks) + 1}\n")

    monkeypatch.setattr(pointers, "check_manifest", moved)
    with pytest.raises(PointerChangedError, match="by another process"):
        pointers.repair_pointer(pair.run, CHECKPOINT)
    assert len(looks) > 1


@pytest.mark.parametrize("text", ["1\n", "x", "9\n", None])
def test_a_moved_pointer_is_repaired_by_the_next_sweep(pair: Pair, text: str | None) -> None:
    pair.save(pair.a, 1)
    pair.save(pair.a, 2)
    pair.run.pointer(CHECKPOINT).unlink()
    if text is not None:
        pair.run.pointer(CHECKPOINT).write_text(text)
    pair.clock.go(31)
    pair.a.tick()
    assert pair.committed() == (2, [2])
    assert pair.a.resume(FIRST) is not None
