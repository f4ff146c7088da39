"""A whole checkpoint in one call, and the wait for its commit in another.

They are methods of `CheckpointCoordinator`: the mirror of `trainsync.load_sharded`.
"""

import threading
import time
import weakref
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

import torch

from trainsync.api.protocol import SaveKind, SaveState, SaveStatus
from trainsync.checkpoint.errors import SaveTimeoutError
from trainsync.checkpoint.reference_calls import SavedNames
from trainsync.checkpoint.save.missing import MissingReport
from trainsync.checkpoint.save.part import SavingOptions, State, refuse_empty
from trainsync.checkpoint.save.pipeline import SavePipeline
from trainsync.checkpoint.save.registration import AWAY, Participants, all_ranks
from trainsync.checkpoint.save.threads import in_thread
from trainsync.checkpoint.save.watch import LATER_SECONDS, SaveWatch
from trainsync.checkpoint.training_state import MODEL, Stateful, Training
from trainsync.monitor.client.base import MonitorClient
from trainsync.storage.layout import RunDirectory

_ANSWER_SECONDS: Final = 2.0
"""How long `register` waits for the monitor's answer, which mostly takes milliseconds."""

_UNKNOWN_SECONDS: Final = 10.0  # in which a registration by another process must arrive
_SLICE_SECONDS: Final = 0.5


