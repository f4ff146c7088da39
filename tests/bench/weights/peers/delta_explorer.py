"""An explorer, until its input ends.

``python -m tests.bench.weights.peers.delta_explorer HOST PORT TOKEN``
"""

import sys

import torch
from trainsync.weights.transports.broadcast.deadlines import Deadlines
from trainsync.weights.transports.broadcast.link import TrainerEndpoint
from trainsync.weights.transports.broadcast.receiver import WeightReceiver

DEADLINES = Deadlines(whole=300.0, bucket=120.0, connect=60.0, silence=60.0)


def main() -> None:
    """Serve the trainer's versions."""
    host, port, token = sys.argv[1:]
    endpoint = TrainerEndpoint(host, int(port), 0, token)
    torch.set_num_threads(1)
    with WeightReceiver("far", lambda: endpoint, deadlines=DEADLINES, shared_memory=None):
        sys.stdin.read()


if __name__ == "__main__":
    main()
