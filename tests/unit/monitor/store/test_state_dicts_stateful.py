"""State dicts of a run in a bucket, in any order of commits, deaths and restarts."""

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime, timedelta

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from trainsync.api.protocol import SaveKind, SaveState
from trainsync.failpoints import LIVE, STORE, enabled
from trainsync.monitor.core.core import CoreSettings
from trainsync.monitor.ledger.saves import SaveOwner
from trainsync.monitor.store.core import StoreCore
from trainsync.storage.objects import commits
from trainsync.storage.objects.live import references
from trainsync.storage.saves.incarnations import successor

from tests.unit.monitor.store.runs import ONE, Run, request
from tests.unit.monitor.store.test_state_dicts import KilledError

CHECKPOINT, STATE_DICT = SaveKind.CHECKPOINT, SaveKind.STATE_DICT
READING = 600.0
POINTS = (
    (LIVE, "term"),
    (LIVE, "intent"),
    (STORE, "uploaded"),
    (STORE, "superseding"),
    (STORE, "manifest"),
    (STORE, "pointer"),
    (LIVE, "outcome"),
    (LIVE, "removing"),
    (LIVE, "uncommitted"),
    (LIVE, "unnamed"),
)


@dataclass(frozen=True)
class Reader:
    """It was told of a version of a training, and reads these objects."""

    objects: frozenset[str]
    began: datetime
    training: int


class StateDicts(RuleBasedStateMachine):
    """A trainer whose steps are versions, its monitors, and readers of the newest version."""

    def __init__(self) -> None:
        super().__init__()
        self.run = Run()
        self.attempt = -1
        self.training = 0
        """Grows with each attempt, and each restart in place."""
        self.parts = 0
        self.readers: list[Reader] = []
        self.restart()

    @rule()
    def restart(self) -> None:
        """Another attempt, whose monitor knows nothing but the bucket."""
        self.attempt += 1
        self.owner = SaveOwner(self.attempt, f"aaaaaaaa{self.attempt}")
        self.core = StoreCore(
            self.run.bucket,
            CoreSettings(max_to_keep=2, reading_seconds=READING),
            clock=lambda: self.run.now,
            monotonic=lambda: self.run.now.timestamp(),
        )
        self.core.claim(self.owner, "local", None)
        self._resume()

    @rule()
    def restart_in_place(self) -> None:
        before, self.owner = self.owner, SaveOwner(self.attempt, successor(self.owner.incarnation))
        self.core.renew(before, self.owner.incarnation, "a rank died")
        self._resume()

    def _resume(self) -> None:
        self.training += 1
        point = self.core.resume(self.owner)
        self.origin = 0 if point is None else point.step
        self.step, self.newest = self.origin, self._version_of(self.origin)

    def _version_of(self, step: int) -> int | None:
        """The step, if it has a version of the checkpoint's weights."""
        bucket = self.run.bucket
        there = [kind for one, kind in commits.committed_pairs(bucket, step) if one == step]
        if set(there) != {CHECKPOINT, STATE_DICT}:
            return None
        found = [commits.read_manifest(bucket, kind, step).manifest.files for kind in there]
        return step if found[0] == found[1] else None

    def _put(self, kind: SaveKind, step: int) -> None:
        self.parts += 1
        self.core.saves.register(self.owner, request(step, ONE, kind=kind))
        data = f"training {self.training}, step {step}".encode()
        self.run.write(self.owner, step, ONE, data, f"part{self.parts:05d}", kind=kind)

    @rule(steps=st.integers(1, 4))
    def train(self, steps: int) -> None:
        for _ in range(steps):
            self.step += 1
            self._put(STATE_DICT, self.step)
            self.core.tick()
            self.newest = self.step

    @rule()
    def checkpoint(self) -> None:
        known = self.core.saves.save_status(self.owner, CHECKPOINT, self.step).state
        if self.step > self.origin and known is SaveState.UNKNOWN:
            self._put(CHECKPOINT, self.step)
            self.core.tick()

    @rule(at=st.sampled_from(POINTS), count=st.integers(1, 2))
    def die(self, at: tuple[str, str], count: int) -> None:
        """The monitor is killed as it comes to the point, or else after the tick."""
        left = count

        def reached(point: str) -> None:
            nonlocal left
            left -= point == at[1]
            if left == 0:
                raise KilledError

        self.step += 1
        self._put(STATE_DICT, self.step)
        try:
            with enabled(at[0], reached):
                self.core.tick()
        except KilledError:
            pass
        self.restart()

    @rule(seconds=st.sampled_from([1.0, READING / 2, READING + 1]))
    def wait(self, seconds: float) -> None:
        self.run.now += timedelta(seconds=seconds)
        self.core.tick()

    @invariant()
    def a_reader_begins(self) -> None:
        found = self.core.newest(self.owner, STATE_DICT)
        if found is not None:
            stored = commits.read_manifest(self.run.bucket, STATE_DICT, found.step)
            assert stored.digest == found.manifest_digest
            objects = frozenset(stored.keys.values())
            self.readers.append(Reader(objects, self.run.now, self.training))

    @invariant()
    def what_is_committed_is_whole(self) -> None:
        there = set(self.run.shards())
        assert references.named(self.run.bucket) <= there
        pointer = commits.read_pointer(self.run.bucket, STATE_DICT)
        steps = self.run.steps(STATE_DICT)
        assert pointer == max(steps, default=None)

    @invariant()
    def explorers_are_told_of_the_present_training_alone(self) -> None:
        found = self.core.newest(self.owner, STATE_DICT)
        assert (None if found is None else found.step) == self.newest

    @invariant()
    def readers_have_their_time(self) -> None:
        there = set(self.run.shards())
        for reader in self._readers():
            assert reader.objects <= there

    def _readers(self) -> Iterator[Reader]:
        for reader in self.readers:
            in_time = self.run.now < reader.began + timedelta(seconds=READING)
            # A second attempt since does not know that the first has superseded the version.
            if in_time and self.training - reader.training < 2:
                yield reader

    def teardown(self) -> None:
        """Nothing is left for ever."""
        self.restart()
        for _ in range(3):
            self.wait(2 * READING)
        assert references.named(self.run.bucket) == set(self.run.shards())
        assert len(self.run.steps(STATE_DICT)) <= 5


StateDicts.TestCase.settings = settings(max_examples=15, stateful_step_count=20, deadline=None)
TestStateDicts = StateDicts.TestCase
