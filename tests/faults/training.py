"""The job of a trial's processes: the library as in a trainer, with small states."""

import contextlib
import io
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Final, Protocol

import torch
from trainsync.api.protocol import ParticipantRef, SaveKind, SaveRequest, SaveState, SaveStatus
from trainsync.checkpoint.coordinator import CheckpointCoordinator
from trainsync.checkpoint.errors import CheckpointError, SaveAbortedError, SaveFailedError
from trainsync.checkpoint.load.loading import load_rank_shard
from trainsync.checkpoint.load.resume import Resume, open_resume
from trainsync.checkpoint.shard_names import shard_file_name
from trainsync.monitor.client.base import MonitorClient
from trainsync.monitor.client.disk import DiskMonitorClient
from trainsync.monitor.client.local import LocalMonitorClient
from trainsync.monitor.core.core import CoreSettings
from trainsync.monitor.errors import MonitorError
from trainsync.monitor.ledger.saves import SaveOwner
from trainsync.storage.saves.claims import LOCAL_UID

from tests.faults.plan import Plan, Shape, Step, Way, same
from tests.faults.processes import SECONDS, BrokenError, Line

CLUSTER = "local"
FAILURE: Final = "this part fails, so that the save is aborted"
TICK_SECONDS = 0.02
DEADLINE_SECONDS = 3600.0
"""Deadline of a save. Trials never wait for this deadline: the clock jumps."""


class Clock:
    """A wall clock that a trial may set."""

    def __init__(self) -> None:
        self.offset = timedelta()

    def __call__(self) -> datetime:
        """This process's present time."""
        return datetime.now(UTC) + self.offset


CLOCK = Clock()


@dataclass(frozen=True)
class Where:
    """The run's directory, attempt and incarnation."""

    root: Path
    owner: SaveOwner
    uid: str = LOCAL_UID

    @property
    def place(self) -> Path:
        """Where a coordinator saves to."""
        return self.root


class Placed(Protocol):
    """An attempt, and the directory or URL of its run."""

    @property
    def owner(self) -> SaveOwner:
        """The attempt."""
        ...

    @property
    def place(self) -> str | Path:
        """Where a coordinator saves to."""
        ...


def host(
    where: Where,
    plan: Plan,
    *,
    tick_seconds: float = TICK_SECONDS,
    io_tries: int = 3,
) -> LocalMonitorClient:
    """Start the run's monitor in this process and claim the attempt."""
    client = LocalMonitorClient(
        where.root,
        attempt=where.owner.attempt,
        incarnation=where.owner.incarnation,
        settings=CoreSettings(
            run_uid=where.uid,
            max_to_keep=plan.keep,
            verify=plan.verify,
            save_deadline_seconds=DEADLINE_SECONDS,
            io_tries=io_tries,
        ),
        tick_seconds=tick_seconds,
        timeout_seconds=SECONDS,
        clock=CLOCK,
    )
    client.claim(CLUSTER)
    return client


def join(where: Where) -> DiskMonitorClient:
    """The client of a process that does not host the monitor."""
    return DiskMonitorClient(
        where.root,
        attempt=where.owner.attempt,
        incarnation=where.owner.incarnation,
        run_uid=where.uid,
    )


class Update(torch.optim.Optimizer):
    """An optimizer whose step adds one to its tensors, once."""

    def __init__(self) -> None:
        super().__init__([torch.zeros(1)], {})

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Replaces torch's method, which imports torch's compiler: 0.8 s in each forked process."""
        self.param_groups.append(param_group)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # torch overloads it
        """See the class."""
        del closure
        for weights in self.param_groups[0]["params"]:
            weights.add_(1)
        self.param_groups[0]["params"].clear()


class Saver:
    """One rank's coordinator, and the optimizer that overlapped copies delay."""

    def __init__(self, coordinator: CheckpointCoordinator) -> None:
        self.coordinator = coordinator
        self._optimizer = Update()
        coordinator.guard(self._optimizer)

    def save(
        self, way: Way, name: str, state: dict[str, Any], step: int, *, is_state_dict: bool
    ) -> None:
        """Call `CheckpointCoordinator.save_async`; call `update` afterwards."""
        coordinator, weights = self.coordinator, state["weights"]
        if way is Way.FUNCTION:
            file = shard_file_name(name, coordinator.rank, coordinator.world_size)
            data = _archive(state)  # the data that a function reads must not change
            coordinator.save_async(
                name, lambda place: _write(place / file, data), step, is_state_dict
            )
        elif way is Way.FAILING:
            coordinator.save_async(name, _fail, step, is_state_dict)
        elif way is Way.OVERLAPPED:
            held = self._optimizer.param_groups[0]["params"]
            if not any(weights is one for one in held):  # a retry after an earlier failure
                held.append(weights)
            coordinator.save_async(name, state, step, is_state_dict, overlapped=True)
            return  # the update waits for the copy
        else:
            coordinator.save_async(name, state, step, is_state_dict)
        weights.add_(1)

    def update(self) -> None:
        """The optimizer's step, before the next write to the state; waits for overlapped copies."""
        self._optimizer.step()


