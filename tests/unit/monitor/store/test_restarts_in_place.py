"""Restarts in place in a store: the promises of a volume's (`test_core_restarts_in_place`)."""

import re

import pytest
from trainsync.api.protocol import ProgressReport, SaveState
from trainsync.failpoints import LIVE, enabled
from trainsync.monitor import errors
from trainsync.monitor.commit.observer import NullObserver
from trainsync.monitor.core.core import CoreSettings
from trainsync.monitor.ledger.saves import AbortCause, AbortReason, SaveKey, SaveOwner
from trainsync.monitor.store.core import StoreCore
from trainsync.monitor.store.served import ServedStoreCore
from trainsync.storage.objects import commits
from trainsync.storage.objects.bucket import Blob
from trainsync.storage.objects.errors import StoreUnavailableError
from trainsync.storage.objects.live import names
from trainsync.storage.objects.live.term import Term, read_term
from trainsync.storage.saves.incarnations import successor

from tests.unit.monitor.store.runs import (
    CHECKPOINT,
    ONE,
    TWO,
    Lease,
    Served,
    healthy,
    request,
    save,
)

FIRST, SECOND = SaveOwner(0, "aaaaaaaa0"), SaveOwner(1, "aaaaaaaa1")
NEXT = SaveOwner(0, successor(FIRST.incarnation))
RIVAL = SaveOwner(0, successor(FIRST.incarnation))
THIRD = SaveOwner(0, successor(NEXT.incarnation))


class Watched(NullObserver):
    """Notes what an observer is told of."""

    def __init__(self) -> None:
        self.restarts: list[tuple[int, int, str]] = []
        self.aborts: list[tuple[int, AbortReason]] = []

    def restarted(self, attempt: int, number: int, reason: str) -> None:
        self.restarts.append((attempt, number, reason))

    def aborted(self, key: SaveKey, cause: AbortCause) -> None:
        self.aborts.append((key.step, cause.reason))


class World(Served):
    """A store whose monitor is in a pod, or in the process of a local run."""

    def __init__(self, *, local: bool) -> None:
        super().__init__()
        self.local = local
        self.watched = Watched()

    def start(self, *, claims: bool = True) -> StoreCore:
        """A monitor; the one before is dead."""
        if self.local:
            core = StoreCore(
                self.bucket,
                CoreSettings(),
                clock=lambda: self.now,
                observer=self.watched,
            )
        else:
            self.told = self.watched  # type: ignore[assignment]
            core = self.served()
        if claims:
            core.claim(FIRST, "main", None)
        return core

    def term(self) -> Term:
        found = read_term(self.bucket)
        assert found is not None
        return found

    def of(self, owner: SaveOwner) -> list[str]:
        """Keys of what that incarnation has put and no commit names."""
        everything = [info.key for info in self.bucket.below("")]
        named = {
            key
            for step in self.steps()
            for key in commits.read_manifest(self.bucket, CHECKPOINT, step).keys.values()
        }
        tag = rf"{owner.attempt}-{owner.incarnation}[-/]"
        return [key for key in everything if re.search(tag, key) and key not in named]


@pytest.fixture(params=["pod", "local"])
def world(request: pytest.FixtureRequest) -> World:
    return World(local=request.param == "local")


def resumed(core: StoreCore, owner: SaveOwner) -> int | None:
    if isinstance(core, ServedStoreCore):
        core.expect(None)
    point = core.resume(owner)
    return None if point is None else point.step


def test_the_successor_goes_on_where_the_attempt_committed_last(world: World) -> None:
    core = world.start()
    save(world, core, FIRST, 10)
    core.renew(FIRST, NEXT.incarnation, "a rank died")
    assert resumed(core, NEXT) == 10
    save(world, core, NEXT, 20)
    core.renew(NEXT, THIRD.incarnation, "and again")
    assert resumed(core, THIRD) == 20
    assert world.term().clusters == {"main": THIRD.incarnation}
    assert core.view().restarts.count == 2


def test_what_is_complete_is_committed_first_and_the_rest_is_aborted_and_swept(
    world: World,
) -> None:
    core = world.start()
    for step, parts in ((20, (ONE, TWO)), (30, (ONE,))):
        core.saves.register(FIRST, request(step, ONE, TWO))
        for part in parts:
            world.write(FIRST, step, part)
    core.renew(FIRST, NEXT.incarnation, "a rank died")
    assert world.watched.aborts == [(30, AbortReason.RESTARTED)]
    assert world.watched.restarts == [(0, 1, "a rank died")]
    assert resumed(core, NEXT) == 20
    assert world.steps() == [20]
    assert world.of(FIRST) == []


