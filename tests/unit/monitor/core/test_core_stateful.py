"""Random orders, duplicates, losses, crashes at any phase, restarts (of the monitor, and of an
attempt in place), older attempts, readers, ranks without a monitor to ask, and monitors that are
stopped anywhere while their successors work.

The machine records all writes and checks the monitor by the disk alone. More examples than a quick
run has: ``TRAINSYNC_STATEFUL_EXAMPLES=2000``.
"""

import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from trainsync.api.protocol import FailureReport, ParticipantRef, ReceiptHint, SaveKind, SaveState
from trainsync.monitor import errors
from trainsync.monitor.client.disk import DiskMonitorClient
from trainsync.monitor.commit.committer import Authority
from trainsync.monitor.core.core import CoreSettings, MonitorCore
from trainsync.monitor.ledger.saves import SaveOwner
from trainsync.storage.errors import StepGoneError
from trainsync.storage.layout import RunDirectory
from trainsync.storage.leases import DEFAULT_TTL_SECONDS, ReaderLease
from trainsync.storage.saves import manifest, pointers, receipts
from trainsync.storage.saves.manifest import Age

from tests.unit.monitor.fleet import GATE, PHASES, CrashError, Fleet, Sleep
from tests.unit.monitor.saves import (
    CHECKPOINT,
    STATE_DICT,
    Clock,
    content,
    directory,
    receipt,
    request,
    stage,
)

pytestmark = pytest.mark.timeout(300)

RANKS = 2
KEEP = 2
KINDS = st.sampled_from([CHECKPOINT, STATE_DICT])
LAST = 5
STEPS = st.integers(1, LAST)
MEMORY = Path("/dev/shm")

EXAMPLES = int(os.environ.get("TRAINSYNC_STATEFUL_EXAMPLES", "25"))

OPEN = (SaveState.UNKNOWN, SaveState.REGISTERED)
Key = tuple[SaveOwner, SaveKind, int]


def on_disk(root: Path) -> dict[Path, tuple[int, int]]:
    """Every file, its inode and when it was written last."""
    return {p: (s.st_ino, s.st_mtime_ns) for p in root.rglob("*") for s in [p.lstat()]}


