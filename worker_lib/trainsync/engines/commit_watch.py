"""What becomes of saves after they are written, watched by the one rank that registers them."""

import asyncio
import logging
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass, field

from trainsync.checkpoint.coordinator import CheckpointCoordinator
from trainsync.checkpoint.errors import SaveAbortedError, SaveTimeoutError
from trainsync.monitor.errors import (
    MonitorUnavailableError,
    NotReadyError,
    StorageUnavailableError,
)

logger = logging.getLogger(__name__)

_RETRY_SECONDS = 1.0
_AWAY = (MonitorUnavailableError, NotReadyError, StorageUnavailableError)


@dataclass(frozen=True)
class Participants:
    """Everyone who writes to a step's saves, as `CheckpointCoordinator.register` takes them."""

    step: int
    state_dict: tuple[tuple[str, int], ...] = ()
    checkpoint: tuple[tuple[str, int], ...] = ()
    reuse_state_dict: bool = False


@dataclass
class _Watched:
    step: int
    tolerant: bool
    ended: threading.Event = field(default_factory=threading.Event)


class CommitWatch:
    """Registers saves without keeping the caller, and remembers those that did not commit.

    Args:
        timeout: seconds after which a save counts as lost.
    """

    def __init__(self, coordinator: CheckpointCoordinator, timeout: float) -> None:
        self._coordinator = coordinator
        self._timeout = timeout
        self._watched: list[_Watched] = []
        self._failures: list[Exception] = []
        self._lock = threading.Lock()

    def begin(self, participants: Participants, *, tolerant: bool = False) -> None:
        """Register in the background, then wait there for the commit.

        Args:
            tolerant: an abort is logged, not raised.
        """
        self._watched = [save for save in self._watched if not save.ended.is_set()]
        save = _Watched(participants.step, tolerant)
        self._watched.append(save)
        # Not a daemon: a process that ends right after a save has still registered it.
        threading.Thread(
            target=self._register, args=(save, participants), name=f"register-{save.step}"
        ).start()

    def wait(self, timeout: float) -> None:
        """Wait until every save so far has committed or failed.

        Raises:
            SaveTimeoutError: ``timeout`` seconds were not enough.
            SaveAbortedError, MonitorError: see `raise_failure`.
        """
        deadline = time.monotonic() + timeout
        for save in self._watched:
            if not save.ended.wait(max(0.0, deadline - time.monotonic())):
                raise SaveTimeoutError(f"step {save.step} was not committed within {timeout:g} s")
        self.raise_failure()

    def raise_failure(self) -> None:
        """Raise what went wrong since the last call, if anything did; later ones as notes."""
        with self._lock:
            failures, self._failures = self._failures, []
        if failures:
            for other in failures[1:]:
                failures[0].add_note(f"also: {other}")
            raise failures[0]

    def _register(self, save: _Watched, participants: Participants) -> None:
        deadline = time.monotonic() + self._timeout
        registered = False
        try:
            self._submit(participants)
            registered = True
        except _AWAY as error:
            logger.warning("step %d is not registered yet: %s", save.step, error)
        except Exception as error:  # noqa: BLE001 - kept for the caller
            self._end(save, error)
            return
        # From here on a daemon: the outcome is of interest to this process alone.
        threading.Thread(
            target=self._follow,
            args=(save, participants, registered, deadline),
            name=f"commit-{save.step}",
            daemon=True,
        ).start()

    def _follow(
        self, save: _Watched, participants: Participants, registered: bool, deadline: float
    ) -> None:
        try:
            while not registered:
                time.sleep(_RETRY_SECONDS)
                try:
                    self._submit(participants)
                    registered = True
                except _AWAY:
                    if time.monotonic() > deadline:
                        raise
            for is_state_dict in _kinds(participants):
                asyncio.run(
                    self._coordinator.register_and_monitor(
                        save.step, is_state_dict, timeout=max(0.0, deadline - time.monotonic())
                    )
                )
        except Exception as error:  # noqa: BLE001 - kept for the caller
            self._end(save, error)
        else:
            self._end(save, None)

    def _submit(self, participants: Participants) -> None:
        self._coordinator.register(
            participants.step,
            state_dict_participants=participants.state_dict,
            checkpoint_participants=participants.checkpoint,
            reuse_state_dict=participants.reuse_state_dict,
        )

    def _end(self, save: _Watched, error: Exception | None) -> None:
        if error is not None:
            logger.error("step %d: %s", save.step, error)
        if error is not None and not (save.tolerant and isinstance(error, SaveAbortedError)):
            with self._lock:
                self._failures.append(error)
        save.ended.set()


def _kinds(participants: Participants) -> Iterable[bool]:
    """Which saves to wait for, in the order in which they commit: is it the state dict?"""
    if participants.state_dict:
        yield True
    if participants.checkpoint:
        yield False
