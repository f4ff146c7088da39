"""A run whose trainer keeps checkpoints in memory: its monitor, pods, and attempts of ranks."""

import ctypes
import os
import shutil
import signal
import socket
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from trainsync.api import env
from trainsync.api.protocol import SaveKind
from trainsync.api.spec import Verify
from trainsync.checkpoint.memory.place import DEFAULT_MEMORY, MemoryPlace
from trainsync.storage.saves import manifest
from trainsync.storage.saves.manifest import Manifest

from tests.faults.memory import promises
from tests.faults.memory.promises import Pod, Report, Tier
from tests.faults.memory.rank import Job, run, watch
from tests.faults.plan import STRIDE, draw
from tests.faults.processes import BrokenError, Child, HangError
from tests.faults.trial import Trial
from tests.ports import port_of, reserved_port

BUDGET: Final = 64 << 20
"""Room for all that a trial keeps."""
_PR_SET_CHILD_SUBREAPER: Final = 36
_KIND: Final = SaveKind.CHECKPOINT

At = Callable[[], None]
Tiers = Mapping[int, Sequence[Tier]]
"""From where each rank must read all of its files; of ranks that are not named it is open."""


@dataclass
class Attempt:
    """The processes of one attempt, by rank."""

    monitor: Child
    ranks: list[Child]
    port: socket.socket
    """Reserves it."""

    def all(self, word: str, answer: str) -> list[object]:
        """Tell every rank, and wait for every rank's answer."""
        for child in self.ranks:
            child.tell(word)
        return [child.expect(answer) for child in self.ranks]

    def kill(self) -> None:
        """SIGKILL to all."""
        for child in (*self.ranks, self.monitor):
            child.kill()
        self.port.close()


