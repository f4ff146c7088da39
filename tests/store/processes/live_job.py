"""A process of a run in a bucket that is killed: ``live_job URL POINT``.

It hosts the monitor, commits step 1, and kills itself with SIGKILL when step 2 comes to the point.
"""

import os
import signal
import sys

import torch
from trainsync import RunContext, all_ranks, failpoints


def main() -> None:
    """See the module."""
    url = sys.argv[1]
    area, _, wanted = sys.argv[2].partition(".")

    def die(point: str) -> None:
        if point == wanted:
            os.kill(os.getpid(), signal.SIGKILL)

    with RunContext.from_env(url) as ctx:
        saving = ctx.coordinator(0, 1)
        for step in (1, 2):
            if step == 2:
                failpoints.enable(area, die)
            saving.register(step, checkpoint_participants=all_ranks("model", world_size=1))
            saving.save_async("model", {"weight": torch.arange(1000.0) + step}, step)
            saving.finish(step, timeout=60)


if __name__ == "__main__":
    main()
