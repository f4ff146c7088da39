"""Processes of a run in a bucket that is restarted in place.

``restarting rank STEP POINT``: a rank of the run that its variables name. It
saves STEP, and stops itself with SIGSTOP when it comes to the point; it goes on when it is woken.

``restarting driver URL COUNT``: commits step 3, restarts in place, and kills
itself with SIGKILL before the COUNT-th put of the term in that.
"""

import os
import signal
import sys
import threading

import torch
from trainsync import RunContext, all_ranks, failpoints


def rank(step: int, where: str) -> None:
    """See the module."""
    area, _, wanted = where.partition(".")
    with RunContext.from_env() as ctx:
        ctx.resume()
        saving = ctx.coordinator(0, 1)
        reached: list[str] = []

        def stop(point: str) -> None:
            if point == wanted and not reached:
                reached.append(point)
                # To this thread: another one would take it later, when this one has gone on.
                signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)

        failpoints.enable(area, stop)
        saving.register(step, checkpoint_participants=all_ranks("model", world_size=1))
        saving.save_async("model", {"weight": torch.full((1000,), -1.0)}, step)
        saving.wait_all(60)
    print("written", flush=True)


def driver(url: str, count: int) -> None:
    """See the module."""
    with RunContext.from_env(url) as ctx:
        ctx.resume()
        saving = ctx.coordinator(0, 1)
        saving.register(3, checkpoint_participants=all_ranks("model", world_size=1))
        saving.save_async("model", {"weight": torch.full((1000,), 3.0)}, 3)
        saving.finish(3, timeout=60)
        left = [count]

        def die(point: str) -> None:
            if point == "term":
                left[0] -= 1
                if left[0] == 0:
                    os.kill(os.getpid(), signal.SIGKILL)

        failpoints.enable(failpoints.LIVE, die)
        ctx.restart_in_place("a rank died")


if __name__ == "__main__":
    if sys.argv[1] == "rank":
        rank(int(sys.argv[2]), sys.argv[3])
    else:
        driver(sys.argv[2], int(sys.argv[3]))
