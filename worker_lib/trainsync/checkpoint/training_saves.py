"""A whole checkpoint in one call, and the wait for its commit in another.

They are methods of `CheckpointCoordinator`: the mirror of `trainsync.load_sharded`.
"""

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import torch

from trainsync.api.protocol import SaveKind, SaveState, SaveStatus
from trainsync.checkpoint.errors import SaveAbortedError, SaveTimeoutError
from trainsync.checkpoint.save.commit_watch import CommitWatch
from trainsync.checkpoint.save.part import State, refuse_empty
from trainsync.checkpoint.save.registration import AWAY, CommitQuestion, all_ranks, await_commit
from trainsync.checkpoint.state_names import model_to_save, optimizer_to_save
from trainsync.checkpoint.training_state import Stateful, check_stateful, training_state
from trainsync.monitor.client.base import MonitorClient

MODEL: Final = "model"
OPTIMIZER: Final = "optim"
EXTRA: Final = "extra_state"
_UNKNOWN_SECONDS: Final = 10.0  # in which a registration by another process must arrive
_SLICE_SECONDS: Final = 0.5


class TrainingSaves(ABC):
    """The part of `CheckpointCoordinator` that saves all of a training at once."""

    rank: int
    world_size: int
    component_prefix: str
    commits: CommitWatch

    def __init__(self) -> None:
        self._newest: int | None = None  # step of a checkpoint that was saved or registered here
        self._begun: tuple[int, set[str]] = (-1, set())  # step and parts of the last `save`
        self._known_failures: set[tuple[SaveKind, int]] = set()

    @abstractmethod
    def register(
        self,
        global_step: int,
        *,
        checkpoint_participants: Iterable[tuple[str, int]] = (),
        patience: float = ...,
    ) -> None:
        """See `CheckpointCoordinator`."""

    @abstractmethod
    def save_async(
        self,
        name: str,
        save_fn: State,
        global_step: int,
        *,
        subdir: str = ...,
        attachments: Mapping[str, bytes] | None = None,
        overlapped: bool | None = None,
    ) -> bool:
        """See `CheckpointCoordinator`."""

    @abstractmethod
    def check_open(self, what: str) -> None:
        """See `CheckpointCoordinator`."""

    @abstractmethod
    def wait_all(self, timeout: float | None = None) -> None:
        """See `CheckpointCoordinator`."""

    def save(
        self,
        global_step: int,
        *,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer | None = None,
        scheduler: Stateful | None = None,
        dataloader: Stateful | None = None,
        generators: Mapping[str, torch.Generator] | None = None,
        extra: Mapping[str, Any] | None = None,
        subdir: str = "actor",
        attachments: Mapping[str, bytes] | None = None,
        overlapped: bool | None = None,
    ) -> bool:
        """Save a checkpoint of what is given: the mirror of `trainsync.load_sharded`.

        Every rank calls it alike; rank 0 registers all. Returns when tensors may change, as
        `save_async` does. Saves components ``model``, ``optim`` (with an optimizer) and
        ``extra_state`` (random numbers are always in it). Names are those of the bare model:
        without what DistributedDataParallel and ``torch.compile`` put into them.

        Args:
            model: given to ``fully_shard``, DistributedDataParallel or ``torch.compile``, or plain.
            generators, extra: see `trainsync.training_state`.
            attachments: small files beside rank 0's shard, such as those of
                `trainsync.huggingface_files`, with which the checkpoint can be merged.
            subdir, overlapped: see `save_async`.

        Returns:
            False when the save is skipped (see ``when_full`` of the class).

        Raises:
            What `save_async` raises; what the monitor refuses is raised by the next call.
            TypeError: something is not what its argument says.
            StateMismatchError: the model is wrapped in FSDP1.
        """
        self.check_open(f"save of step {global_step}")
        training = _Training(
            model=model,
            optimizer=optimizer,
            scheduler=scheduler,
            dataloader=dataloader,
            generators=generators,
            extra=extra,
        )
        states = {component: training.state(component) for component in training.components()}
        for component, state in states.items():
            refuse_empty(component, state)  # before anybody expects the save
        if self.rank == 0:
            names = [f"{self.component_prefix}{component}" for component in states]
            everyone = all_ranks(*names, world_size=self.world_size)
            # Training does not wait for the answer: the next call raises what is refused.
            self.register(global_step, checkpoint_participants=everyone, patience=0)
        if self._begun[0] != global_step:
            self._begun = (global_step, set())
        for component, state in states.items():
            if component in self._begun[1]:
                continue  # the call that began it raised what an earlier save had failed with
            if not self.save_async(
                component,
                state,
                global_step,
                subdir=subdir,
                attachments=attachments if (component, self.rank) == (MODEL, 0) else None,
                overlapped=overlapped,
            ):
                return False  # with one part skipped the whole save is aborted
            self._begun[1].add(component)
        self._begun = (-1, set())
        return True

    def finish(
        self, global_step: int | None = None, *, timeout: float = 1800.0
    ) -> SaveStatus | None:
        """Wait until this process's saves are written and a checkpoint is committed.

        Any rank, and a driver that saves nothing, may call it, with an event loop running or not
        (which it then holds up: `finish_async` does not).

        Args:
            global_step: of the checkpoint; None: of the last that was saved or registered here.
            timeout: seconds.

        Returns:
            How it was committed; None when no step is given and none was saved here.

        Raises:
            SaveFailedError, SaveAbortedError: a background save failed, or this one was aborted;
                `SaveSkippedError` when a rank skipped it.
            SaveTimeoutError: not committed within ``timeout`` seconds.
            MonitorError: the monitor refused a registration.
            ValueError: nobody saves that step, and nobody did.
        """
        self.check_open("finish")
        wait = _Wait(self.commits.monitor, global_step, self._newest, timeout)
        self.wait_all(timeout)
        if wait.step is None:
            return None
        question = CommitQuestion(self.commits.monitor, SaveKind.CHECKPOINT, wait.step)
        while not wait.is_coming():
            time.sleep(_SLICE_SECONDS)
        try:
            while wait.left > 0:
                self.commits.raise_refusal(wait.step)
                if (status := question.ask(wait.left)) is not None:
                    return status
        except SaveAbortedError:
            self._known_failures.add((SaveKind.CHECKPOINT, wait.step))  # heard here
            raise
        raise question.timeout()

    async def finish_async(
        self,
        global_step: int | None = None,
        *,
        timeout: float = 1800.0,  # noqa: ASYNC109 - waits for the monitor, not on the loop
    ) -> SaveStatus | None:
        """`finish`, to be awaited: the event loop goes on meanwhile."""
        wait = _Wait(self.commits.monitor, global_step, self._newest, timeout)
        while True:  # in short waits, so that a task that is cancelled leaves no thread behind
            slice_seconds = max(0.0, min(_SLICE_SECONDS, wait.left))
            try:
                await asyncio.to_thread(self.wait_all, slice_seconds)
                break
            except SaveTimeoutError:
                if wait.left <= 0:
                    raise
        step = wait.step
        if step is None:
            return None
        while not await asyncio.to_thread(wait.is_coming):  # noqa: ASYNC110
            await asyncio.sleep(_SLICE_SECONDS)
        try:
            return await await_commit(
                self.commits.monitor,
                SaveKind.CHECKPOINT,
                step,
                wait.deadline,
                lambda: self.commits.raise_refusal(step),
            )
        except SaveAbortedError:
            self._known_failures.add((SaveKind.CHECKPOINT, step))
            raise

    def _note(self, *kinds: SaveKind, step: int) -> None:
        """A save of ``step`` begins here, or is registered."""
        if SaveKind.CHECKPOINT in kinds:
            self._newest = step if self._newest is None else max(self._newest, step)


