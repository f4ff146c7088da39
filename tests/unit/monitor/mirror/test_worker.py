"""A mirror that follows a volume, with a store in memory that fails when it is told to."""

import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from trainsync.api.protocol import SaveKind
from trainsync.api.status import CheckpointStatus
from trainsync.monitor.core.core import CoreSettings, MonitorCore
from trainsync.monitor.ledger.saves import SaveOwner
from trainsync.monitor.mirror import worker
from trainsync.monitor.mirror.settings import MirrorSettings
from trainsync.monitor.mirror.worker import Mirror, MirrorTimes
from trainsync.storage.objects import commits, inspecting
from trainsync.storage.objects.bucket import ObjectBucket
from trainsync.storage.objects.errors import StoreRefusedError
from trainsync.storage.saves.manifest import committed_steps

from tests.unit.cli.conftest import build
from tests.unit.monitor.saves import CHECKPOINT, FIRST, SECOND, Clock, request, write_all
from tests.unit.storage.objects.memory import memory
from tests.waiting import eventually

TIMES = MirrorTimes(look=60.0, ask=0.01, first_wait=0.01, longest_wait=0.02)


class Noted:
    """What an observer of the mirror is told."""

    def __init__(self) -> None:
        self.steps: list[int] = []
        self.bytes = self.failures = 0
        self.since: datetime | None = None

    def mirrored(self, step: int, seconds: float) -> None:
        self.steps.append(step)

    def mirrored_bytes(self, count: int) -> None:
        self.bytes += count

    def mirror_failed(self) -> None:
        self.failures += 1

    def mirror_behind(self, since: datetime | None) -> None:
        self.since = since


class World:
    """A volume with steps 10, 20 and 30, and an empty bucket."""

    def __init__(self, root: Path) -> None:
        self.run = build(root)
        self.bucket = memory()
        self.noted = Noted()
        self.may_write = threading.Event()
        self.may_write.set()
        self.opened: Callable[[MirrorSettings], ObjectBucket] = lambda _: self.bucket
        self.times = TIMES

    @contextmanager
    def mirroring(self, **settings: Any) -> Iterator[Mirror]:
        mirror = Mirror(
            self.run,
            MirrorSettings("s3://bucket/run", **settings),
            allowed=self.may_write.is_set,
            observer=self.noted,
            clock=Clock(),
            times=self.times,
            opened=lambda chosen: self.opened(chosen),
        )
        mirror.start()
        try:
            yield mirror
        finally:
            assert mirror.stop(20.0)

    @property
    def there(self) -> list[int]:
        return commits.committed_steps(self.bucket, CHECKPOINT)

    def commit(self, mirror: Mirror, *steps: int, owner: SaveOwner = FIRST) -> None:
        core = MonitorCore(self.run, CoreSettings(), clock=Clock(), observer=mirror)
        core.tick()
        core.claim(owner, "main", None)
        for step in steps:
            core.saves.register(owner, request(step))
            write_all(self.run.root, owner, step)
        core.tick()


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path / "run")


def test_the_newest_step_is_copied_whole_and_a_commit_is_followed_at_once(world: World) -> None:
    with world.mirroring() as mirror:
        eventually(lambda: world.there == [30])
        eventually(lambda: mirror.state.behind_since is None and mirror.state.last == 30)
        world.commit(mirror, 40)
        eventually(lambda: world.there == [30, 40])
        eventually(lambda: mirror.state.last == 40)
    assert commits.read_pointer(world.bucket, CHECKPOINT) == 40
    assert all(one.save.valid for one in inspecting.check_all_sizes(world.bucket))
    assert world.noted.steps == [30, 40]
    assert world.noted.bytes > 0
    assert (world.noted.failures, world.noted.since) == (0, None)


def test_the_last_steps_and_lasting_ones_stay(world: World) -> None:
    with world.mirroring(keep_last=1, keep_every=20) as mirror:
        eventually(lambda: world.there == [20, 30])
        assert commits.committed_steps(world.bucket, SaveKind.STATE_DICT) == [20]
        world.commit(mirror, 50)
        eventually(lambda: world.there == [20, 50])


