"""CheckpointCoordinator: the one object that a trainer saves with."""

import threading
import time
import weakref
from collections.abc import Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch

from trainsync.api.protocol import LoadReport, SaveKind, SaveStatus
from trainsync.api.spec import SAVE_DEADLINE_SECONDS, SyncMethod
from trainsync.checkpoint.data_cursor import HasState, data_cursor_file
from trainsync.checkpoint.errors import UnsupportedPlaceError
from trainsync.checkpoint.load.resume import report_damage, report_load
from trainsync.checkpoint.memory.kept import KeptShards
from trainsync.checkpoint.memory.neighbour.neighbour import Neighbour
from trainsync.checkpoint.memory.place import MemoryPlace
from trainsync.checkpoint.memory.shared import open_shared
from trainsync.checkpoint.reference_calls import (
    PlainFunction,
    SavedNames,
    name_first,
    taking_a_directory,
)
from trainsync.checkpoint.rescue.guests import GuestParts
from trainsync.checkpoint.rescue.rescuer import Rescuer
from trainsync.checkpoint.save.commit_wait import CommitWait
from trainsync.checkpoint.save.missing import MissingReport
from trainsync.checkpoint.save.part import (
    SaveFunction,
    SavePart,
    SavingOptions,
    State,
    WhenFull,
    refuse_empty,
)
from trainsync.checkpoint.save.permits import WritePermits
from trainsync.checkpoint.save.pipeline import SavePipeline
from trainsync.checkpoint.save.places.opening import open_place
from trainsync.checkpoint.save.registration import Participants, all_ranks
from trainsync.checkpoint.save.stats import CheckpointStats
from trainsync.checkpoint.save.threads import in_thread
from trainsync.checkpoint.save.watch import LATER_SECONDS, TIMES, SaveWatch, WatchTimes
from trainsync.checkpoint.training_save import TrainingSave
from trainsync.checkpoint.training_state import Stateful, Training
from trainsync.monitor.client.base import MonitorClient
from trainsync.storage.layout import RunDirectory
from trainsync.storage.objects.address import is_url

_ANSWER_SECONDS: Final = 2.0
"""How long `register` waits for the monitor's answer, which mostly takes milliseconds."""


