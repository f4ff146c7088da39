"""CheckpointCoordinator: the one object that a trainer saves with."""

from collections.abc import Mapping
from pathlib import Path

import torch

from trainsync.api.protocol import SaveKind
from trainsync.api.spec import SAVE_DEADLINE_SECONDS, SyncMethod
from trainsync.checkpoint.load.resume import report_damage
from trainsync.checkpoint.reference_calls import PlainFunction, name_first, taking_a_directory
from trainsync.checkpoint.save.part import (
    Part,
    SaveFunction,
    SavingOptions,
    State,
    WhenFull,
    refuse_empty,
)
from trainsync.checkpoint.save.permits import WritePermits
from trainsync.checkpoint.save.pipeline import SavePipeline
from trainsync.checkpoint.save.stats import CheckpointStats
from trainsync.checkpoint.training_saves import TrainingSaves, kind_of
from trainsync.monitor.client.base import MonitorClient
from trainsync.storage.layout import RunDirectory


class CheckpointCoordinator(TrainingSaves):
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
    before ``save_async`` returns. A step is what holds parameters back. Whatever else changes them
    (``load_state_dict``, edits under ``no_grad``) must call `wait_staged` first; an edit that torch
    counts as one in place fails the save, and one through ``.data`` is not noticed.

    Methods are called from one thread.

    Args:
        monitor: made for this process's attempt and incarnation.
        directory: the run's directory; None: that of a `CheckpointMonitor`.
        staging_slots: saves that may be staged at once.
        staging_timeout: seconds that one more waits at most.
        when_full: whether one more waits, or is skipped. A save that any rank skips is aborted for
            all: `save_async` returns False, `stats` counts it, and only a wait for its commit
            raises. `save_sync` always waits.
        overlapped: default of `save_async`.
        copy_timeout: seconds that a step waits at most for overlapped copies; then the save fails
            and the step goes on.
        component_prefix: put before every ``name`` that is saved, for a second model of the run:
            its components are told apart, and its files keep their names in a folder of their own.
        permits: held while the background writes; None: all may write at once.
        save_timeout: seconds after which the monitor aborts a save that is not complete.
        sync_method: how explorers of the run get weights, for those that save for them; None: by
            what the saver does besides.
    """

    def __init__(
        self,
        monitor: MonitorClient,
        directory: str | Path | None = None,
        *,
        rank: int = 0,
        world_size: int = 1,
        staging_slots: int = 2,
        staging_timeout: float = 1800.0,
        when_full: WhenFull = "wait",
        overlapped: bool = False,
        copy_timeout: float = 300.0,
        component_prefix: str = "",
        permits: WritePermits | None = None,
        save_timeout: float = SAVE_DEADLINE_SECONDS,
        sync_method: SyncMethod | None = None,
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
        self.sync_method = sync_method
        self._overlapped = overlapped
        options = SavingOptions(
            staging_slots=staging_slots,
            staging_timeout=staging_timeout,
            when_full=when_full,
            copy_timeout=copy_timeout,
            permits=permits,
        )
        run = RunDirectory(Path(directory))
        super().__init__(monitor, run, rank, world_size, component_prefix, save_timeout, options)

    def tolerate(self, kind: SaveKind) -> None:
        """The caller goes on without saves of this kind that fail, and hears of them elsewhere.

        From now on `save_async` raises what fails before it returns; what fails later is logged and
        counted. Of saves that this process registers aborts are raised as before.
        """
        self._saves.tolerated |= {kind}

    @property
    def directory(self) -> Path:
        """The run's directory."""
        return self._run.root

    @property
    def stats(self) -> CheckpointStats:
        """A consistent copy of the counters."""
        return self._saves.stats

    @property
    def saves(self) -> SavePipeline:
        """The saves that go on in the background, for the context that ends them in order."""
        return self._saves

    # -- saving -----------------------------------------------------------------------------

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
            name, save_fn, global_step, is_state_dict, subdir, attachments, coordinates
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

    def _part(
        self,
        name: str,
        save_fn: SaveFunction | PlainFunction | State,
        step: int,
        is_state_dict: bool,
        subdir: str,
        attachments: Mapping[str, bytes] | None,
        coordinates: Mapping[str, int] | None,
    ) -> Part:
        kind = kind_of(is_state_dict)
        source = taking_a_directory(
            save_fn, self._run, step, kind, subdir, self.rank, self.world_size
        )
        small, place = dict(attachments or {}), dict(coordinates or {})
        component = f"{self.component_prefix}{name}" if isinstance(name, str) else name
        part = Part(component, source, step, kind, subdir, small, place, name)
        refuse_empty(component, save_fn)
        return part

    def _note_begun(self, part: Part) -> None:
        self._named.note(part.kind, part.step, part.name)
        self._note(part.kind, step=part.step)