class TrainingSaves(ABC):
    """The part of `CheckpointCoordinator` for whole saves: all of a training, and all ranks."""

    def __init__(
        self,
        monitor: MonitorClient,
        run: RunDirectory,
        rank: int,
        world_size: int,
        component_prefix: str,
        save_timeout: float,
        options: SavingOptions,
    ) -> None:
        self.rank = rank
        self.world_size = world_size
        self.component_prefix = component_prefix
        self._monitor = monitor
        self._run = run
        self._lost_after = save_timeout + LATER_SECONDS
        self.commits: Final = SaveWatch(monitor, timeout=self._lost_after)
        """The saves that this process registered, and aborts of those that it took part in."""
        self.watches: weakref.WeakSet[SaveWatch] = weakref.WeakSet({self.commits})
        self._saves = SavePipeline(monitor, run, rank, world_size, options, self.commits)
        self._named = SavedNames(world_size)
        self._newest: int | None = None  # step of a checkpoint that was saved or registered here
        self._begun: tuple[int, set[str]] = (-1, set())  # step and parts of the last `save`

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
        self._saves.lifetime.check_open(f"save of step {global_step}")
        training = Training(
            model=model,
            optimizer=optimizer,
            scheduler=scheduler,
            dataloader=dataloader,
            generators=generators,
            extra=extra,
        )
        states = {component: training.state(component) for component in training.components()}
        for component, state in states.items():
            refuse_empty(component, state)  # before the save is registered
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
            ValueError: no process saves that step, and none did.
        """
        self._saves.lifetime.check_open("finish")
        wait = _CommitWait(self.commits, global_step, self._newest, timeout)
        self._saves.wait_all(timeout)
        return wait.commit()

    async def finish_async(
        self,
        global_step: int | None = None,
        *,
        timeout: float = 1800.0,  # noqa: ASYNC109 - waits for the monitor, not on the loop
    ) -> SaveStatus | None:
        """`finish`, to be awaited: the event loop goes on meanwhile."""
        wait = _CommitWait(self.commits, global_step, self._newest, timeout)
        return await in_thread(partial(self._finish, wait), wait.stop)

    def _finish(self, wait: "_CommitWait") -> SaveStatus | None:
        """`finish` in short waits, so that a task that is cancelled leaves no thread behind."""
        while True:
            try:
                self._saves.wait_all(max(0.0, min(_SLICE_SECONDS, wait.left)))
                return wait.commit()
            except SaveTimeoutError:
                if wait.left <= 0 or wait.stop.is_set():
                    raise

    # -- registering ------------------------------------------------------------------------

    def register(
        self,
        global_step: int,
        *,
        state_dict_participants: Iterable[tuple[str, int]] = (),
        checkpoint_participants: Iterable[tuple[str, int]] = (),
        reuse_state_dict: bool = False,
        patience: float = _ANSWER_SECONDS,
    ) -> None:
        """Tell the monitor all participants of this step's saves; one caller, full sets.

        A monitor that is away does not hold up training: after ``patience`` seconds (at once, when
        it has not answered an earlier call either) it is told in the background. The outcome of
        the saves is awaited there, too: the next ``register``, ``save_*`` or ``wait_all`` raises
        the abort of one, whichever process aborted it.

        A checkpoint that is registered together with a state dict, or with ``reuse_state_dict``,
        also holds the state dict's files: it commits after it.

        Args:
            patience: seconds to wait for the monitor's answer, which takes a few writes to the
                volume. With 0 training does not wait at all, and the next call raises what it
                refuses. A context that is closed before the answer leaves the saves unregistered,
                and they will not commit.

        Raises:
            ValueError: no participant is given, or ``patience`` is negative.
            MonitorError: the monitor refuses this, or refused an earlier registration.
            SaveFailedError, SaveAbortedError: an *earlier* save failed; nothing was done now.
        """
        self._saves.lifetime.check_open("register")
        if patience < 0:
            raise ValueError(f"patience must not be negative, got {patience}")
        participants = Participants(
            global_step,
            tuple(state_dict_participants),
            tuple(checkpoint_participants),
            reuse_state_dict,
        )
        self._saves.raise_failures()
        self._note(*participants.kinds, step=participants.step)
        self.commits.register(participants, patience=patience)

    async def register_and_monitor(
        self,
        global_step: int,
        is_state_dict: bool = False,
        *,
        state_dict_participants: Iterable[tuple[str, int]] = (),
        checkpoint_participants: Iterable[tuple[str, int]] = (),
        reuse_state_dict: bool = False,
        timeout: float = 1800.0,  # noqa: ASYNC109 - waits for the monitor, not on the loop
        state_dict_thread_count: int = 0,
        checkpoint_thread_count: int = 0,
    ) -> SaveStatus:
        """`register` what is given, then wait until the save is committed.

        Waits for the checkpoint, or with ``is_state_dict`` for the state dict. Without
        participants it only waits, for a save that another process registers. After 10 s it logs
        what the save waits for: its registration, or the parts that are not written.

        Args:
            state_dict_thread_count: the reference's way to name participants, in place of
                ``state_dict_participants``: how many saves of how many ranks there are in all; see
                `SavedNames`. So with ``checkpoint_thread_count``.

        Raises:
            ValueError: participants and counts are given, or the counts name no participants.
            NotRegisteredError: after 10 s the save is not registered and no part of it is
                written, though this coordinator registers saves.
            SaveAbortedError: with the cause; `SaveSkippedError` when a rank skipped it.
            SaveTimeoutError: not committed within ``timeout`` seconds.
            MonitorError: the monitor refuses, or refused the `register` of this step. One that is
                away is asked again until the timeout.
        """
        self._saves.lifetime.check_open("register_and_monitor")
        deadline, stop = time.monotonic() + timeout, threading.Event()
        state_dict, checkpoint = self._named.chosen(
            global_step,
            tuple(state_dict_participants),
            tuple(checkpoint_participants),
            state_dict_thread_count,
            checkpoint_thread_count,
        )
        participants = None
        if state_dict or checkpoint:
            participants = Participants(global_step, state_dict, checkpoint, reuse_state_dict)
            self._note(*participants.kinds, step=participants.step)
        wait = partial(
            self._wait_for, kind_of(is_state_dict), global_step, participants, deadline, stop
        )
        return await in_thread(wait, stop)

    def _wait_for(
        self,
        kind: SaveKind,
        step: int,
        participants: Participants | None,
        deadline: float,
        stop: threading.Event,
    ) -> SaveStatus:
        if participants is not None:
            self.commits.register_now(participants, deadline, stop)
        missing = MissingReport(self._run, self._monitor, kind, step)
        return self.commits.commit(kind, step, deadline, stop, missing)

    def watch(self) -> SaveWatch:
        """For a manager that registers saves itself and asks for their end when it suits all ranks.

        This coordinator raises no aborts any more but those of saves that it registers.
        """
        self.commits.ignore_written()
        watch = SaveWatch(self._monitor, self.commits.known, self._lost_after)
        self.watches.add(watch)
        return watch

    def _note(self, *kinds: SaveKind, step: int) -> None:
        """A save of ``step`` begins here, or is registered."""
        if SaveKind.CHECKPOINT in kinds:
            self._newest = step if self._newest is None else max(self._newest, step)


@dataclass
class _CommitWait:
    """The wait for the checkpoint of ``step``; None: no step was asked for and none saved here.

    Args:
        newest: the last step that was saved or registered by this process.
        timeout: seconds.
    """

    watch: SaveWatch
    step: int | None
    newest: int | None
    timeout: float
    stop: threading.Event = field(default_factory=threading.Event)
    """Set when the caller waits no longer."""

    def __post_init__(self) -> None:
        if self.timeout <= 0:
            raise ValueError(f"timeout is {self.timeout:g} s, expected more than 0")
        self.step = self.newest if self.step is None else self.step
        self.deadline = time.monotonic() + self.timeout
        self._unknown_until = time.monotonic() + _UNKNOWN_SECONDS

    @property
    def left(self) -> float:
        """Seconds until the deadline."""
        return self.deadline - time.monotonic()

    def commit(self) -> SaveStatus | None:
        """How it was committed; None without a step.

        Raises:
            What `SaveWatch.commit` raises.
            ValueError: after a while the monitor still knows of no such save: a wait would be long.
        """
        if self.step is None:
            return None
        while not self._is_coming(self.step) and not self.stop.wait(_SLICE_SECONDS):
            pass
        return self.watch.commit(SaveKind.CHECKPOINT, self.step, self.deadline, self.stop)

    def _is_coming(self, step: int) -> bool:
        """Whether that checkpoint exists, or a process saves it."""
        if self.newest is not None and step <= self.newest:
            return True
        try:
            state = self.watch.monitor.save_status(SaveKind.CHECKPOINT, step).state
        except AWAY:
            return True  # the wait for the commit asks such a monitor again
        if state is not SaveState.UNKNOWN:
            return True
        if time.monotonic() < self._unknown_until:
            return False
        last = "it saved none" if self.newest is None else f"its newest is step {self.newest}"
        raise ValueError(
            f"no checkpoint of step {step} is saved or committed: this process did not save "
            f"it ({last}), and no process registered it; expected finish() for the newest, or a "
            "save of that step before"
        )


def kind_of(is_state_dict: bool) -> SaveKind:
    """The kind of save that a caller means."""
    return SaveKind.STATE_DICT if is_state_dict else SaveKind.CHECKPOINT