class CheckpointCoordinator:
    """Saves this rank's part of checkpoints without stopping training.

    Every rank calls `save` as it later calls `trainsync.load_sharded`, and `finish` at the end::

        coordinator = ctx.coordinator()
        for step in ...:
            coordinator.save(step, model=model, optimizer=optimizer)
        coordinator.finish()

    It returns as soon as the bytes are copied; a background thread writes them, and the monitor
    commits the save once every registered participant has written. Parts of your own are saved one
    by one. Saves of the same ``name`` are written one after the other, and one caller registers the
    full set of participants::

        coordinator.save_async("model", model.state_dict(), step)
        coordinator.save_async("optim", optimizer.state_dict(), step)
        if rank == 0:
            await coordinator.register_and_monitor(
                step, checkpoint_participants=all_ranks("model", "optim", world_size=world_size)
            )

    With ``overlapped`` it does not even wait for the copy: the optimizer's next step does, and by
    then the copy is done in most cases::

        coordinator.guard(optimizer)
        coordinator.save_async("model", model.state_dict(), step, overlapped=True)

    Only what guarded optimizers own is copied so late: their parameters and their state. All else
    (buffers such as running statistics, averaged weights, RNG states, learning rates) is copied
    before ``save_async`` returns. A step is what holds parameters back. Other code that changes
    them (``load_state_dict``, edits under ``no_grad``) must call `wait_staged` first; an edit that
    torch counts as one in place fails the save, and one through ``.data`` is not noticed.

    Methods are called from one thread.

    Args:
        monitor: made for this process's attempt and incarnation.
        directory: the run's directory, or the URL of its store (``s3://bucket/prefix``), whose
            credentials are the environment's; None: the directory of a `CheckpointMonitor`.
        staging_slots: saves that may be staged at once.
        staging_timeout: seconds that one more waits at most; None: as ``save_timeout``, since
            staged saves may wait for a bucket, and at least 1800.
        when_full: whether one more waits, or is skipped. A save that any rank skips is aborted for
            all: `save_async` returns False, `stats` counts it, and only a wait for its commit
            raises. `save_sync` always waits.
        overlapped: default of `save_async`.
        copy_timeout: seconds that a step waits at most for overlapped copies; then the save fails
            and the step goes on.
        component_prefix: put before every ``name`` that is saved, for a second model of the run:
            its components are told apart, and its files keep their names in a folder of their own.
        permits: held while the background writes; None: all may write at once.
        save_timeout: seconds after which the monitor aborts a save that is not complete. For so
            long a part that is written in the background waits for a bucket that is away.
        sync_method: how explorers of the run get weights, for those that save for them; None: by
            what the saver does besides.
        times: between the requests that ask how saves ended.
        memory: where shards of checkpoints are kept, too, for a process that starts again.
        incremental: a component whose state has not changed since the newest committed checkpoint
            (a frozen model) is not written again: the checkpoint has the file of the older one. In
            a bucket so are blocks of a component (frozen layers), and each process's first one is
            compared with what its attempt resumed from.
    """

    def __init__(
        self,
        monitor: MonitorClient,
        directory: str | Path | None = None,
        *,
        rank: int = 0,
        world_size: int = 1,
        staging_slots: int = 2,
        staging_timeout: float | None = None,
        when_full: WhenFull = "wait",
        overlapped: bool = False,
        copy_timeout: float = 300.0,
        component_prefix: str = "",
        permits: WritePermits | None = None,
        save_timeout: float = SAVE_DEADLINE_SECONDS,
        sync_method: SyncMethod | None = None,
        times: WatchTimes = TIMES,
        memory: MemoryPlace | None = None,
        incremental: bool = False,
    ) -> None:
        if not 0 <= rank < world_size:
            raise ValueError(f"rank must be in [0, {world_size}), got {rank}")
        if when_full not in ("wait", "skip"):
            raise ValueError(f"when_full must be 'wait' or 'skip', got {when_full!r}")
        if directory is None:
            directory = getattr(monitor, "directory", None)
        if directory is None:
            raise TypeError(
                f"a {type(monitor).__name__} knows no directory; expected "
                "CheckpointCoordinator(monitor, directory)"
            )
        self.rank = rank
        self.world_size = world_size
        self.component_prefix = component_prefix
        self.sync_method = sync_method
        self._monitor = monitor
        self._where = directory
        self._run = None if is_url(directory) else RunDirectory(Path(directory))
        self._overlapped = overlapped
        self._lost_after = save_timeout + LATER_SECONDS
        self._place = open_place(
            directory, monitor.attempt, monitor.incarnation, incremental=incremental
        )
        self._neighbour: Neighbour | None = None
        self._kept: KeptShards | None = None
        rescuer: Rescuer | None = None
        if memory is not None:
            owner = (monitor.attempt, monitor.incarnation)
            rescuer = Rescuer(directory, *owner, self._place.writer)
            shared = open_shared(directory)
            if memory.guests is not None:
                guests = GuestParts(rescuer, *owner)
                self._neighbour = Neighbour(memory.guests, shared, *owner, rank, guests)
                weakref.finalize(self, self._neighbour.close).atexit = False
            self._kept = KeptShards(memory, shared, *owner, self._neighbour)
        self.commits: Final = self._new_watch(times, None)
        """The saves that this process registered, and aborts of those that it took part in."""
        self.watches: weakref.WeakSet[SaveWatch] = weakref.WeakSet({self.commits})
        options = SavingOptions(
            staging_slots=staging_slots,
            staging_timeout=max(SAVE_DEADLINE_SECONDS, save_timeout)
            if staging_timeout is None
            else staging_timeout,
            when_full=when_full,
            copy_timeout=copy_timeout,
            permits=permits,
            memory=self._kept,
            rescuer=rescuer,
            save_timeout=save_timeout,
        )
        self._saves = SavePipeline(monitor, self._place, rank, world_size, options, self.commits)
        self._named = SavedNames(world_size)
        self._newest: int | None = None  # step of a checkpoint that was saved or registered here
        self._trainings = TrainingSave(rank)

    def tolerate(self, kind: SaveKind) -> None:
        """The caller goes on without saves of this kind that fail, and hears of them elsewhere.

        From now on `save_async` raises what fails before it returns; what fails later is logged and
        counted. Of saves that this process registers aborts are raised as before.
        """
        self._saves.tolerated |= {kind}

    @property
    def directory(self) -> Path:
        """The run's directory.

        Raises:
            UnsupportedPlaceError: the run's checkpoints are in a store.
        """
        if self._run is None:
            raise UnsupportedPlaceError(
                f"the run's checkpoints are in {self._where}, and it has no directory: this needs "
                "a run on a volume"
            )
        return self._run.root

    @property
    def where(self) -> Path | str:
        """The run's directory, or the URL of the store that its checkpoints are in."""
        return str(self._where) if self._run is None else self._run.root

    @property
    def memory(self) -> MemoryPlace | None:
        """Where shards are kept in memory, too; None: nowhere."""
        return None if self._kept is None else self._kept.place

    @property
    def neighbour(self) -> Neighbour | None:
        """Exchanges copies of what is kept in memory with other nodes; None without copies."""
        return self._neighbour

    @property
    def stats(self) -> CheckpointStats:
        """A consistent copy of the counters."""
        return self._saves.stats

    @property
    def saves(self) -> SavePipeline:
        """The saves that go on in the background, for the context that ends them in order."""
        return self._saves

    # -- a whole checkpoint ----------------------------------------------------------------

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
        data_cursor: HasState | Mapping[str, Any] | None = None,
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
            data_cursor: which data the model has learned from: a `trainsync.DataCursor`, or the
                ``state_dict()`` of one that another process holds. Rank 0 saves its own;
                `RunContext.data_cursor` goes on from it.
            attachments: small files beside rank 0's shard, such as those of
                `trainsync.huggingface_files`, with which the checkpoint can be merged.
            subdir, overlapped: see `save_async`.

        Returns:
            False when the save is skipped (see ``when_full`` of the class).

        Raises:
            What `save_async` raises; what the monitor refuses is raised by the next call.
            TypeError: something is not what its argument says, or JSON cannot hold the cursor.
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
        small = dict(attachments or {})
        if data_cursor is not None:
            small |= data_cursor_file(data_cursor)

        def register(components: tuple[str, ...]) -> None:
            names = [f"{self.component_prefix}{component}" for component in components]
            everyone = all_ranks(*names, world_size=self.world_size)
            # Training does not wait for the answer: the next call raises what is refused.
            self.register(global_step, checkpoint_participants=everyone, patience=0)

        def save(component: str, state: State, files: Mapping[str, bytes] | None) -> bool:
            return self.save_async(
                component,
                state,
                global_step,
                subdir=subdir,
                attachments=files,
                overlapped=overlapped,
            )

        return self._trainings.run(global_step, training, small, register, save)

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
        wait = CommitWait(self.commits, global_step, self._newest, timeout)
        self._saves.wait_all(timeout)
        return wait.commit()

    async def finish_async(
        self,
        global_step: int | None = None,
        *,
        timeout: float = 1800.0,  # noqa: ASYNC109 - waits for the monitor, not on the loop
    ) -> SaveStatus | None:
        """`finish`, to be awaited: the event loop goes on meanwhile."""
        wait = CommitWait(self.commits, global_step, self._newest, timeout)
        return await in_thread(partial(wait.after_writes, self._saves.wait_all), wait.stop)

    # -- single parts ---------------------------------------------------------------------

    def guard(self, optimizer: torch.optim.Optimizer) -> None:
        """Make every step of ``optimizer`` wait for overlapped copies; once for each optimizer.

        Raises:
            TypeError: not a torch optimizer; of a wrapper, give what is inside.
        """
        self._saves.lifetime.check_process("guard")
        self._saves.guard(optimizer)

    def save_async(
        self,
        name: str,
        save_fn: SaveFunction | PlainFunction | State,
        global_step: int,
        is_state_dict: bool = False,
        *,
        subdir: str = "actor",
        attachments: Mapping[str, bytes] | None = None,
        overlapped: bool | None = None,
        coordinates: Mapping[str, int] | None = None,
        with_checkpoint: bool = False,
    ) -> bool:
        """Save this rank's ``name``; returns when the caller may change its tensors.

        With ``overlapped`` that holds for what no guarded optimizer owns; see the class.

        Args:
            name: the component, ``[a-z0-9_]{1,64}``: model, optim, …
            save_fn: a state (mapping), written as ``<subdir>/<name>_world_size_W_rank_R.pt``; or
                a function that writes for itself into the directory it is given. It runs in the
                background, so what it reads must not change. One that takes no argument writes
                this rank's ``…_world_size_W_rank_R.pt`` into ``global_step_N/<subdir>``, from where
                it is taken.
            global_step: greater than that of the last save of ``name`` and kind. The state dict of
                the same step again, by this coordinator or by another one of this context in this
                process, joins the save that is under way: nothing is copied or written again.
            is_state_dict: weights only, for explorers, instead of a full checkpoint.
            subdir: folder inside ``global_step_N``; empty for ``global_step_N`` itself.
            attachments: small files written beside the shard: path relative to ``subdir`` → bytes.
            overlapped: None: as the coordinator was made. A function is never overlapped.
            coordinates: of this rank in the trainer's parallel dimensions, for the receipt.
            with_checkpoint: of a state dict, whether the step's checkpoint will have its files, too
                (see `register`): it is then kept in memory as well, as what is saved for the
                checkpoint alone.

        Returns:
            False when the save is skipped (see ``when_full`` of the class).

        Raises:
            SaveFailedError, SaveAbortedError: an *earlier* background save failed, or was aborted,
                here or elsewhere; nothing was done now, and the call may be made again.
            MonitorError: the monitor refused an earlier registration.
            UnsupportedStateError, SaveTimeoutError: this one could not be staged, and is aborted.
            StepNotIncreasingError: ``global_step`` goes back.
            UnguardedError: overlapped, and no optimizer is guarded.
            TypeError, ValueError: it is neither a state nor a function, or an empty state.
            ForkedError: this process was forked after the coordinator was made, as all methods say.
            CoordinatorClosedError: the context that made the coordinator is closed.
        """
        is_function = not isinstance(save_fn, Mapping)
        if is_function and overlapped:
            raise ValueError(f"{name}: a function cannot be overlapped; give it a state instead")
        default = self._overlapped and not is_function
        part = self._part(
            name,
            save_fn,
            global_step,
            is_state_dict,
            subdir,
            attachments,
            coordinates,
            with_checkpoint,
        )
        taken = self._saves.start(part, default if overlapped is None else overlapped)
        self._note_begun(part)
        return taken

    def save_sync(
        self,
        name: str | SaveFunction | PlainFunction | None = None,
        save_fn: SaveFunction | PlainFunction | State | int | None = None,
        global_step: int | bool | None = None,
        is_state_dict: bool = False,
        *,
        subdir: str = "actor",
        attachments: Mapping[str, bytes] | None = None,
        coordinates: Mapping[str, int] | None = None,
    ) -> bool:
        """As `save_async`, but returns when the files and the receipt are on disk.

        ``save_fn`` runs in the caller's thread, and so may use collectives: it runs even when the
        save is aborted already, since other ranks may not know that. ``(save_fn, global_step,
        is_state_dict)`` without a name saves the component ``model``.

        Returns:
            False when another rank skipped the save.

        Raises:
            SaveFailedError, SaveAbortedError: this save, or an earlier one in the background.
        """
        name, source, step, is_state_dict = name_first(name, save_fn, global_step, is_state_dict)
        part = self._part(name, source, step, is_state_dict, subdir, attachments, coordinates)
        taken = self._saves.run(part)
        self._note_begun(part)
        return taken

    def wait_staged(self, timeout: float | None = None) -> None:
        """Wait until overlapped copies are done, before changing parameters outside a step.

        Raises:
            SaveTimeoutError: ``timeout`` seconds were not enough; the copies go on.
        """
        self._saves.lifetime.check_process("wait_staged")
        self._saves.wait_staged(timeout)

    def check_open(self, what: str) -> None:
        """Raises `ForkedError`, or `CoordinatorClosedError` after the context was closed."""
        self._saves.lifetime.check_open(what)

    def wait_all(self, timeout: float | None = None) -> None:
        """Wait until every background save of this process is written (not: committed).

        Raises:
            SaveTimeoutError: ``timeout`` seconds were not enough; names the saves.
            SaveFailedError, SaveAbortedError: one failed since the last call, or was aborted.
            MonitorError: the monitor refused an earlier registration.
        """
        self._saves.lifetime.check_process("wait_all")
        self._saves.wait_all(timeout)

    def abandon(self, reason: str, timeout: float) -> list[str]:
        """Report every save of this process that is not written yet as failed, so that it aborts.

        For a process that has to end. Writers are not stopped: what they still write changes
        nothing.

        Args:
            reason: for people; becomes the cause of the abort.
            timeout: seconds to wait for the monitor at most; it finds the failure on the disk.

        Returns:
            What was not written, for people.
        """
        self._saves.lifetime.check_process("abandon")
        return self._saves.abandon(reason, timeout)

    def report_damage(self, step: int, manifest_digest: str, what: str) -> bool:
        """See `trainsync.checkpoint.load.resume.report_damage`."""
        self._saves.lifetime.check_process("report_damage")
        return report_damage(self._monitor, step, manifest_digest, what)

    def report_load(self, report: LoadReport) -> None:
        """See `trainsync.checkpoint.load.resume.report_load`."""
        self._saves.lifetime.check_process("report_load")
        report_load(self._monitor, report)

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
        after = self.commits.times.unregistered
        missing = MissingReport(self._place, kind, step, after)
        return self.commits.commit(kind, step, deadline, stop, missing)

    def watch(self) -> SaveWatch:
        """A watch for a manager that registers saves and asks for their end at its own time.

        This coordinator raises no aborts any more but those of saves that it registers.
        """
        self.commits.ignore_written()
        watch = self._new_watch(self.commits.times, self.commits.known)
        self.watches.add(watch)
        return watch

    def _note(self, *kinds: SaveKind, step: int) -> None:
        """A save of ``step`` begins here, or is registered."""
        if SaveKind.CHECKPOINT in kinds:
            self._newest = step if self._newest is None else max(self._newest, step)

    # -- inside ----------------------------------------------------------------------------

    def _new_watch(self, times: WatchTimes, known: set[tuple[SaveKind, int]] | None) -> SaveWatch:
        if self._kept is None:
            return SaveWatch(self._monitor, known, self._lost_after, times)
        return SaveWatch(self._monitor, known, self._lost_after, times, self._kept.ended)

    def _part(
        self,
        name: str,
        save_fn: SaveFunction | PlainFunction | State,
        step: int,
        is_state_dict: bool,
        subdir: str,
        attachments: Mapping[str, bytes] | None,
        coordinates: Mapping[str, int] | None,
        with_checkpoint: bool = False,
    ) -> SavePart:
        kind = kind_of(is_state_dict)
        source = taking_a_directory(
            save_fn, self._run, step, kind, subdir, self.rank, self.world_size
        )
        small, place = dict(attachments or {}), dict(coordinates or {})
        component = f"{self.component_prefix}{name}" if isinstance(name, str) else name
        part = SavePart(component, source, step, kind, subdir, small, place, name, with_checkpoint)
        refuse_empty(component, save_fn)
        return part

    def _note_begun(self, part: SavePart) -> None:
        self._named.note(part.kind, part.step, part.name)
        self._note(part.kind, step=part.step)


def kind_of(is_state_dict: bool) -> SaveKind:
    """The kind of save that a caller means."""
    return SaveKind.STATE_DICT if is_state_dict else SaveKind.CHECKPOINT
