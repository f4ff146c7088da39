"""A trainer whose run has ``sync.method: store``: ``store_trainer RAY LAST
[POINT COUNT]``.

It publishes versions up to LAST and prints each, and kills itself with SIGKILL when it comes to the
point for the COUNT-th time.
"""

import os
import signal
import sys

os.environ["RAY_AUTH_MODE"] = "disabled"

import ray
import torch
from trainsync import RunContext, WeightPublisher, failpoints
from trainsync.engines.module_engine import TrainedModule

ELEMENTS = 500_000
CHANGED = ELEMENTS // 100


def model() -> torch.nn.Module:
    """A model in bfloat16, the same each time."""
    made = torch.nn.Linear(1000, ELEMENTS // 1000, bias=False, dtype=torch.bfloat16)
    with torch.no_grad():
        made.weight.copy_(
            torch.randn(made.weight.shape, generator=torch.Generator().manual_seed(7))
        )
    return made


def train(made: torch.nn.Module, step: int, seed: int = 0) -> None:
    """Change one element in a hundred by its last bit."""
    generator = torch.Generator().manual_seed(1000 * seed + step)
    bits = next(made.parameters()).data.view(torch.int16).view(-1)
    bits[torch.randperm(bits.numel(), generator=generator)[:CHANGED]] ^= 1


def main() -> None:
    """See the module."""
    address, last = sys.argv[1], int(sys.argv[2])
    if len(sys.argv) > 3:
        left = int(sys.argv[4])

        def handler(point: str) -> None:
            nonlocal left
            if point == sys.argv[3]:
                left -= 1
                if left == 0:
                    os.kill(os.getpid(), signal.SIGKILL)

        failpoints.enable("publish", handler)
    ray.init(address=address, log_to_driver=False)
    made = model()
    with RunContext.from_env() as ctx:
        ctx.synchronizer()
        with WeightPublisher(ctx, TrainedModule(made)) as publisher:
            for step in range(1, last + 1):
                train(made, step, ctx.attempt)
                publisher.publish(step)
                print(step, flush=True)
    ray.shutdown()


if __name__ == "__main__":
    main()
