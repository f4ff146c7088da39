"""Describes a run and its attempt without asking the monitor."""

from pathlib import Path

from trainsync.runtime.errors import JoinError
from trainsync.runtime.servers import InferenceServers
from trainsync.runtime.settings import CheckpointSettings, RunSettings, SyncSettings


def is_due(step: int, interval: int, last: int | None = None) -> bool:
    """Whether ``step`` (from 1) is a multiple of ``interval``, or is the ``last`` one."""
    if interval < 1:
        raise ValueError(f"interval must be at least 1, got {interval}")
    return step > 0 and (step % interval == 0 or step == last)


class RunDescription:
    """The run and the attempt. Has no connection and no thread.

    Raises:
        JoinError: ``settings`` lack the attempt or the incarnation.
    """

    def __init__(self, settings: RunSettings) -> None:
        if settings.attempt is None or settings.incarnation is None:
            raise JoinError("a RunContext needs an attempt and an incarnation; use from_env()")
        self._settings = settings
        self._attempt = settings.attempt
        self._incarnation = settings.incarnation

    @property
    def run(self) -> str:
        """Name of the TrainingRun; of the directory, for a local run."""
        return self._settings.run

    @property
    def uid(self) -> str:
        """UID of the TrainingRun; ``local`` for a local run."""
        return self._settings.uid

    @property
    def attempt(self) -> int:
        """Number of this attempt, from 0."""
        return self._attempt

    @property
    def incarnation(self) -> str:
        """Random name of the process that claimed the attempt, shared by those it started."""
        return self._incarnation

    @property
    def directory(self) -> Path:
        """The run's directory.

        Raises:
            JoinError: its checkpoints are in a store.
        """
        if self._settings.store is not None:
            raise JoinError(
                f"the run's checkpoints are in {self._settings.store}, and it has no directory"
            )
        return self._settings.directory

    @property
    def checkpoint(self) -> CheckpointSettings:
        """Settings of saving: how often, and how carefully."""
        return self._settings.checkpoint

    @property
    def sync(self) -> SyncSettings:
        """Settings of the weights: how, and how often, explorers get new ones."""
        return self._settings.sync

    def servers(self) -> list[InferenceServers]:
        """The run's inference servers, in the order of ``spec.servers``; none when it has none.

        Of a local run, those that ``TRAINSYNC_SERVER_URLS`` names. Entries that are added later are
        known to the Ray pods that are made after that.
        """
        return list(self._settings.servers)

    @property
    def warm_spare(self) -> bool:
        """Whether a driver that restarts trainers in place is asked to keep a process beside each
        that has loaded what a trainer loads: ``spec.failurePolicy.warmSpare``, or of a local run
        ``TRAINSYNC_WARM_SPARE``."""
        return self._settings.warm_spare

    @property
    def pod_replacement_seconds(self) -> int:
        """For so long a driver that restarts trainers in place may wait for a pod in place of one
        that is lost: ``spec.failurePolicy.podReplacementSeconds``, or of a local run
        ``TRAINSYNC_POD_REPLACEMENT_SECONDS``. After that the attempt ends; with 0 at once."""
        return self._settings.pod_replacement_seconds

    @property
    def is_local(self) -> bool:
        """Whether the monitor of this run lives in the process that claimed the attempt."""
        return self._settings.is_local

    @property
    def ray_namespace(self) -> str:
        """Ray namespace of this attempt's actors.

        It carries the attempt: actors of an older one that are still dying are never found.
        """
        return self._settings.ray_namespace

    def env(self) -> dict[str, str]:
        """Variables with which a process started by this one joins, such as for ``runtime_env``."""
        return self._settings.environment()

    def should_checkpoint(self, step: int, last: int | None = None) -> bool:
        """Whether to save after ``step``: every ``checkpoint.interval``, and after the ``last``."""
        return is_due(step, self.checkpoint.interval, last)

    def should_sync(self, step: int, last: int | None = None) -> bool:
        """Whether to send weights after ``step``: every ``sync.interval``, and the ``last``."""
        return is_due(step, self.sync.interval, last)
