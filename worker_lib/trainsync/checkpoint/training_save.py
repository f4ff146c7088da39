"""`CheckpointCoordinator.save`: a training is saved as components of one checkpoint."""

from collections.abc import Callable, Mapping
from typing import Any

from trainsync.checkpoint.save.part import refuse_empty
from trainsync.checkpoint.training_state import MODEL, Training

SaveComponent = Callable[[str, Mapping[str, Any], Mapping[str, bytes] | None], bool]
"""Saves a component of this name and state, with small files; False when the save is skipped."""


class TrainingSave:
    """Saves one rank's part of a training, step after step.

    A call that raised because an earlier save had failed may be made again: it goes on with the
    components that it had not begun.

    Args:
        rank: rank 0 registers the save, and its model has the small files.
    """

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._begun: tuple[int, set[str]] = (-1, set())  # step and components of the last call

    def run(
        self,
        step: int,
        training: Training,
        attachments: Mapping[str, bytes],
        register: Callable[[tuple[str, ...]], None],
        save: SaveComponent,
    ) -> bool:
        """Register the components, and save each.

        Args:
            register: tells the monitor the components of the save.

        Returns:
            False when the save is skipped.

        Raises:
            What ``register`` and ``save`` raise.
            ValueError: the state of a component is empty.
        """
        states = {component: training.state(component) for component in training.components()}
        for component, state in states.items():
            refuse_empty(component, state)  # before the save is registered
        if self._rank == 0:
            register(tuple(states))
        if self._begun[0] != step:
            self._begun = (step, set())
        for component, state in states.items():
            if component in self._begun[1]:
                continue  # the call that began it raised what an earlier save had failed with
            small = attachments if (component, self._rank) == (MODEL, 0) else None
            if not save(component, state, small):
                return False  # with one part skipped the whole save is aborted
            self._begun[1].add(component)
        self._begun = (-1, set())
        return True
