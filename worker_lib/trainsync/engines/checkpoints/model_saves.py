"""The head of a save that every checkpoint manager shares: check, plan, agree, stage, register."""

from collections.abc import Callable
from functools import partial
from typing import Generic, NamedTuple, TypeVar

from trainsync.checkpoint.coordinator import CheckpointCoordinator
from trainsync.engines.agree import on_all_ranks
from trainsync.engines.checkpoints.arguments import SaveTarget, model_of, model_place
from trainsync.engines.checkpoints.save_plan import SavePlan
from trainsync.engines.checkpoints.saved_steps import SavedSteps
from trainsync.engines.checkpoints.step_commits import StepCommits

ValueT = TypeVar("ValueT")


class StagedSave(NamedTuple, Generic[ValueT]):
    """A save that every rank has staged: its plan, and what each rank's ``stage`` returned."""

    plan: SavePlan
    answers: list[ValueT]


class ModelSaves:
    """The saves of one model of the run (actor, critic), as its checkpoint manager makes them.

    Attributes:
        model: folder of the model in a step, such as "actor".
        steps: the steps that this rank has saved.
        commits: registers each step.

    Args:
        commits: shared by the managers of all models that are committed together; None: this model
            is the only one.
    """

    def __init__(
        self, coordinator: CheckpointCoordinator, commits: StepCommits | None = None
    ) -> None:
        self.model = model_of(coordinator.component_prefix)
        self.commits = commits or StepCommits(
            coordinator.where, coordinator.watch(), coordinator.rank
        )
        self.steps = SavedSteps(coordinator, self.commits.watch)
        self.commits.join(self.model, self.steps)
        self._coordinator = coordinator

    def place(self, local_path: str, step: int) -> SaveTarget:
        """See `model_place`."""
        return model_place(local_path, self._coordinator.where, step, self.model)

    def stage(
        self,
        local_path: str,
        step: int,
        choose: Callable[[SaveTarget], SavePlan],
        stage: Callable[[SavePlan], ValueT],
    ) -> StagedSave[ValueT] | None:
        """Stage a checkpoint by rank 0's plan; None when the step was saved before.

        All ranks call it together, and go on together: with one that fails, all fail.

        Args:
            local_path: where verl wants the checkpoint; see `place`.
            choose: gives this rank's plan.
            stage: stages this rank's part; returns plain data.

        Raises:
            ValueError: ``local_path`` is not this model's place of the step.
            PeerFailedError: another rank failed.
            CheckpointError, MonitorError: this rank, or an earlier save.
        """
        doing = f"saving step {step}"
        plan = on_all_ranks(partial(self._plan, local_path, step, choose), doing)[0]
        if plan is None:
            return None
        return StagedSave(plan, on_all_ranks(partial(stage, plan), doing))

    def register(self, plan: SavePlan, step: int, *, tolerant: bool) -> None:
        """Register the staged step, once all models of the run are staged.

        Args:
            tolerant: an abort is logged, not raised.
        """
        coordinator = self._coordinator
        participants = plan.participants(step, coordinator.world_size, coordinator.component_prefix)
        self.commits.add(self.model, participants, tolerant=tolerant, held=plan.held)

    def _plan(
        self, local_path: str, step: int, choose: Callable[[SaveTarget], SavePlan]
    ) -> SavePlan | None:
        self.steps.check()
        place = self.place(local_path, step)
        return None if step == self.steps.last else choose(place)
