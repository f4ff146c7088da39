"""A process of a run with a frozen half that is killed: ``incremental_job URL
POINT [resumes]``.

It keeps one checkpoint, commits steps 1 and 2, and kills itself with SIGKILL when step 3, or what
comes after it, comes to the point. With ``resumes`` it resumes, and the next step, its first one,
may come to the point.
"""

import os
import signal
import sys

import torch
from trainsync import RunContext, all_ranks, failpoints
from trainsync.checkpoint.coordinator import CheckpointCoordinator

MODEL = "actor/model_world_size_1_rank_0.pt"
REFERENCE = "actor/reference_world_size_1_rank_0.pt"


def states(step: int) -> dict[str, dict[str, torch.Tensor]]:
    """A model of which the first 4 MiB do not change, and the last 2 do; and one of 2 MiB that does
    not."""
    values = torch.arange(float(1 << 19))
    model = {"frozen": torch.cat([values, -values]), "w": values + step}
    return {"model": model, "reference": {"w": values}}


def save(saving: CheckpointCoordinator, step: int) -> None:
    """A checkpoint of both."""
    everyone = all_ranks("model", "reference", world_size=1)
    saving.register(step, checkpoint_participants=everyone)
    for name, state in states(step).items():
        saving.save_async(name, state, step)
    saving.finish(step, timeout=60)


def main() -> None:
    """See the module."""
    url = sys.argv[1]
    area, _, wanted = sys.argv[2].partition(".")

    def die(point: str) -> None:
        if point == wanted:
            os.kill(os.getpid(), signal.SIGKILL)

    os.environ["TRAINSYNC_CHECKPOINT_INCREMENTAL"] = "true"
    os.environ["TRAINSYNC_CHECKPOINT_MAX_TO_KEEP"] = "1"
    with RunContext.from_env(url) as ctx:
        found = ctx.resume() if sys.argv[3:] == ["resumes"] else None
        saving = ctx.coordinator(0, 1)
        first = 3 if found is None else found.step + 1
        if found is None:
            for step in (1, 2):
                save(saving, step)
        failpoints.enable(area, die)
        for step in (first, first + 1):
            save(saving, step)


if __name__ == "__main__":
    main()