def test_failures_are_told_and_tried_again_and_the_state_has_the_sentence(world: World) -> None:
    def refuses(_: MirrorSettings) -> ObjectBucket:
        raise StoreRefusedError("s3://bucket/run: the credentials are refused")

    world.opened = refuses
    with world.mirroring() as mirror:
        eventually(lambda: world.noted.failures >= 3)
        assert mirror.state.error == "s3://bucket/run: the credentials are refused"
        shown = mirror.shown(CheckpointStatus()).mirror
        assert shown is not None and shown.error == mirror.state.error
        world.opened = lambda _: world.bucket
        eventually(lambda: world.there == [30])
        eventually(lambda: mirror.state.error is None)


def test_a_monitor_that_may_not_write_copies_nothing_and_stops_amid_a_copy(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.may_write.clear()
    with world.mirroring():
        assert not threading.Event().wait(0.2)
        assert world.there == []
        put = ObjectBucket.upload

        def deposed(*arguments: Any, **named: Any) -> Any:
            world.may_write.clear()
            return put(*arguments, **named)

        monkeypatch.setattr(ObjectBucket, "upload", deposed)
        world.may_write.set()
        eventually(lambda: not world.may_write.is_set())
    assert world.there == []
    assert world.noted.failures == 0


def test_a_bucket_of_another_history_stays_as_it_is_and_the_state_says_so(
    world: World,
) -> None:
    with world.mirroring() as mirror:
        world.commit(mirror, 40)
        eventually(lambda: world.there[-1:] == [40])
    before = world.there
    shutil.rmtree(world.run.step(40))
    with world.mirroring() as mirror:  # step 40 was rolled back
        eventually(lambda: mirror.state.error is not None)
        assert "give another prefix" in (mirror.state.error or "")
        assert mirror.state.newest == 30
        assert mirror.state.behind_since is not None
        world.commit(mirror, 40, owner=SECOND)  # trained anew, to other weights
        eventually(lambda: mirror.state.newest == 40)
        eventually(lambda: mirror.state.behind_since is not None)
    assert world.there == before
    assert world.noted.steps[-1] == 40


def test_what_a_lasting_step_of_another_history_is_called_keeps_newer_ones_from_nothing(
    world: World, tmp_path: Path
) -> None:
    other = World(tmp_path / "other")
    with other.mirroring():
        eventually(lambda: other.there == [30])
    world.bucket = other.bucket
    shutil.rmtree(world.run.step(30))
    with world.mirroring(keep_every=30) as mirror:
        eventually(lambda: mirror.state.error is not None)
        world.commit(mirror, 30, 60, owner=SECOND)
        eventually(lambda: world.there == [30, 60])
        eventually(lambda: (mirror.state.last, mirror.state.error) == (60, None))


def test_a_long_outage_ends_no_thread(world: World) -> None:
    """A wait that doubles each time is no number any more after a thousand failures."""

    def refuses(_: MirrorSettings) -> ObjectBucket:
        raise StoreRefusedError("s3://bucket/run: the credentials are refused")

    world.opened = refuses
    world.times = MirrorTimes(first_wait=0.0, longest_wait=0.0)
    with world.mirroring():
        eventually(lambda: world.noted.failures > 1100)
        world.opened = lambda _: world.bucket
        eventually(lambda: world.there == [30])


def test_a_step_that_retention_took_before_it_was_read_is_not_said_to_be_there(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    listed = committed_steps(world.run, CHECKPOINT)
    shutil.rmtree(world.run.step(30))
    looks = iter([listed])
    monkeypatch.setattr(
        worker, "committed_steps", lambda *about: next(looks, None) or committed_steps(*about)
    )
    with world.mirroring() as mirror:
        eventually(lambda: world.there == [20])
        eventually(lambda: mirror.state.last == 20)
    assert world.noted.steps == [20]
