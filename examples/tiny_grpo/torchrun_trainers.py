"""Trainer ranks under torchrun: rank 0 drives, the others follow."""

from datetime import timedelta
from typing import Any

import torch.distributed as dist

from tiny_grpo.trainer import TrainerRank
from tiny_grpo.trainers import CALL_TIMEOUT

_Command = tuple[str, tuple[object, ...]]


class TorchrunTrainers:
    """The trainer group, made on every rank with that rank's trainer."""

    def __init__(self, trainer: TrainerRank) -> None:
        self._trainer = trainer
        # Between two commands the other ranks wait while rank 0 is busy with the explorers. A
        # separate group keeps the deadline of training's collectives short.
        self._group: Any = dist.new_group(
            backend="gloo", timeout=timedelta(seconds=2 * CALL_TIMEOUT)
        )

    def call(self, method: str, *arguments: object) -> list[Any]:
        """See `Trainers`; on rank 0 only."""
        dist.broadcast_object_list([(method, arguments)], src=0, group=self._group)
        return self._run((method, arguments))

    def check(self) -> None:
        """See `Trainers`: torchrun ends this process when another rank dies."""

    def follow(self) -> None:
        """Run rank 0's calls until `dismiss`; on the other ranks only."""
        while True:
            received: list[_Command | None] = [None]
            dist.broadcast_object_list(received, src=0, group=self._group)
            command = received[0]
            if command is None:
                return
            self._run(command)

    def dismiss(self) -> None:
        """Let the other ranks return from `follow`; on rank 0 only."""
        dist.broadcast_object_list([None], src=0, group=self._group)

    def _run(self, command: _Command) -> list[Any]:
        method, arguments = command
        result = getattr(self._trainer, method)(*arguments)
        results: list[Any] = [None] * dist.get_world_size(self._group)
        dist.gather_object(
            result, results if dist.get_rank() == 0 else None, dst=0, group=self._group
        )
        return results
