"""CheckpointCoordinator: the one thing a trainer talks to in order to save."""

import time
import weakref
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Final

import torch

from trainsync.api.protocol import SaveKind, SaveStatus
from trainsync.api.spec import SAVE_DEADLINE_SECONDS, SyncMethod
from trainsync.checkpoint.errors import SaveAbortedError
from trainsync.checkpoint.load.resume import report_damage
from trainsync.checkpoint.reference_calls import (
    PlainFunction,
    SavedNames,
    name_first,
    taking_a_directory,
)
from trainsync.checkpoint.save.commit_watch import LATER_SECONDS, CommitWatch
from trainsync.checkpoint.save.lack import Lack
from trainsync.checkpoint.save.outcome_watch import OutcomeWatch
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
from trainsync.checkpoint.save.registration import Participants, await_commit, register_before
from trainsync.checkpoint.save.stats import CheckpointStats
from trainsync.checkpoint.training_saves import TrainingSaves
from trainsync.monitor.client.base import MonitorClient
from trainsync.storage.layout import RunDirectory

_ANSWER_SECONDS: Final = 2.0
"""How long `register` waits for the monitor's answer, which mostly takes milliseconds."""


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
        when_full: what becomes of one more: it waits, or is skipped. A save that any rank skips
            is aborted for all; `save_async` returns False, `stats` counts it, and nothing is
            raised but to who awaits its commit. `save_sync` always waits.
        overlapped: default of `save_async`.
        copy_timeout: seconds that a step waits at most for overlapped copies; then the save fails
            and the step goes on.
        component_prefix: put before every ``name`` that is saved, for a second model of the run:
            its components are told apart, and its files keep their names in a folder of their own.
        permits: held while the background writes; None: everybody may write.
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
        self.rank = rank
        self.world_size = world_size
        self.sync_method = sync_method
        self.component_prefix = component_prefix
        self._monitor = monitor
        if directory is None:
            directory = getattr(monitor, "directory", None)
        if directory is None:
            raise TypeError(
                f"a {type(monitor).__name__} knows no directory; expected "
                "CheckpointCoordinator(monitor, directory)"
            )
        self._run = RunDirectory(Path(directory))
        self._overlapped = overlapped
        super().__init__()
        self._lost_after = save_timeout + LATER_SECONDS
        self._named = SavedNames(world_size)
        self._registers = False
        self.commits = CommitWatch(monitor, self._known_failures, self._lost_after)
        """The saves that this process registered, and aborts of those that it took part in."""
        self.watches: weakref.WeakSet[CommitWatch] = weakref.WeakSet({self.commits})
        self._outcomes = OutcomeWatch(self.commits.heard, self._lost_after)
        self._saves = SavePipeline(
            monitor,
            self._run,
            rank,
            world_size,
            SavingOptions(
                staging_slots=staging_slots,
                staging_timeout=staging_timeout,
                when_full=when_full,
                copy_timeout=copy_timeout,
                permits=permits,
            ),
            self._known_failures,
            self.commits.raise_failure,
            self._outcomes,
        )

    def watch(self) -> CommitWatch:
        """For a manager that registers saves itself and asks for their end when it suits all ranks.

        This coordinator raises no aborts any more but those of saves that it registers.
        """
        self._outcomes.end()
        watch = CommitWatch(self._monitor, self._known_failures, self._lost_after)
        self.watches.add(watch)
        return watch

    def tolerate(self, kind: SaveKind) -> None:
        """Somebody else hears what becomes of saves of this kind, and does without those that fail.

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
        """What goes on behind the caller, for the context that ends it in order."""
        return self._saves

    # -- saving -----------------------------------------------------------------------------

    def guard(self, optimizer: torch.optim.Optimizer) -> None:
        """Make every step of ``optimizer`` wait for overlapped copies; once for each optimizer.

        Raises:
            TypeError: not a torch optimizer; of a wrapper, give what is inside.
        """
        self._saves.check_process("guard")
        self._saves.guards.add(optimizer)

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
        self._saves.check_process("wait_staged")
        self._saves.wait_staged(timeout)

    def check_open(self, what: str) -> None:
        """Raises `ForkedError`, or `CoordinatorClosedError` after the context was closed."""
        self._saves.check_open(what)

    def wait_all(self, timeout: float | None = None) -> None:
        """Wait until every background save of this process is written (not: committed).

        Raises:
            SaveTimeoutError: ``timeout`` seconds were not enough; names the saves.
            SaveFailedError, SaveAbortedError: one failed since the last call, or was aborted.
            MonitorError: the monitor refused an earlier registration.
        """
        self._saves.check_process("wait_all")
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
        self._saves.check_process("abandon")
        return self._saves.abandon(reason, timeout)

    def report_damage(self, step: int, manifest_digest: str, what: str) -> bool:
        """See `trainsync.checkpoint.load.resume.report_damage`."""
        self._saves.check_process("report_damage")
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
        kind = _kind(is_state_dict)
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
        """Tell the monitor everyone who writes to this step's saves; one caller, full sets.

        A monitor that is away does not hold up training: after ``patience`` seconds (at once, when
        it has not answered an earlier call either) it is told in the background. What becomes of
        the saves is watched there, too: the next ``register``, ``save_*`` or ``wait_all`` raises
        the abort of one, whoever aborted it.

        A checkpoint that is registered together with a state dict, or with ``reuse_state_dict``,
        also holds the state dict's files: it commits after it.

        Args:
            patience: seconds to wait for the monitor's answer, which takes a few writes to the
                volume. With 0 training does not wait at all, and the next call raises what it
                refuses. Whoever closes the context before it has answered leaves the saves
                unregistered, and they will not commit.

        Raises:
            ValueError: no participant is given, or ``patience`` is negative.
            MonitorError: the monitor refuses this, or refused an earlier registration.
            SaveFailedError, SaveAbortedError: an *earlier* save failed; nothing was done now.
        """
        self._saves.check_open("register")
        if patience < 0:
            raise ValueError(f"patience must not be negative, got {patience}")
        participants = Participants(
            global_step,
            tuple(state_dict_participants),
            tuple(checkpoint_participants),
            reuse_state_dict,
        )
        self._saves.raise_failures()
        self._registers = True
        self._note(*participants.kinds, step=participants.step)
        self.commits.begin(participants, patience=patience)

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
            state_dict_thread_count: the reference's way to say who saves, in place of
                ``state_dict_participants``: how many saves of how many ranks there are in all; see
                `SavedNames`. So with ``checkpoint_thread_count``.

        Raises:
            ValueError: participants and counts are given, or the counts do not say who saves.
            NotRegisteredError: after 10 s nobody has registered the save and no part of it is
                being written, though this coordinator registers saves.
            SaveAbortedError: with the cause; `SaveSkippedError` when a rank skipped it.
            SaveTimeoutError: not committed within ``timeout`` seconds.
            MonitorError: the monitor refuses, or refused the `register` of this step. One that is
                away is asked again until the timeout.
        """
        self._saves.check_open("register_and_monitor")
        deadline = time.monotonic() + timeout
        state_dict, checkpoint = tuple(state_dict_participants), tuple(checkpoint_participants)
        if state_dict_thread_count or checkpoint_thread_count:
            if state_dict or checkpoint:
                raise ValueError("there are participants and thread counts; expected one of them")
            counts = state_dict_thread_count, checkpoint_thread_count
            state_dict, checkpoint = self._named.participants(global_step, *counts)
        if state_dict or checkpoint:
            participants = Participants(global_step, state_dict, checkpoint, reuse_state_dict)
            self._registers = True
            self._note(*participants.kinds, step=participants.step)
            await register_before(self._monitor, participants, deadline)
        kind = _kind(is_state_dict)
        lack = Lack(
            self._run,
            self._monitor,
            kind,
            global_step,
            lambda: self._registers and not self.commits.is_pending(global_step),
        )
        try:
            return await await_commit(
                self._monitor,
                kind,
                global_step,
                deadline,
                lambda: self.commits.raise_refusal(global_step),
                lack,
            )
        except SaveAbortedError:
            self._known_failures.add((kind, global_step))
            raise


def _kind(is_state_dict: bool) -> SaveKind:
    return SaveKind.STATE_DICT if is_state_dict else SaveKind.CHECKPOINT
