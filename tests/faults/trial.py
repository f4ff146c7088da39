"""One trial: its directory, its processes, and the checks after the fault."""

import random
import shutil
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import Any, Final

from trainsync.api.protocol import SaveKind
from trainsync.monitor.ledger.saves import SaveOwner
from trainsync.storage.errors import StepGoneError
from trainsync.storage.layout import RunDirectory
from trainsync.storage.leases import reading
from trainsync.storage.saves import manifest
from trainsync.storage.saves.claims import LOCAL_UID

from tests.faults import promises
from tests.faults.plan import STRIDE, Plan, Shape, Step
from tests.faults.processes import BrokenError, Child, HangError, Line
from tests.faults.training import Where, next_attempt

_READERS: Final = 0.2
"""Share of the trials in which a reader holds an older step."""


class Trial:
    """The conductor of one trial; kills all remaining processes at the end.

    Args:
        directory: empty; the run's directory is ``run`` in it.
        point: the point of the fault, one of the scenario's.
    """

    def __init__(self, seed: int, directory: Path, point: str) -> None:
        self.seed = seed
        self.point = point
        self.directory = directory
        self.dice = random.Random(f"trial {seed}")
        self.run = RunDirectory(directory / "run")
        self.watch = promises.Watch(self.run)
        self.steps: dict[tuple[int, int], Step] = {}
        self.owners: list[SaveOwner] = []
        self.notes: set[str] = set()
        self.uid = LOCAL_UID
        """The run's uid."""
        self.receipts_hold = True
        """Whether every receipt must have its files; False while an abort cannot finish."""
        self._children: list[Child] = []
        self._reader: Child | None = None

    def __enter__(self) -> "Trial":
        self.run.root.mkdir(parents=True)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if isinstance(error, HangError):
            self.note_stacks()
        self.end()

    def note_stacks(self) -> None:
        """Let every living process write the stacks of its threads to the trial's log."""
        for child in self._children:
            child.note_stacks()

    def end(self) -> None:
        """Kill the remaining processes."""
        for child in self._children:
            child.kill()

    def living(self) -> list[int]:
        """Ids of this trial's processes that have not been seen to end."""
        return [child.pid for child in self._children if child.status is None]

    def child(self, name: str, function: Callable[..., None], *arguments: Any) -> Child:
        """Start a process of this trial."""
        made = Child(name, function, *arguments, look=self.watch.look)
        self._children.append(made)
        return made

    def attempt(self, plan: Plan) -> Where:
        """The next attempt; the first one saves the plan's steps."""
        number = len(self.owners)
        owner = SaveOwner(number, f"incarnation{number}{self.seed % 10**9}")
        self.owners.append(owner)
        if number == 0:
            for step in (*plan.history, plan.fault, plan.after):
                self.steps[0, step.number] = step
        return Where(self.run.root, owner, self.uid)

    def note(self, what: str) -> None:
        """Count an event of this trial for the report."""
        self.notes.add(what)

    def maybe_read(self) -> None:
        """In some trials: start a reader that reads a committed step until the trial ends."""
        committed = [(k, s) for k in SaveKind for s in manifest.committed_steps(self.run, k)]
        if not committed or self.dice.random() >= _READERS:
            return
        reader = self.child("reader", _read, self.run.root, *self.dice.choice(committed))
        said, value = reader.listen()
        if said == "gone":  # retention may have removed the step
            return
        if said != "reading":
            raise BrokenError(f"the reader said {said!r}: {value}")
        self._reader = reader
        self.note("an older step was being read")

    def check(self, plan: Plan) -> dict[SaveKind, list[int]]:
        """Check all promises; returns the committed steps by kind."""
        self.watch.look()
        found = promises.check_commits(self.run, plan, self.owners, self.steps)
        if self.receipts_hold:
            for owner in self.owners:
                promises.check_receipts(self.run, owner)
        self.watch.look()  # the step of the last pointer, or a newer one, must exist
        return found

    def check_resumes(
        self,
        plan: Plan,
        *,
        last: tuple[Step, ...] | None = None,
        away: timedelta = timedelta(0),
    ) -> None:
        """With all earlier attempts dead, check that the next one resumes from the last complete
        checkpoint and that no committed file is lost or torn.

        Args:
            last: steps that the last attempt may have left uncommitted; None: the fault's step.
            away: seconds that the next attempt's clock is ahead.
        """
        committed = self.check(plan)
        owner = self.owners[-1]
        expected = set(committed[SaveKind.CHECKPOINT])
        complete = {}
        for step in (plan.fault,) if last is None else last:
            complete[step] = promises.will_commit(self.run, plan, owner, step)
            if complete[step].get(SaveKind.CHECKPOINT):
                expected.add(step.number)
        promises.check_same_ledger(self.run, plan, self.uid, self.directory)
        resumed = max(expected, default=None)
        where = self.attempt(plan)
        weights = set(committed[SaveKind.STATE_DICT])
        weights |= {late.number for late, saves in complete.items() if any(saves.values())}
        step = self._next_step(plan, resumed, weights)
        self.steps[where.owner.attempt, step.number] = step
        child = self.child("next attempt", next_attempt, where, plan, resumed, step, away)
        child.expect("resumed")
        if child.wait() != 0:
            raise BrokenError(f"the next attempt ended with {child.status}")
        self.check(plan)
        due = [(kind, step.number) for kind in step.shape.kinds]
        for late, saves in complete.items():
            due += [(kind, late.number) for kind, whole in saves.items() if whole]
        for kind, number in due:
            if self.watch.newest.get(kind, -1) < number:
                raise BrokenError(f"{kind} {number} was complete, and is not committed")
        self._end_reader()

    def _next_step(self, plan: Plan, resumed: int | None, weights: set[int]) -> Step:
        """The step after the resumed one; its weights may be committed already."""
        number = (resumed or 0) + STRIDE
        if number not in weights:
            shapes = [Shape.CHECKPOINT] + [Shape.REUSE] * (len(plan.components) > 1)
            return Step(number, self.dice.choice(shapes))
        if len(plan.components) == 1:
            # A second state dict of this step would be refused; no trainer saves one.
            return Step(max(weights) + STRIDE, Shape.CHECKPOINT)
        self.note("the next attempt's weights took the place of older ones")
        self._end_reader()  # the reader would hold the older weights
        return Step(number, Shape.REUSE)

    def _end_reader(self) -> None:
        if self._reader is not None:
            self._reader.tell("end")
            self._reader.expect("read")
            self._reader = None

    def remove(self) -> None:
        """Remove the trial's directory."""
        shutil.rmtree(self.directory, ignore_errors=True)


def _read(line: Line, root: Path, kind: SaveKind, step: int) -> None:
    run = RunDirectory(root)
    try:
        with reading(run, kind, step, "a-reader") as lease:
            line.say("reading")
            line.hear(120)
            manifest.check_manifest(run, lease.committed.manifest, with_digest=True)
    except StepGoneError:  # removed before the lease; later: FileCheckError
        line.say("gone")
        return
    line.say("read")