def test_the_predecessor_is_fenced_and_its_late_writes_never_commit(world: World) -> None:
    core = world.start()
    core.saves.register(FIRST, request(20, ONE))
    core.renew(FIRST, NEXT.incarnation, "a rank died")
    for call in (
        lambda: core.saves.register(FIRST, request(20, ONE)),
        lambda: core.saves.save_status(FIRST, CHECKPOINT, 20),
        lambda: core.resume(FIRST),
        lambda: core.report_progress(FIRST, ProgressReport(step=1)),
    ):
        with pytest.raises(errors.FencedError):
            call()
    world.write(FIRST, 20, ONE)
    core.tick()
    assert world.steps() == []
    with pytest.raises(errors.ClaimRefusedError):
        core.claim(FIRST, "main", 0)
    assert world.of(FIRST) != [], "it came late"
    core.renew(NEXT, THIRD.incarnation, "another rank died")
    assert world.of(FIRST) == []
    assert world.steps() == []


def test_what_came_late_is_swept_a_while_after() -> None:
    world = World(local=False)
    core = world.start()
    core.renew(FIRST, NEXT.incarnation, "a rank died")
    world.write(FIRST, 20, ONE)
    core.saves.register(NEXT, request(20, ONE, TWO))
    world.write(NEXT, 20, ONE, writer="cccccccc")
    world.monotonic.now += 899
    core.tick()
    assert world.of(FIRST) != []
    world.monotonic.now += 2
    core.tick()
    assert world.of(FIRST) == []
    assert world.of(NEXT) != [], "its save goes on"
    world.write(NEXT, 20, TWO, writer="cccccccc")
    core.tick()
    assert world.steps() == [20]


def test_a_sweep_that_the_store_refuses_is_told_of_and_done_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = World(local=False)
    core = world.start()
    save(world, core, FIRST, 10)
    core.saves.register(FIRST, request(20, ONE, TWO))
    world.write(FIRST, 20, ONE)
    with monkeypatch.context() as patch:

        def refuse(*_: object) -> list[str]:
            raise StoreUnavailableError("it is away")

        patch.setattr("trainsync.monitor.store.cleanup.sweep", refuse)
        core.renew(FIRST, NEXT.incarnation, "a rank died")
    assert healthy(core)[1:] == ("StoreFailing", "it is away")  # type: ignore[arg-type]
    assert resumed(core, NEXT) == 10
    world.monotonic.now += 61
    core.tick()
    assert healthy(core)[0] == "True"  # type: ignore[arg-type]
    assert world.of(FIRST) == []


def test_a_step_of_the_predecessor_is_saved_again_by_the_successor(world: World) -> None:
    core = world.start()
    save(world, core, FIRST, 10)
    core.saves.register(FIRST, request(20, ONE, TWO))
    world.write(FIRST, 20, ONE, b"of before")
    core.renew(FIRST, NEXT.incarnation, "a rank died")
    assert resumed(core, NEXT) == 10
    core.saves.register(NEXT, request(20, ONE))
    world.write(NEXT, 20, ONE, b"trained again", writer="cccccccc")
    core.tick()
    stored = commits.read_manifest(world.bucket, CHECKPOINT, 20)
    assert stored.manifest.incarnation == NEXT.incarnation
    (key,) = stored.keys.values()
    assert world.bucket.get(key).data == b"trained again"
    newest = core.newest(NEXT, CHECKPOINT)
    assert newest is not None
    assert newest.step == 20


def test_the_same_request_again_changes_nothing_and_another_successor_is_refused(
    world: World,
) -> None:
    core = world.start()
    core.renew(FIRST, NEXT.incarnation, "a rank died")
    core.saves.register(NEXT, request(10, ONE))
    number = world.term().number
    core.renew(FIRST, NEXT.incarnation, "a rank died")
    assert (len(world.watched.restarts), world.term().number) == (1, number)
    assert core.saves.save_status(NEXT, CHECKPOINT, 10).state is SaveState.REGISTERED
    with pytest.raises(errors.FencedError):
        core.renew(FIRST, RIVAL.incarnation, "another driver")
    with pytest.raises(errors.InvalidRequestError, match="no name of a successor"):
        core.renew(NEXT, RIVAL.incarnation, "a name that is none")


def test_a_monitor_that_starts_anew_knows_the_successor() -> None:
    world = World(local=False)
    core = world.start()
    save(world, core, FIRST, 10)
    core.renew(FIRST, NEXT.incarnation, "a rank died")
    assert resumed(core, NEXT) == 10
    again = world.start(claims=False)
    again.renew(FIRST, NEXT.incarnation, "the answer was lost")
    assert resumed(again, NEXT) == 10
    assert again.view().restarts.count == 1
    with pytest.raises(errors.FencedError):
        again.resume(FIRST)


def test_a_put_that_the_store_refuses_leaves_the_predecessor_in_force(world: World) -> None:
    core = world.start()
    save(world, core, FIRST, 10)

    def refuse(point: str) -> None:
        if point == "term":
            raise StoreUnavailableError("it is away")

    with enabled(LIVE, refuse), pytest.raises(errors.StorageUnavailableError, match="it is away"):
        core.renew(FIRST, NEXT.incarnation, "a rank died")
    assert world.term().clusters == {"main": FIRST.incarnation}
    assert resumed(core, FIRST) == 10
    core.renew(FIRST, NEXT.incarnation, "a rank died")
    assert resumed(core, NEXT) == 10