class Trainer:
    """Some ranks of a job in one process, each with its own coordinator."""

    def __init__(
        self,
        where: Placed,
        plan: Plan,
        monitor: MonitorClient,
        ranks: Sequence[int],
    ) -> None:
        torch.set_num_threads(1)
        self.where = where
        self.plan = plan
        self.monitor = monitor
        self.coordinators = {
            rank: CheckpointCoordinator(
                monitor,
                where.place,
                rank=rank,
                world_size=plan.ranks,
                staging_timeout=SECONDS,
                incremental=bool(plan.frozen),
            )
            for rank in ranks
        }
        self._savers = {rank: Saver(one) for rank, one in self.coordinators.items()}

    def train(self, steps: Sequence[Step]) -> None:
        """Save every step and wait for its commit."""
        if not self.coordinators:
            return  # this process only hosts the monitor
        for step in steps:
            self.save(step)
            self.flush()
            self.committed(step)

    def save(self, step: Step) -> None:
        """Register (on rank 0) and save in the background."""
        if 0 in self.coordinators and self.plan.register_first:
            self.register(step)
        for rank in self.coordinators:
            saver = self._savers[rank]
            for kind in step.shape.kinds:
                for name in self.plan.written(step, kind):
                    state = self.plan.state(self.where.owner.attempt, step.number, name, rank)
                    self._save_one(saver, name, state, step, kind)
            saver.update()
        if 0 in self.coordinators and not self.plan.register_first:
            self.register(step)

    def register(self, step: Step) -> None:
        """Register on rank 0, like `CheckpointCoordinator.register`."""
        for kind in step.shape.kinds:
            who = [
                ParticipantRef(component=name, rank=rank)
                for name, rank in self.plan.participants(step, kind)
            ]
            reuse = step.shape is Shape.REUSE and kind is SaveKind.CHECKPOINT
            self.monitor.register(
                SaveRequest(kind=kind, step=step.number, participants=who, reuse_state_dict=reuse)
            )

    def _save_one(
        self,
        saver: Saver,
        name: str,
        state: dict[str, Any],
        step: Step,
        kind: SaveKind,
    ) -> None:
        """`save_async`; ignores errors of earlier steps."""
        way = self.plan.way(step, name)
        is_state_dict = kind is SaveKind.STATE_DICT
        while True:
            try:
                saver.save(way, name, state, step.number, is_state_dict=is_state_dict)
            except (SaveFailedError, SaveAbortedError) as error:
                if f"of step {step.number}, " in str(error):
                    raise
            else:
                return

    def flush(self) -> None:
        """Wait until all saves are written; raises their errors."""
        for coordinator in self.coordinators.values():
            coordinator.wait_all(SECONDS)

    def try_to_save(self, step: Step) -> list[str]:
        """`save` and `flush` during a fault; returns their errors."""
        failed = []
        acts: list[Callable[[], None]] = [lambda: self.save(step), self.flush, self.flush]
        for act in acts:
            try:
                act()
            except (CheckpointError, MonitorError, OSError) as error:
                failed.append(f"{type(error).__name__}: {error}")
        return failed

    def go_on(self, step: Step) -> None:
        """`train` of one step, after the errors of earlier steps were raised."""
        if not self.coordinators:
            return
        self.save(step)
        for _ in range(2):  # the first call may raise the last step's error
            with contextlib.suppress(CheckpointError, MonitorError):
                self.flush()
        self.committed(step)

    def committed(self, step: Step) -> None:
        """Wait until every save of the step is committed. Raises `BrokenError` otherwise."""
        for kind, status in self.outcomes(step).items():
            if status.state is not SaveState.COMMITTED:
                raise BrokenError(
                    f"{kind} {step.number} of attempt {self.where.owner.attempt} is "
                    f"{status.state}, not committed: {status.error}"
                )

    def outcomes(self, step: Step, seconds: float = SECONDS) -> dict[SaveKind, SaveStatus]:
        """The result of each save of the step, after at most ``seconds``."""
        end = time.monotonic() + seconds
        return {
            kind: self.monitor.save_status(kind, step.number, max(0.0, end - time.monotonic()))
            for kind in step.shape.kinds
        }


def next_attempt(
    line: Line, where: Where, plan: Plan, expected: int | None, step: Step, away: timedelta
) -> None:
    """Claim, resume at ``expected``, load all its components, and commit ``step``."""
    CLOCK.offset = away
    client = host(where, plan)
    point = client.resume()
    found = None if point is None else point.step
    if found != expected:
        raise BrokenError(f"attempt {where.owner.attempt} resumes at {found}, not at {expected}")
    if point is not None:
        check_shards(plan, open_resume(where.root, point))
    Trainer(where, plan, client, range(plan.ranks)).train([step])
    client.close()
    line.say("resumed")


def check_shards(plan: Plan, resume: Resume) -> None:
    """Load every rank's components of a checkpoint, and compare them with what was saved."""
    for rank in range(plan.ranks):
        for name in plan.components:
            loaded = load_rank_shard(resume, name, rank=rank, world_size=plan.ranks)
            saved = plan.state(resume.manifest.attempt, resume.step, name, rank)
            if not same(loaded, saved):
                raise BrokenError(f"{name}.{rank} of step {resume.step} is not what was saved")


def _fail(_: Path) -> None:
    raise RuntimeError(FAILURE)


def _archive(state: dict[str, Any]) -> bytes:
    buffer = io.BytesIO()
    torch.save(state, buffer)
    return buffer.getvalue()


def _write(path: Path, data: bytes) -> None:
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL), "wb") as file:
        file.write(data)
