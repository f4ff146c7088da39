"""``python -m tests.distributed.killed_ranks``: `tiny_grpo.train`, with ranks that are killed.

Each file in ``kills`` beside the run's directory (in ``KILLED_RANKS``, of a run in a bucket) is a
kill, ``<phase>-<step>.<rank>``: that rank removes the file and sends itself SIGKILL when it comes
to the phase at that step, or later. Beside it, ``times`` gets a line for each kill, start and step,
and for each rank that was a spare process (``spare``): what, step, seconds since the epoch.

Phases: ``step`` (amid the computation), ``publish``, ``load`` (of the checkpoint, after a restart),
``finish``, and the points of a save, also into a bucket, and of keeping in memory
(`trainsync.failpoints`).
"""

import os
import signal
import threading
import time
from pathlib import Path
from typing import Any, Final
from unittest import mock

import tiny_grpo.ray_trainers
import tiny_grpo.train
from tiny_grpo.config import Config
from tiny_grpo.history import History, Started, Step
from tiny_grpo.ray_trainers import _RankActor
from trainsync import Resume, RunContext, failpoints
from trainsync.runtime.attempt import restarts

CALLS: Final = ("step", "publish", "finish")
MID_STEP: Final = 0.03  # seconds after the begin of a step that takes ten times as long


def note(directory: Path, what: str, step: int) -> None:
    with (directory / "times").open("a") as file:
        file.write(f"{what} {step} {time.time()}\n")


class KilledRank(_RankActor):
    """A rank that is killed as the plan says."""

    _was_spare = False

    def warm(self, config: Config) -> None:
        super().warm(config)
        self._was_spare = True

    def start(
        self, ctx: RunContext, config: Config, resume: Resume | None, endpoint: tuple[str, int]
    ) -> None:
        self._beside = Path(os.environ.get("KILLED_RANKS") or ctx.directory.parent)
        self._step = 0 if resume is None else resume.step
        if self._was_spare:
            note(self._beside, "spare", self._step)
        if resume is not None:
            self._replace_load()
        for area in (failpoints.SAVE, failpoints.MEMORY, failpoints.LIVE):
            failpoints.enable(area, self._die)
        super().start(ctx, config, resume, endpoint)

    def call(self, method: str, *arguments: object) -> Any:
        if method == "step":
            self._step += 1
            if self._taken("step"):
                threading.Timer(MID_STEP, self._kill, ["step"]).start()
        elif method in CALLS:
            self._die(method)
        return super().call(method, *arguments)

    def _replace_load(self) -> None:
        import tiny_grpo.trainer

        load = tiny_grpo.trainer.load_sharded

        def dying(*arguments: Any, **named: Any) -> Any:
            self._die("load")
            return load(*arguments, **named)

        mock.patch.object(tiny_grpo.trainer, "load_sharded", dying).start()

    def _die(self, phase: str) -> None:
        if self._taken(phase):
            self._kill(phase)

    def _taken(self, phase: str) -> bool:
        for path in (self._beside / "kills").glob(f"{phase}-*.{self._rank}"):
            if self._step >= int(path.stem.rpartition("-")[2]):
                path.unlink()
                return True
        return False

    def _kill(self, phase: str) -> None:
        note(self._beside, f"kill-{phase}", self._step)
        os.kill(os.getpid(), signal.SIGKILL)


class TimedHistory(History):
    """Notes the times, too."""

    def add(self, record: Started | Step) -> None:
        super().add(record)
        assert self._path is not None
        note(self._path.parent, type(record).__name__, record.step)


def main() -> None:
    """Train without pauses between restarts."""
    with (
        mock.patch.object(tiny_grpo.ray_trainers, "_RankActor", KilledRank),
        mock.patch.object(tiny_grpo.train, "History", TimedHistory),
        mock.patch.object(restarts, "_PAUSES", (0.0,)),
    ):
        tiny_grpo.train.main()


if __name__ == "__main__":
    main()