def test_a_put_whose_reply_is_lost_counts_when_it_is_asked_for_again(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    core = world.start()
    replace = world.bucket.replace

    def lose(key: str, data: bytes, old: Blob) -> None:
        replace(key, data, old)
        monkeypatch.undo()
        raise StoreUnavailableError("it is away")

    monkeypatch.setattr(world.bucket, "replace", lose)
    with pytest.raises(errors.StorageUnavailableError):
        core.renew(FIRST, NEXT.incarnation, "a rank died")
    assert world.term().clusters == {"main": NEXT.incarnation}
    # Meanwhile the ledger has the one and the term the other: no rank is told where to go on.
    with pytest.raises(errors.FencedError):
        core.resume(NEXT)
    core.renew(FIRST, NEXT.incarnation, "a rank died")
    core.check(NEXT) if isinstance(core, ServedStoreCore) else core.newest(NEXT, CHECKPOINT)
    with pytest.raises(errors.FencedError):
        core.newest(FIRST, CHECKPOINT)


def test_a_monitor_that_was_overtaken_gives_the_attempt_to_nobody() -> None:
    world = World(local=False)
    core = world.start()
    save(world, core, FIRST, 10)
    other = world.served(Lease())
    before = world.term()
    with pytest.raises(errors.FencedError, match="taken over"):
        core.renew(FIRST, NEXT.incarnation, "a rank died")
    assert world.term() == before
    other.check(FIRST)


def test_a_newer_attempt_fences_the_successor_too(world: World) -> None:
    core = world.start()
    save(world, core, FIRST, 10)
    core.renew(FIRST, NEXT.incarnation, "a rank died")
    core.claim(SECOND, "main", None)
    with pytest.raises(errors.FencedError):
        core.resume(NEXT)
    with pytest.raises(errors.FencedError):
        core.renew(NEXT, THIRD.incarnation, "too late")
    assert resumed(core, SECOND) == 10
    assert core.view().restarts.count == 0


def test_other_clusters_of_the_attempt_keep_their_claims(world: World) -> None:
    core = world.start()
    explorers = SaveOwner(0, "eeeeeeee0")
    core.claim(explorers, "explorers", 0)
    save(world, core, FIRST, 10)
    core.renew(FIRST, NEXT.incarnation, "a rank died")
    for owner in (explorers, NEXT):
        assert resumed(core, owner) == 10
    assert world.term().clusters == {"main": NEXT.incarnation, "explorers": explorers.incarnation}


def test_progress_goes_on_with_the_steps_that_are_trained_again_counted(world: World) -> None:
    core = world.start()
    for step in (1, 2, 3):
        core.report_progress(FIRST, ProgressReport(step=step))
    core.renew(FIRST, NEXT.incarnation, "a rank died")
    core.report_progress(NEXT, ProgressReport(step=3))
    view = core.view()
    assert view.progress is not None
    assert (view.progress.step, view.steps.repeated) == (3, 1)
    assert view.restarts.reason == "a rank died"


@pytest.mark.parametrize("dies", ["before", "after"])
def test_a_monitor_that_dies_around_the_put_leaves_one_in_force(
    monkeypatch: pytest.MonkeyPatch, dies: str
) -> None:
    """Its successor reads the term; the driver asks again."""

    class KilledError(BaseException):
        """The process is gone."""

    world = World(local=False)
    core = world.start()
    save(world, core, FIRST, 10)
    core.saves.register(FIRST, request(20, ONE, TWO))
    world.write(FIRST, 20, ONE)
    replace = world.bucket.replace

    def die(key: str, data: bytes, old: Blob) -> None:
        if key == names.TERM and NEXT.incarnation.encode() in data:
            if dies == "after":
                replace(key, data, old)
            raise KilledError
        replace(key, data, old)

    with monkeypatch.context() as patch:
        patch.setattr(world.bucket, "replace", die)
        with pytest.raises(KilledError):
            core.renew(FIRST, NEXT.incarnation, "a rank died")
    again = world.start(claims=False)
    in_force = NEXT if dies == "after" else FIRST
    again.check(in_force)  # type: ignore[attr-defined]
    again.renew(FIRST, NEXT.incarnation, "a rank died")
    assert resumed(again, NEXT) == 10
    assert world.steps() == [10]
    assert again.view().restarts.count == 1


def test_claims_of_a_pods_monitor_name_the_successor_too() -> None:
    world = World(local=False)
    core = world.start()
    core.renew(FIRST, NEXT.incarnation, "a rank died")
    assert isinstance(core, ServedStoreCore)
    found = [claim.incarnation for claim in core.claims()]
    assert found == [FIRST.incarnation, NEXT.incarnation]
