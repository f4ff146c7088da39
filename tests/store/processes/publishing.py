"""A trainer that publishes weights into a store: ``publishing URL ATTEMPT
INCARNATION FIRST LAST [POINT COUNT]``.

It kills itself with SIGKILL when it comes to the point for the COUNT-th time.
"""

import os
import signal
import sys

import torch
from trainsync import failpoints
from trainsync.storage.objects.opening import open_store
from trainsync.weights.transports.anchors.index import Owner
from trainsync.weights.transports.anchors.publisher import AnchorPublisher

Named = list[tuple[str, torch.Tensor]]

ANCHOR_EVERY = 3


def weights(version: int, attempt: int = 1) -> Named:
    """The model after so many steps: each changes a few elements by one of their last bits."""
    first = torch.Generator().manual_seed(0)
    tensors = [
        ("large", torch.randn(400, 500, generator=first).bfloat16()),
        ("small", torch.randn(33, generator=first)),
    ]
    for step in range(1, version + 1):
        seed = torch.Generator().manual_seed(step * 1000 + attempt)
        bits = tensors[0][1].view(torch.int16).view(-1)
        bits[torch.randint(bits.numel(), (500,), generator=seed)] ^= 1
        tensors[1][1][step % 33] += 1.0
    return tensors


def main() -> None:
    """See the module."""
    url, attempt, incarnation, first, last = sys.argv[1:6]
    if len(sys.argv) > 6:
        left = int(sys.argv[7])

        def handler(point: str) -> None:
            nonlocal left
            if point == sys.argv[6]:
                left -= 1
                if left == 0:
                    os.kill(os.getpid(), signal.SIGKILL)

        failpoints.enable("publish", handler)
    owner = Owner("run-uid", int(attempt), incarnation)
    publisher = AnchorPublisher(open_store(url), owner, anchor_every=ANCHOR_EVERY)
    for version in range(int(first), int(last) + 1):
        publisher.publish(version, lambda v=version: weights(v, owner.attempt), 60.0)  # type: ignore[misc]
    publisher.close()


if __name__ == "__main__":
    main()
