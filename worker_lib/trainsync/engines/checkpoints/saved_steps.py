"""The steps that a rank's checkpoint manager has saved, and how they ended."""

import contextlib
import time
from collections.abc import Callable

from trainsync.checkpoint.coordinator import CheckpointCoordinator
from trainsync.checkpoint.errors import SaveTimeoutError
from trainsync.checkpoint.save.watch import SaveWatch


class SavedSteps:
    """The writes of one rank, and on rank 0 the commits.

    Attributes:
        last: the step that was saved last; None before the first one, after a load and after a
            failure, which may have been that step's.
        watch: for the rank that registers saves.

    Args:
        watch: that of all models of the run; the coordinator's own is not looked at.
    """

    def __init__(self, coordinator: CheckpointCoordinator, watch: SaveWatch) -> None:
        self.last: int | None = None
        coordinator.watch()  # aborts are heard from the other one
        self.watch = watch
        self._coordinator = coordinator

    def check(self) -> None:
        """Raise what went wrong since the last call.

        Raises:
            CheckpointError, MonitorError: a save failed.
        """

        def written() -> None:
            # What is still being written may fail yet: then saving meets it, or the next call.
            with contextlib.suppress(SaveTimeoutError):
                self._coordinator.wait_all(0)

        self._raise_first(written, self.watch.raise_failure)

    def wait(self, timeout: float) -> None:
        """Wait until what this rank saved is written and, on rank 0, committed.

        Raises:
            SaveTimeoutError: ``timeout`` seconds were not enough.
            CheckpointError, MonitorError: a save failed.
        """
        deadline = time.monotonic() + timeout
        self._raise_first(
            lambda: self._coordinator.wait_all(timeout),
            lambda: self.watch.wait(max(0.0, deadline - time.monotonic())),
        )

    def _raise_first(self, *checks: Callable[[], None]) -> None:
        """Run every check; the first error has the others as its notes: they have one cause mostly.

        Not waited for long enough is no failure.
        """
        failures = []
        for check in checks:
            try:
                check()
            except Exception as error:  # noqa: BLE001 - raised below
                failures.append(error)
        if not failures:
            return
        for other in failures[1:]:
            failures[0].add_note(f"also: {other}")
        if not isinstance(failures[0], SaveTimeoutError):
            self.last = None  # it may be the one that is not saved after all
        raise failures[0]
