"""CheckpointCoordinator: the one thing a trainer talks to in order to save."""

import asyncio
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from trainsync.api.protocol import SaveKind, SaveStatus
from trainsync.checkpoint import writer
from trainsync.checkpoint.background import BackgroundWrites
from trainsync.checkpoint.buffers import SaveKey, StagingBuffers
from trainsync.checkpoint.commit import await_commit, register_saves
from trainsync.checkpoint.errors import (
    SaveFailedError,
    SaveTimeoutError,
    StepNotIncreasingError,
)
from trainsync.checkpoint.job import SaveJob, fail_job, tell_receipt, write_job
from trainsync.checkpoint.naming import shard_file_name
from trainsync.checkpoint.staging import stage
from trainsync.checkpoint.stats import CheckpointStats, Counters
from trainsync.monitor.client import MonitorClient
from trainsync.storage.layout import RunDirectory
from trainsync.storage.receipts import FileEntry, Participant

State = Mapping[str, Any]
SaveFunction = Callable[[Path], object]
Write = Callable[[], Sequence[FileEntry]]


class CheckpointCoordinator:
    """Saves this rank's part of checkpoints without stopping training.

    ``save_async`` returns as soon as the bytes are copied; a background thread writes them, and
    the monitor commits the save once every registered participant has written. Saves of the same
    ``name`` are written one after the other. One caller registers the full set of participants::

        coordinator = ctx.coordinator(rank, world_size)
        coordinator.save_async("model", model.state_dict(), step)
        coordinator.save_async("optim", optimizer.state_dict(), step)
        if rank == 0:
            await coordinator.register_and_monitor(
                step, checkpoint_participants=all_ranks("model", "optim", world_size=world_size)
            )

    Args:
        monitor: made for this process's attempt and incarnation.
        directory: the run's directory.
        staging_slots: saves that may be staged at once; one more waits.
        staging_timeout: seconds that it waits at most.
    """

    def __init__(
        self,
        monitor: MonitorClient,
        directory: Path,
        *,
        rank: int = 0,
        world_size: int = 1,
        staging_slots: int = 2,
        staging_timeout: float = 1800.0,
    ) -> None:
        if not 0 <= rank < world_size:
            raise ValueError(f"rank must be in [0, {world_size}), got {rank}")
        self.rank = rank
        self.world_size = world_size
        self._monitor = monitor
        self._run = RunDirectory(directory)
        self._buffers = StagingBuffers(staging_slots)
        self._staging_timeout = staging_timeout
        self._last_step: dict[tuple[str, SaveKind], int] = {}
        self._counters = Counters()
        self._background = BackgroundWrites(lambda: self._counters.add(failures=1))

    @property
    def directory(self) -> Path:
        """The run's directory."""
        return self._run.root

    @property
    def stats(self) -> CheckpointStats:
        """A consistent copy of the counters."""
        return replace(
            self._counters.stats,
            slot_waits=self._buffers.waits,
            slot_wait_seconds=self._buffers.wait_seconds,
        )

    # -- saving -----------------------------------------------------------------------------

    def save_async(
        self,
        name: str,
        save_fn: SaveFunction | State,
        global_step: int,
        is_state_dict: bool = False,
        *,
        subdir: str = "actor",
        attachments: Mapping[str, bytes] | None = None,
    ) -> None:
        """Save this rank's ``name``; returns when the caller may change its tensors.

        Args:
            name: the component, ``[a-z0-9_]{1,64}``: model, optim, …
            save_fn: a state (mapping), written as ``<subdir>/<name>_world_size_W_rank_R.pt``; or
                a function that writes for itself into the directory it is given. It runs in the
                background, so what it reads must not change.
            global_step: greater than that of the last save of ``name`` and kind.
            is_state_dict: weights only, for explorers, instead of a full checkpoint.
            subdir: folder inside ``global_step_N``.
            attachments: small files written beside the shard: path relative to ``subdir`` → bytes.

        Raises:
            SaveFailedError, SaveAbortedError: an *earlier* background save failed; nothing was
                done now.
            UnsupportedStateError, SaveTimeoutError: this one could not be staged, and is aborted.
            StepNotIncreasingError: ``global_step`` goes back.
        """
        started = time.monotonic()
        job, slot, write = self._prepare(
            name, save_fn, global_step, is_state_dict, subdir, attachments or {}
        )
        try:
            self._background.start(
                name,
                f"{name}-step{global_step}",
                lambda: self._write(job, slot, write),
                lambda: self._tell(job),
            )
        except RuntimeError as error:  # the system has no thread left
            self._end(slot)
            self._counters.add(failures=1)
            raise fail_job(job, error) from error
        self._counters.blocked(time.monotonic() - started)

    def save_sync(
        self,
        name: str,
        save_fn: SaveFunction | State,
        global_step: int,
        is_state_dict: bool = False,
        *,
        subdir: str = "actor",
        attachments: Mapping[str, bytes] | None = None,
    ) -> None:
        """As `save_async`, but returns when the files and the receipt are on disk.

        ``save_fn`` runs in the caller's thread, and so may use collectives.

        Raises:
            SaveFailedError, SaveAbortedError: this save, or an earlier one in the background.
        """
        started = time.monotonic()
        job, slot, write = self._prepare(
            name, save_fn, global_step, is_state_dict, subdir, attachments or {}
        )
        try:
            busy = self._background.wait(self._staging_timeout, name)
            if busy:
                self._end(slot)
                late = SaveTimeoutError(
                    f"{job} waited {self._staging_timeout:g} s for {busy[0]} to be written"
                )
                fail_job(job, late)
                raise late
            self._write(job, slot, write)
        except Exception:
            self._counters.add(failures=1)
            raise
        # The monitor may be away; that must not keep the caller.
        label = f"{name}-step{global_step}"
        self._background.start(name, label, lambda: None, lambda: self._tell(job))
        self._counters.blocked(time.monotonic() - started)

    def wait_all(self, timeout: float | None = None) -> None:
        """Wait until every background save of this process is written (not: committed).

        Raises:
            SaveTimeoutError: ``timeout`` seconds were not enough; names the saves.
            SaveFailedError, SaveAbortedError: one failed since the last call.
        """
        busy = self._background.wait(timeout)
        if busy:
            raise SaveTimeoutError(f"after {timeout:g} s still being written: {', '.join(busy)}")
        self._raise_failures()

    # -- registering ------------------------------------------------------------------------

    def register(
        self,
        global_step: int,
        *,
        state_dict_participants: Iterable[tuple[str, int]] = (),
        checkpoint_participants: Iterable[tuple[str, int]] = (),
        reuse_state_dict: bool = False,
    ) -> None:
        """Tell the monitor everyone who writes to this step's saves; one caller, full sets.

        A checkpoint that is registered together with a state dict, or with ``reuse_state_dict``,
        also holds the state dict's files: it commits after it.

        Raises:
            ValueError: no participant is given.
            MonitorError: the monitor refuses, or cannot be reached.
        """
        register_saves(
            self._monitor,
            global_step,
            state_dict_participants,
            checkpoint_participants,
            reuse_state_dict,
        )

    async def register_and_monitor(
        self,
        global_step: int,
        is_state_dict: bool = False,
        *,
        state_dict_participants: Iterable[tuple[str, int]] = (),
        checkpoint_participants: Iterable[tuple[str, int]] = (),
        reuse_state_dict: bool = False,
        timeout: float = 1800.0,  # noqa: ASYNC109 - waits for the monitor, not on the loop
    ) -> SaveStatus:
        """`register` what is given, then wait until the save is committed.

        Waits for the checkpoint, or with ``is_state_dict`` for the state dict. Without
        participants it only waits, for a save that another process registers.

        Raises:
            SaveAbortedError: with the cause.
            SaveTimeoutError: not committed within ``timeout`` seconds.
            MonitorError: the monitor refuses. One that is away is asked again until the timeout.
        """
        deadline = time.monotonic() + timeout
        state_dict, checkpoint = list(state_dict_participants), list(checkpoint_participants)
        if state_dict or checkpoint:
            await asyncio.to_thread(
                self.register,
                global_step,
                state_dict_participants=state_dict,
                checkpoint_participants=checkpoint,
                reuse_state_dict=reuse_state_dict,
            )
        return await await_commit(self._monitor, _kind(is_state_dict), global_step, deadline)

    # -- inside -----------------------------------------------------------------------------

    def _prepare(
        self,
        name: str,
        source: SaveFunction | State,
        step: int,
        is_state_dict: bool,
        subdir: str,
        attachments: Mapping[str, bytes],
    ) -> tuple[SaveJob, int, Write]:
        """Check, wait for staging memory, stage. The slot is the caller's to give back."""
        self._raise_failures()
        kind = _kind(is_state_dict)
        save = self._run.save(self._monitor.attempt, self._monitor.incarnation, kind, step)
        save.receipt(name, self.rank)  # refuses a bad name before anything is done
        job = SaveJob(
            self._monitor, save, kind, step, Participant(name, self.rank), self.world_size
        )
        last = self._last_step.get((name, kind))
        if last is not None and step <= last:
            raise StepNotIncreasingError(
                f"{job}: step must be greater than {last}, which was saved before"
            )
        self._last_step[name, kind] = step
        try:
            slot = self._buffers.acquire(SaveKey(kind.value, step), self._staging_timeout)
        except SaveTimeoutError as error:
            self._counters.add(failures=1)
            fail_job(job, error)
            raise
        try:
            write = self._staged_write(job, slot, source, subdir, dict(attachments))
        except Exception as error:
            self._buffers.release(slot)
            self._counters.add(failures=1)
            fail_job(job, error)
            raise
        self._counters.add(saves=1, in_flight=1)
        return job, slot, write

    def _staged_write(
        self,
        job: SaveJob,
        slot: int,
        source: SaveFunction | State,
        subdir: str,
        attachments: dict[str, bytes],
    ) -> Write:
        files = job.save.files
        name = job.participant.component
        if not isinstance(source, Mapping):
            return lambda: [
                *writer.write_own(job.save, job.participant, subdir, source),
                *writer.write_attachments(files, subdir, attachments),
            ]
        staged = stage(
            source,
            lambda size, pinned: self._buffers.buffer(slot, name, size, pinned=pinned),
        )
        self._counters.add(staged_bytes=staged.bytes)
        path = f"{subdir}/{shard_file_name(name, self.rank, self.world_size)}"
        return lambda: [
            writer.write_state(files, path, staged.state),
            *writer.write_attachments(files, subdir, attachments),
        ]

    def _write(self, job: SaveJob, slot: int, write: Write) -> None:
        try:
            result = write_job(job, write)
        finally:
            self._end(slot)
        self._counters.add(
            written_files=result.files, written_bytes=result.bytes, write_seconds=result.seconds
        )

    def _tell(self, job: SaveJob) -> None:
        if not tell_receipt(job):
            self._counters.add(unreported=1)

    def _end(self, slot: int) -> None:
        self._buffers.release(slot)
        self._counters.add(in_flight=-1)

    def _raise_failures(self) -> None:
        failures = self._background.take_failures()
        if not failures:
            return
        first = failures[0]
        for other in failures[1:]:
            first.add_note(f"also: {other}")
        if isinstance(first, Exception):
            raise first
        raise SaveFailedError(f"a background save was ended by {first!r}") from first


def _kind(is_state_dict: bool) -> SaveKind:
    return SaveKind.STATE_DICT if is_state_dict else SaveKind.CHECKPOINT