class Monitored(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.root = Path(tempfile.mkdtemp(dir=MEMORY if MEMORY.is_dir() else None))
        self.run = RunDirectory(self.root)
        self.clock = Clock()
        self.owners: list[SaveOwner] = []
        self.good: dict[Key, set[int]] = {}
        self.spoiled: set[Key] = set()
        self.altered: set[Key] = set()
        self.registered: set[Key] = set()
        self.ended: dict[Key, SaveState] = {}
        self.manifests: dict[tuple[SaveKind, int], SaveOwner] = {}
        self.newest: dict[SaveKind, int] = {}
        self.pointed: dict[SaveKind, int] = {}
        self.may_commit: set[SaveOwner] = set()
        self.leases: dict[ReaderLease, float] = {}  # when its holder was heard of last
        self.resumed: tuple[Age, int] | None = None  # of the owner, and the step
        self.seconds = 0.0
        self.fleet = Fleet(self.monitor)

    def teardown(self) -> None:
        shutil.rmtree(self.root)

    def monitor(self, authority: Authority) -> MonitorCore:
        return MonitorCore(
            self.run,
            CoreSettings(max_to_keep=KEEP),
            clock=self.clock,
            authority=authority,
            monotonic=lambda: self.seconds,
        )

    def call(self, call: Callable[[], object]) -> bool:
        """Whether the monitor took it; one that crashed is followed by another."""
        try:
            call()
        except CrashError:
            self.fleet.restart(alive=False)
            return False
        except (errors.FencedError, errors.NotReadyError):
            return False
        return True

    @property
    def core(self) -> MonitorCore:
        return self.fleet.core

    @property
    def owner(self) -> SaveOwner:
        return self.owners[-1]

    # What happens.

    @initialize()
    def first_claim(self) -> None:
        self.claim()

    @rule()
    def claim(self) -> None:
        attempt = self.owner.attempt + 1 if self.owners else 0
        owner = SaveOwner(attempt, f"incarnation{attempt}")
        if len(self.owners) < 6 and self.call(lambda: self.core.claim(owner, "main", None)):
            self.may_commit.add(owner)  # beside the one before, whose complete saves come first
            self.owners.append(owner)

    @rule()
    def restart_in_place(self) -> None:
        before = self.owner
        name = f"incarnation{before.attempt}r{before.restarts + 1}x00000000"
        owner = SaveOwner(before.attempt, name)
        if len(self.owners) < 6 and self.call(lambda: self.core.renew(before, name, "a test")):
            assert self.call(lambda: self.core.renew(before, name, "the answer was lost"))
            self.may_commit.add(owner)
            self.owners.append(owner)

    @rule()
    def second_claim(self) -> None:
        def ask() -> None:
            with pytest.raises(errors.ClaimRefusedError):
                self.core.claim(SaveOwner(self.owner.attempt, "zzzzzzzz"), "main", None)

        if self.call(self.core.tick):
            self.call(ask)

    @rule(kind=KINDS, step=STEPS, back=st.integers(0, 1))
    def register(self, kind: SaveKind, step: int, back: int) -> None:
        owner = self.pick(back)
        if self.call(lambda: self.core.saves.register(owner, request(step, kind, RANKS))):
            assert owner == self.owner, "an older attempt registered"
            self.registered.add((owner, kind, step))

    @rule(
        kind=KINDS,
        step=STEPS,
        rank=st.integers(0, RANKS - 1),
        back=st.integers(0, 1),
        bad=st.sampled_from([False, False, False, True]),
        hint=st.booleans(),
    )
    def write(
        self, kind: SaveKind, step: int, rank: int, back: int, *, bad: bool, hint: bool
    ) -> None:
        owner = self.pick(back)
        key = (owner, kind, step)
        entry = stage(self.root, owner, step, rank, kind)
        if bad:
            (directory(self.root, owner, step, kind).files / entry.path).write_bytes(b"short")
            self.spoiled.add(key)
            if rank in self.good.get(key, set()):
                self.altered.add(key)
        else:
            self.good.setdefault(key, set()).add(rank)
        record = receipt(owner, step, rank, kind, entry)
        receipts.write_receipt(directory(self.root, owner, step, kind), record)
        if hint:
            self.hint(kind, step, rank, back)

    @rule(kind=KINDS, step=STEPS)
    def save(self, kind: SaveKind, step: int) -> None:
        self.register(kind, step, 0)
        for rank in range(RANKS):
            self.write(kind, step, rank, 0, bad=False, hint=False)

    @rule(kind=KINDS, step=STEPS)
    def change_after_the_check(self, kind: SaveKind, step: int) -> None:
        self.register(kind, step, 0)
        self.write(kind, step, 0, 0, bad=False, hint=True)
        self.write(kind, step, 0, 0, bad=True, hint=False)
        self.write(kind, step, 1, 0, bad=False, hint=True)

    @rule(kind=KINDS, step=STEPS, rank=st.integers(0, RANKS - 1), back=st.integers(0, 1))
    def hint(self, kind: SaveKind, step: int, rank: int, back: int) -> None:
        who = ParticipantRef(component="model", rank=rank)
        told = ReceiptHint(kind=kind, step=step, participant=who)
        self.call(lambda: self.core.saves.receipt_hint(self.pick(back), told))

    @rule(kind=KINDS, step=STEPS, back=st.integers(0, 1))
    def fail(self, kind: SaveKind, step: int, back: int) -> None:
        owner = self.pick(back)
        self.spoiled.add((owner, kind, step))
        who = ParticipantRef(component="model", rank=0)
        report = FailureReport(kind=kind, step=step, participant=who, error="boom")
        self.call(lambda: self.core.saves.failure(owner, report))

    @rule(seconds=st.sampled_from([0, 1, 31, DEFAULT_TTL_SECONDS + 1]))
    def tick(self, seconds: float) -> None:
        self.clock.go(seconds)
        self.seconds += seconds
        if not self.call(self.core.tick):
            return
        # A dead reader's lease counts, too, until its time is over.
        held = {int(path.name.split("-")[1]) for path in self.run.leases.glob("*.json")}
        for key in self.registered:
            owner, kind, step = key
            complete = self.good.get(key, set()) == set(range(RANKS))
            if owner == self.owner and complete and key not in self.spoiled and step not in held:
                with self.fleet.undisturbed() as core:
                    status = core.saves.save_status(owner, kind, step)
                assert status.state is SaveState.COMMITTED, status

    @rule(kinds=st.lists(KINDS, min_size=2, max_size=4), first=STEPS)
    def train(self, kinds: list[SaveKind], first: int) -> None:
        """Saves one after the other, as a run without trouble makes them."""
        for step, kind in enumerate(kinds, first):
            if step <= LAST:
                self.save(kind, step)
                self.tick(0)
                self.judge()

    @rule(pick=st.integers(0, 7))
    def read(self, pick: int) -> None:
        known = [*sorted(self.manifests), (CHECKPOINT, LAST + 1)]
        kind, step = known[pick % len(known)]
        committed = (kind, step) in self.manifests
        try:
            lease = ReaderLease(self.run, kind, step, "reader")
        except StepGoneError:
            assert not committed
        else:
            assert committed
            self.leases[lease] = self.seconds

    @rule(release=st.booleans())
    def end_reading(self, *, release: bool) -> None:
        """Or the reader dies, and its file stays."""
        for lease in list(self.leases)[:1]:
            if self.seconds - self.leases[lease] < DEFAULT_TTL_SECONDS:
                lease.check()
            if release:
                lease.release()
            del self.leases[lease]

    @rule()
    def renew_leases(self) -> None:
        for lease in self.leases:
            if self.seconds - self.leases[lease] < DEFAULT_TTL_SECONDS:
                lease.renew()
                self.leases[lease] = self.seconds

    @rule()
    def resume(self) -> None:
        answers: list[int | None] = []

        def ask() -> None:
            point = self.core.resume(self.owner)
            answers.append(None if point is None else point.step)

        if self.call(ask) and answers[0] is not None:
            assert (CHECKPOINT, answers[0]) in self.manifests
            self.resumed = (self.owner.age, answers[0])

    @rule(phase=st.sampled_from(PHASES))
    def crash_soon(self, phase: str) -> None:
        self.fleet.crash_at = phase

    @rule(
        at=st.sampled_from([*PHASES, GATE, GATE, GATE]),
        gates=st.integers(1, 8),
        saves=st.lists(st.tuples(KINDS, STEPS), max_size=2),
        attempt=st.booleans(),
    )
    def sleep_soon(
        self, at: str, gates: int, saves: list[tuple[SaveKind, int]], *, attempt: bool
    ) -> None:
        """The monitor is stopped there; its successor works, and then it goes on."""

        def meanwhile() -> None:
            self.judge()
            self.call(self.core.tick)
            if attempt:
                self.claim()
            for kind, step in saves:
                self.judge()
                self.save(kind, step)
                self.call(self.core.tick)
            self.judge()

        self.fleet.sleep = Sleep(at, gates, meanwhile)

    @rule(pick=st.integers(0, 3), kind=KINDS, step=STEPS)
    def wake_without_the_lease(self, pick: int, kind: SaveKind, step: int) -> None:
        monitor = self.fleet.wake(pick)
        if monitor is None:
            return
        old, before = monitor.core, on_disk(self.root)
        who = ParticipantRef(component="model", rank=0)
        newer = SaveOwner(self.owner.attempt + 1, "zzzzzzzz")
        calls = (
            lambda: old.saves.register(self.owner, request(step, kind, RANKS)),
            lambda: old.saves.receipt_hint(
                self.owner, ReceiptHint(kind=kind, step=step, participant=who)
            ),
            lambda: old.saves.failure(
                self.owner, FailureReport(kind=kind, step=step, participant=who, error="boom")
            ),
            lambda: old.resume(self.owner),
            lambda: old.saves.save_status(self.owner, kind, step),
            lambda: old.claim(newer, "main", None),
        )
        with self.fleet.undisturbed():
            for call in calls:
                with pytest.raises(errors.NotReadyError):
                    call()
            old.tick()
            old.poll()
        assert on_disk(self.root) == before

    @rule(pick=st.integers(0, 3))
    def wake_and_win_the_lease(self, pick: int) -> None:
        """What it remembers is from before its successors' work."""
        monitor = self.fleet.wake(pick)
        if monitor is not None:
            self.fleet.win_again(monitor)

    @rule(kind=KINDS, step=STEPS, back=st.integers(0, 1))
    def register_on_disk(self, kind: SaveKind, step: int, back: int) -> None:
        """As a rank without a monitor to ask; its answer is what the disk says."""
        owner = self.pick(back)
        self.rank(owner).register(request(step, kind, RANKS))
        self.registered.add((owner, kind, step))

    @rule(kind=KINDS, step=STEPS, back=st.integers(0, 1))
    def fail_on_disk(self, kind: SaveKind, step: int, back: int) -> None:
        owner = self.pick(back)
        self.spoiled.add((owner, kind, step))
        who = ParticipantRef(component="model", rank=1)
        failed = FailureReport(kind=kind, step=step, participant=who, error="boom on disk")
        self.rank(owner).failure(failed)

    @rule(pick=st.integers(0, 7), disk=st.booleans())
    def fail_what_is_committed(self, pick: int, *, disk: bool) -> None:
        if self.manifests:
            kind, step = sorted(self.manifests)[pick % len(self.manifests)]
            (self.fail_on_disk if disk else self.fail)(kind, step, 0)
            self.tick(0)

    @rule(kind=KINDS, pick=st.integers(0, 7))
    def save_again_on_disk(self, kind: SaveKind, pick: int) -> None:
        """What an attempt before may have committed, by a run that did not resume."""
        steps = sorted(step for known, step in self.manifests if known is kind) or [1]
        step = steps[pick % len(steps)]
        self.register_on_disk(kind, step, 0)
        for rank in range(RANKS):
            self.write(kind, step, rank, 0, bad=False, hint=False)
        self.tick(0)

    @rule(alive=st.booleans())
    def restart(self, *, alive: bool) -> None:
        """The same disk gives the same ledger."""
        self.fleet.sleep = None  # a successor that saves meanwhile would change what is compared
        before = self.states() if self.call(self.core.tick) else None
        self.fleet.restart(alive=alive)
        if not self.call(self.core.tick) or before is None:
            return
        for key, state in self.states().items():
            # A file that changed under its old receipt is noticed when it is checked again: by
            # a new monitor at once, by this one at the commit (which the invariants judge).
            noticed = key in self.altered and state is SaveState.ABORTED
            assert state == before[key] or (noticed and before[key] in OPEN)

    # What must hold.

    @invariant()
    def manifests_are_whole_and_of_one_save(self) -> None:
        found: dict[tuple[SaveKind, int], SaveOwner] = {}
        for kind in SaveKind:
            for step in manifest.committed_steps(self.run, kind):
                committed = manifest.read_manifest(self.run, kind, step).manifest
                owner = SaveOwner(committed.attempt, committed.incarnation)
                manifest.check_manifest(self.run, committed, with_digest=True)
                assert len(committed.participants) == RANKS
                for rank in range(RANKS):
                    file = self.run.step(step) / f"actor/{kind.value}_rank_{rank}.pt"
                    assert file.read_bytes() == content(owner, kind, step, rank)
                if (kind, step) not in self.manifests:
                    assert owner in self.may_commit
                    assert (owner, kind, step) in self.registered | self.half_registered()
                    self.newest[kind] = max(step, self.newest.get(kind, step))
                elif (before := self.manifests[kind, step]) != owner:
                    assert kind is STATE_DICT
                    assert owner.age > before.age
                    assert owner in self.may_commit
                    assert step not in self.held(), "replaced under its reader"
                found[kind, step] = owner
        self.manifests = found
        self.may_commit = {self.owner} if self.owners else set()

    @invariant()
    def the_newest_of_each_kind_is_never_removed(self) -> None:
        for kind, step in self.newest.items():
            assert (kind, step) in self.manifests

    @invariant()
    def what_is_read_or_resumed_from_is_never_removed(self) -> None:
        steps = {step for _, step in self.manifests}
        assert self.held() <= steps
        if self.resumed is None:
            return
        age, step = self.resumed
        newer = any(
            kind is CHECKPOINT and at > step and owner.age >= age
            for (kind, at), owner in self.manifests.items()
        )
        if newer:
            self.resumed = None
        else:
            assert (CHECKPOINT, step) in self.manifests

    @invariant()
    def pointers_name_a_commit_and_never_go_back(self) -> None:
        for kind in SaveKind:
            step = pointers.read_pointer(self.run, kind)
            if step is None:
                assert kind not in self.pointed
                continue
            assert (kind, step) in self.manifests
            assert step >= self.pointed.get(kind, step)
            self.pointed[kind] = step

    @invariant()
    def the_ledger_knows_what_is_committed_on_the_disk_and_no_more(self) -> None:
        if self.states():  # the monitor is ready, and may have tidied when it began
            self.manifests_are_whole_and_of_one_save()
            known = {(kind, info.step): info.owner for kind, info in self.core.committed()}
            assert known == self.manifests

    @invariant()
    def what_ended_stays_as_it_ended(self) -> None:
        for key, state in self.states().items():
            on_disk = self.rank(self.owner).save_status(key[1], key[2]).state
            for ended in {state, on_disk}.difference(OPEN):
                assert self.ended.setdefault(key, ended) == ended

    def judge(self) -> None:
        """Everything that must hold, also between the parts of a rule."""
        self.manifests_are_whole_and_of_one_save()
        self.the_newest_of_each_kind_is_never_removed()
        self.what_is_read_or_resumed_from_is_never_removed()
        self.pointers_name_a_commit_and_never_go_back()

    def held(self) -> set[int]:
        """Steps whose readers are alive."""
        return {
            lease.committed.manifest.step
            for lease, heard in self.leases.items()
            if self.seconds - heard < DEFAULT_TTL_SECONDS
        }

    def rank(self, owner: SaveOwner) -> DiskMonitorClient:
        return DiskMonitorClient(self.root, attempt=owner.attempt, incarnation=owner.incarnation)

    def states(self) -> dict[Key, SaveState]:
        with self.fleet.undisturbed() as core:
            if not self.owners:
                return {}
            return {
                (self.owner, kind, step): core.saves.save_status(self.owner, kind, step).state
                for kind in SaveKind
                for step in range(1, LAST + 1)
            }

    def half_registered(self) -> set[Key]:
        # The crash came between the registration's file and the answer.
        return {
            (owner, kind, step)
            for owner in self.owners
            for kind in SaveKind
            for step in range(1, LAST + 1)
            if directory(self.root, owner, step, kind).registration.exists()
        }

    def pick(self, back: int) -> SaveOwner:
        return self.owners[max(len(self.owners) - 1 - back, 0)]


Monitored.TestCase.settings = settings(
    max_examples=EXAMPLES,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
TestMonitored = Monitored.TestCase
