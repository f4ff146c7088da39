"""One commit for everything that a process saves at a step: its models, and the trainer's state."""

import logging
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from trainsync.checkpoint.save.registration import Participants
from trainsync.checkpoint.save.watch import SaveWatch
from trainsync.engines.checkpoints.saved_steps import SavedSteps
from trainsync.storage.layout import RunDirectory
from trainsync.storage.permissions import open_step

logger = logging.getLogger(__name__)


class StepCommits:
    """Collects the participants of a step, and registers them once all its models are saved.

    The models of a run (actor, critic) are saved one after the other, and the monitor wants the
    full set of participants at once. Every rank has one, shared by the managers of its models and
    told of the same saves; rank 0 registers.

    Args:
        where: the run's directory, or the URL of its store.
        watch: registers saves, and remembers those that did not commit.
        rank: of this process.
    """

    def __init__(self, where: Path | str, watch: SaveWatch, rank: int) -> None:
        self.watch = watch
        self._run = None if isinstance(where, str) else RunDirectory(where)
        self._rank = rank
        self._saved: dict[str, SavedSteps] = {}
        self._step: int | None = None  # the one that is being collected
        self._parts: dict[str, Participants] = {}
        self._tolerant = False
        self.registered: int | None = None
        """The step that was registered last; on ranks other than 0 that rank 0 has registered."""

    def join(self, model: str, saved: SavedSteps) -> None:
        """Each step is to hold that model too; one of the same name gives way."""
        self._saved[model] = saved

    def add(self, model: str, participants: Participants, *, tolerant: bool, held: bool) -> None:
        """The model is saved at the step; registers the step when it was the last one to be.

        Args:
            tolerant: an abort is logged, not raised.
            held: more will follow even after all models: see `finish`.

        Raises:
            OSError, UnsafePathError: the step's directory cannot be made.
        """
        if self._step not in (None, participants.step):
            logger.warning(
                "step %d is not committed: it was saved without %s",
                self._step,
                ", ".join(sorted(self._saved.keys() - self._parts.keys())) or "the trainer's state",
            )
            self._parts, self._tolerant = {}, False
        self._step = participants.step
        self._parts[model] = participants
        self._tolerant |= tolerant
        if held:
            return
        if self._rank == 0 and self._run is not None:
            open_step(self._run, participants.step)
        if self._saved.keys() <= self._parts.keys():
            self._register()

    def finish(self, step: int, also: Sequence[tuple[str, int]] = ()) -> None:
        """Register a step whose models were ``held``, with participants that are no model's.

        Nothing is left to do for a step that was registered before.

        Raises:
            ValueError: no model was saved at the step.
        """
        if step == self.registered:
            return
        if step != self._step:
            raise ValueError(f"step {step} is to be committed, but no model was saved at it")
        self._parts[""] = Participants(step, checkpoint=tuple(also))
        self._register()

    def wait(self, timeout: float) -> None:
        """Wait until what this rank saved of all models is written and, on rank 0, committed.

        Raises:
            SaveTimeoutError: ``timeout`` seconds were not enough.
            CheckpointError, MonitorError: a save failed.
        """
        for saved in self._saved.values():
            saved.wait(timeout)

    def _register(self) -> None:
        parts, tolerant = list(self._parts.values()), self._tolerant
        whole = parts[0]
        for part in parts[1:]:
            whole = replace(
                whole,
                state_dict=whole.state_dict + part.state_dict,
                checkpoint=whole.checkpoint + part.checkpoint,
                reuse_state_dict=whole.reuse_state_dict or part.reuse_state_dict,
            )
        self.registered, self._step = whole.step, None
        self._parts, self._tolerant = {}, False
        if self._rank == 0:
            self.watch.register(whole, tolerant=tolerant)