@dataclass(frozen=True, kw_only=True)
class _Training:
    """What one rank trains with, checked before anything of it is saved.

    Raises:
        TypeError: model or optimizer is something else, such as a state.
        UnsupportedStateError: scheduler or dataloader cannot be saved.
    """

    model: torch.nn.Module
    optimizer: torch.optim.Optimizer | None
    scheduler: Stateful | None
    dataloader: Stateful | None
    generators: Mapping[str, torch.Generator] | None
    extra: Mapping[str, Any] | None

    def __post_init__(self) -> None:
        if not isinstance(self.model, torch.nn.Module):
            raise TypeError(
                f"model is a {type(self.model).__name__}; expected the module itself "
                "(save_async takes a state_dict())"
            )
        if self.optimizer is not None and not hasattr(self.optimizer, "param_groups"):
            raise TypeError(
                f"optimizer is a {type(self.optimizer).__name__}; expected a torch optimizer"
            )
        if self.extra is not None and not isinstance(self.extra, Mapping):
            raise TypeError(
                f"extra is a {type(self.extra).__name__}; expected a mapping by names of yours"
            )
        check_stateful("scheduler", self.scheduler)
        check_stateful("dataloader", self.dataloader)

    def components(self) -> tuple[str, ...]:
        """Names of the parts that every rank saves."""
        if self.optimizer is None:
            return (MODEL, EXTRA)
        return (MODEL, OPTIMIZER, EXTRA)

    def state(self, component: str) -> Mapping[str, Any]:
        """This rank's state of one of them; its tensors alias those that are trained."""
        if component == MODEL:
            return model_to_save(self.model)
        if component == OPTIMIZER:
            assert self.optimizer is not None, "it is no component without"
            return optimizer_to_save(self.optimizer)
        return training_state(
            scheduler=self.scheduler,
            dataloader=self.dataloader,
            generators=self.generators,
            extra=self.extra,
        )


class _Wait:
    """For the checkpoint of ``step``; of none, when nobody asks for one and none was saved here.

    Args:
        newest: step that was saved or registered by this process.
    """

    def __init__(
        self, monitor: MonitorClient, step: int | None, newest: int | None, timeout: float
    ) -> None:
        if timeout <= 0:
            raise ValueError(f"timeout is {timeout:g} s, expected more than 0")
        self.step = newest if step is None else step
        self.deadline = time.monotonic() + timeout
        self._monitor = monitor
        self._newest = newest
        self._unknown_until = time.monotonic() + _UNKNOWN_SECONDS

    @property
    def left(self) -> float:
        """Seconds until the deadline."""
        return self.deadline - time.monotonic()

    def is_coming(self) -> bool:
        """Whether that checkpoint exists, or somebody saves it: a wait for none would be long.

        Raises:
            ValueError: after a while the monitor still knows of none.
        """
        assert self.step is not None, "there is one to wait for"
        if self._newest is not None and self.step <= self._newest:
            return True
        try:
            state = self._monitor.save_status(SaveKind.CHECKPOINT, self.step).state
        except AWAY:
            return True  # the wait for the commit has patience with it
        if state is not SaveState.UNKNOWN:
            return True
        if time.monotonic() < self._unknown_until:
            return False
        last = "it saved none" if self._newest is None else f"its newest is step {self._newest}"
        raise ValueError(
            f"no checkpoint of step {self.step} is saved or committed: this process did not save "
            f"it ({last}), and nobody registered it; expected finish() for the newest, or a save "
            "of that step before"
        )
