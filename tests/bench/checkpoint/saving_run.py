"""Child of `bench_training_throughput`: the whole tiny example, with saves in every second block.

``python -m tests.bench.checkpoint.saving_run DIRECTORY HISTORY BLOCK STEPS`` runs
``tiny_grpo.train`` with a save after every step of one block and no save in the next, in turn, so
that both kinds of steps run under the same conditions. The first block has no saves.
"""

import sys
from pathlib import Path
from typing import Any, cast

import ray
from tiny_grpo.config import Config
from tiny_grpo.driver import train
from tiny_grpo.explorers import ExplorerGroup
from tiny_grpo.history import History
from tiny_grpo.probes import Probes
from tiny_grpo.ray_trainers import RankPlaces, RayTrainers
from trainsync import RunContext


class SavesInTurn:
    """A context whose ``checkpoint.interval`` is 1 in every second block of steps."""

    def __init__(self, ctx: RunContext, block: int) -> None:
        self._ctx = ctx
        self._block = block

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ctx, name)

    def should_checkpoint(self, step: int, last: int | None = None) -> bool:
        """See `saved_in`; the example also saves its last step."""
        return saved_in(step, self._block) or step == last


def saved_in(step: int, block: int) -> bool:
    """Whether a step, counted from 1, is saved."""
    return (step - 1) // block % 2 == 1


def main() -> None:
    """Train to the end."""
    directory, history, block, steps = Path(sys.argv[1]), Path(sys.argv[2]), *map(int, sys.argv[3:])
    config = Config(steps=steps)
    with RunContext.from_env(directory) as ctx:
        ray.init(address="local", include_dashboard=False, log_to_driver=False)
        ctx.synchronizer()
        explorers = ExplorerGroup(ctx, config)
        trainers = RayTrainers(ctx, config, None, RankPlaces())
        explorers.wait_ready()
        in_turn = cast(RunContext, SavesInTurn(ctx, block))
        train(in_turn, config, trainers, explorers, History(history), Probes())


if __name__ == "__main__":
    main()