class Scene:
    """See the module. Each attempt's ranks are in the same pods, as long as these live.

    Args:
        memory: where the pods' memory lies.
        pods: the number of each rank's pod.
        columns, sharded: see `Job`.
    """

    def __init__(
        self,
        trial: Trial,
        memory: Path,
        *,
        copies: int,
        pods: Sequence[int],
        budget: int = BUDGET,
        columns: int | None = None,
        sharded: bool = False,
    ) -> None:
        self.trial = trial
        self.copies = copies
        self.pods: list[int] = []
        self.budget = budget
        self.committed: int | None = None
        """The newest step whose commit a rank has heard of."""
        self._memory = memory
        self.move(pods)
        self._columns = columns or trial.dice.choice((1, 60, 4000))
        self._sharded = sharded
        self._plan = replace(draw(trial.seed), keep=trial.dice.choice((None, 1, 2)), history=())

    @property
    def world_size(self) -> int:
        """The number of ranks."""
        return len(self.pods)

    def move(self, pods: Sequence[int]) -> None:
        """From now on an attempt's ranks are in these pods; those that were not there are new."""
        self.pods = list(pods)
        for pod in set(pods):
            self.memory_of(pod).mkdir(exist_ok=True)

    def memory_of(self, pod: int) -> Path:
        """Where a pod's memory is mounted."""
        return self._memory / f"pod-{pod}"

    def place_of(self, pod: int) -> MemoryPlace:
        """What the library makes of it."""
        root = self.trial.run.root
        return MemoryPlace.of_run(
            self.memory_of(pod), self.budget, self.trial.uid, root, self.copies
        )

    def lose(self, *pods: int) -> dict[int, tuple[Tier, ...]]:
        """Pods go, and with them their memory; new ones come in their place.

        Returns:
            From where each rank must read what lay in the memory of all pods before.
        """
        for pod in pods:
            for path in self.memory_of(pod).iterdir():
                shutil.rmtree(path)
        kept = {rank for rank, pod in enumerate(self.pods) if pod not in pods}
        # The copies of a pod are on the next one, those of the last on the first.
        ring = sorted(set(self.pods))
        return {
            rank: (Tier.MEMORY,)
            if rank in kept
            else (Tier.NEIGHBOUR,)
            if self.copies and ring[(ring.index(pod) + 1) % len(ring)] not in pods
            else (Tier.VOLUME,)
            for rank, pod in enumerate(self.pods)
        }

    def lose_whole(self, pod: int) -> dict[int, tuple[Tier, ...]]:
        """As `lose`, with the processes that outlive the pod's ranks, whose reaper this one is."""
        node = f"{env.NODE_NAME}=node-{pod}".encode()
        for process in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split():
            with suppress(OSError):  # it has ended
                if node in Path(f"/proc/{process}/environ").read_bytes().split(b"\0"):
                    os.kill(int(process), signal.SIGKILL)
        return self.lose(pod)

    def copies_of(self, rank: int, step: int) -> list[int]:
        """Sizes of the whole copies of what the rank keeps of a step, with its neighbour."""
        ring = sorted(set(self.pods))
        other = ring[(ring.index(self.pods[rank]) + 1) % len(ring)]
        guests = self.place_of(other).guests
        assert guests is not None
        return [
            guests.path(kept).stat().st_size
            for kept in guests.files()
            if kept.digest is not None and kept.step == step and kept.part.endswith(f"-{rank}")
        ]

    # -- attempts ---------------------------------------------------------------------------

    def begin(
        self,
        *,
        at_load: Mapping[int, At] | None = None,
        at_arm: Mapping[int, At] | None = None,
        claimed: At = lambda: None,
    ) -> Attempt:
        """Start the next attempt's ranks; they are about to load.

        Args:
            at_load, at_arm: by rank; see `run`.
            claimed: called when no older attempt commits any more, and none has loaded.
        """
        where = self.trial.attempt(self._plan)
        number = where.owner.attempt
        monitor = self.trial.child(f"monitor of attempt {number}", watch, where, self._plan)
        monitor.expect("claimed")
        claimed()
        port = reserved_port()
        children = []
        for rank, pod in enumerate(self.pods):
            job = Job(
                where=where,
                memory=self.memory_of(pod),
                node=f"node-{pod}",
                rank=rank,
                world_size=self.world_size,
                port=port_of(port),
                copies=self.copies,
                budget=self.budget,
                columns=self._columns,
                sharded=self._sharded,
                seed=self.trial.seed,
            )
            strikes = [(at or {}).get(rank, _nothing) for at in (at_load, at_arm)]
            children.append(
                self.trial.child(f"rank {rank} of attempt {number}", run, job, *strikes)
            )
        for child in children:
            child.expect("joined")
        for child in children:
            child.tell("load")
        return Attempt(monitor, children, port)

    def first(self, *, at_arm: Mapping[int, At] | None = None, copied: bool = True) -> Attempt:
        """The first attempt, with one step to three committed and copied."""
        attempt = self.begin(at_arm=at_arm)
        for child in attempt.ranks:
            if child.expect("loaded") != Report(None):
                raise BrokenError(f"{child.name} loads a checkpoint of a run that has none")
        for number in range(1, self.trial.dice.randint(1, 3) + 1):
            self.save(attempt, STRIDE * number, copied=copied)
        return attempt

    def save(self, attempt: Attempt, step: int, *, copied: bool = True) -> None:
        """Save a step, and wait for its commit and its copies."""
        for error, seconds in attempt.all(f"save {step}", "saved"):
            if error is not None:
                raise BrokenError(f"step {step} was not saved: {error}")
            promises.check_answered("a save", seconds)
        attempt.ranks[0].tell(f"commit {step}")
        attempt.ranks[0].expect("committed")
        self.committed = step
        if copied and len(set(self.pods)) > 1 and not all(attempt.all("copied", "copied")):
            raise BrokenError(f"copies of step {step} are not made")

    def next(self) -> int:
        """The step that is saved after the newest commit."""
        return (self.committed or 0) + STRIDE

    # -- the check ----------------------------------------------------------------------------

    def goes_on(
        self,
        tiers: Tiers | None = None,
        *,
        later: Tiers | None = None,
        exact: bool = True,
        amid: Callable[[Attempt], None] = lambda _: None,
    ) -> None:
        """With all earlier attempts dead, or cut off: the next one loads the newest commit, each
        file from the nearest place that has it, then commits two steps, and leaves nothing.

        Args:
            tiers: from where ranks must read, if the step is the one that was known to be
                committed.
            later: the same, if a later step was committed by then.
            exact: whether memory stays as it is until it is read.
            amid: called between the two steps.
        """
        pods = {pod: Pod.look(self.place_of(pod)) for pod in set(self.pods)}
        steps: list[int] = []
        hidden: list[tuple[Path, bytes]] = []

        def known() -> Tiers:
            newest = max(steps, default=None)
            return (tiers if newest == self.committed else later) or {}

        def claimed() -> None:
            steps.extend(manifest.committed_steps(self.trial.run, _KIND))
            from_memory = [rank for rank, some in known().items() if Tier.VOLUME not in some]
            # A monitor that reads all bytes would see it.
            if self._plan.verify is Verify.SIZE and len(from_memory) == self.world_size:
                hidden.extend(_hide(self.trial.run.step(max(steps))))

        attempt = self.begin(claimed=claimed)
        reports = [self._loaded(child) for child in attempt.ranks]
        for path, data in hidden:
            path.write_bytes(data)
        if hidden:
            self.trial.note("the volume's bytes were wrong: memory served all")
        newest = max(steps, default=None)
        if {report.step for report in reports} != {newest} or (newest or 0) < (self.committed or 0):
            raise BrokenError(
                f"the ranks resume at {[report.step for report in reports]}; committed are "
                f"{steps}, and {self.committed} was known to be"
            )
        if newest is not None:
            saved = self.saved(newest)
            promises.check_whole(self.trial.run, saved)
            is_as_many = promises.world_size_of(saved) == self.world_size
            if exact and is_as_many:
                promises.check_tiers(saved, reports, pods, self.pods, self.copies)
            for rank, some in known().items():
                promises.check_tier(rank, reports[rank], some)
        for tier in (tier for tier in Tier if any(report.of(tier) for report in reports)):
            self.trial.note(f"read: {tier}")
        self.committed = newest
        self.save(attempt, self.next())
        amid(attempt)
        self.save(attempt, self.next())
        self.end(attempt)

    def end(self, attempt: Attempt) -> None:
        """The ranks end in order, then the monitor; nothing is left but the newest steps."""
        assert self.committed is not None
        for child in (*attempt.ranks, attempt.monitor):
            child.tell("end")
            if child.wait() != 0:
                raise BrokenError(f"{child.name} ended with {child.status}")
        attempt.port.close()
        self.trial.watch.look()
        for step in manifest.committed_steps(self.trial.run, _KIND):
            promises.check_whole(self.trial.run, self.saved(step))
        promises.check_no_processes(self.trial.living())
        # A rank may end before it hears of its last commit.
        steps = (self.committed - STRIDE, self.committed)
        promises.check_left((self.place_of(pod) for pod in set(self.pods)), steps)
        promises.check_no_temporaries(self.trial.run)

    def saved(self, step: int) -> Manifest:
        """The manifest of a committed step, which must be of an attempt of this run."""
        found = manifest.read_manifest(self.trial.run, _KIND, step).manifest
        if (found.attempt, found.incarnation) not in [
            (owner.attempt, owner.incarnation) for owner in self.trial.owners
        ]:
            raise BrokenError(f"step {step} was committed by a stranger, {found}")
        return found

    def _loaded(self, child: Child) -> Report:
        said, value = child.listen()
        if said != "loaded":
            raise BrokenError(f"{child.name} did not load: it says {said!r}: {value}")
        assert isinstance(value, Report)
        promises.check_answered("a load", value.seconds)
        return value


@contextmanager
def scene(
    trial: Trial,
    *,
    copies: int,
    pods: Sequence[int],
    budget: int = BUDGET,
    columns: int | None = None,
    sharded: bool = False,
) -> Iterator[Scene]:
    """A scene on this machine's memory file system; at its end no process is left."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    log = os.open(trial.directory / "processes.txt", os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    os.dup2(log, 2)  # torch's threads write there when a rank is gone
    os.close(log)
    with tempfile.TemporaryDirectory(dir=DEFAULT_MEMORY, prefix="test-") as memory:
        try:
            yield Scene(
                trial,
                Path(memory),
                copies=copies,
                pods=pods,
                budget=budget,
                columns=columns,
                sharded=sharded,
            )
        except HangError:
            trial.note_stacks()
            raise
        finally:
            trial.end()
        promises.check_no_processes()


def _hide(step: Path) -> Iterator[tuple[Path, bytes]]:
    """Give the step's shards other bytes, as many as before."""
    for path in sorted(step.rglob("*.pt")):
        data = path.read_bytes()
        path.write_bytes(bytes(byte ^ 0xFF for byte in data))
        yield path, data


def _nothing() -> None:
    pass
