"""A process that saves weights into a bucket and is killed: ``dict_job URL POINT``.

It hosts the monitor, commits checkpoint 1 with its state dict unless it goes on from there, and
kills itself with SIGKILL when the state dict of step 2 comes to the point.
"""

import os
import signal
import sys

import torch
from trainsync import RunContext, all_ranks, failpoints


def main() -> None:
    """See the module."""
    area, _, wanted = sys.argv[2].partition(".")

    def die(point: str) -> None:
        if point == wanted:
            os.kill(os.getpid(), signal.SIGKILL)

    ranks = all_ranks("model", world_size=1)
    with RunContext.from_env(sys.argv[1]) as ctx:
        saving = ctx.coordinator(0, 1)
        if ctx.resume() is None:
            saving.register(
                1, state_dict_participants=ranks, checkpoint_participants=[("extra", 0)]
            )
            saving.save_async("model", {"weight": torch.full((1000,), 1.0)}, 1, True)
            saving.save_async("extra", {"step": torch.ones(1)}, 1)
            saving.finish(1, timeout=60)
        failpoints.enable(area, die)
        weight = torch.full((1000,), 2.0 + ctx.attempt / 10)
        saving.register(2, state_dict_participants=ranks)
        saving.save_async("model", {"weight": weight}, 2, True)
        ctx.monitor.save_status("state_dict", 2, 60)


if __name__ == "__main__":
    main()
