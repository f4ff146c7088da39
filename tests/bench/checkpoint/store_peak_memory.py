"""Child of `bench_store_save`: memory that a save into a bucket adds to a process.

``python -m tests.bench.checkpoint.store_peak_memory URL`` saves 1.00 GB and prints a JSON object of
bytes. A separate process, since the system reports only the peak of a process's whole life.
"""

import json
import sys

import torch
from trainsync import RunContext, all_ranks

from tests.bench.checkpoint.checkpoint_state import model_state, size_of
from tests.bench.checkpoint.peak_memory import peak, resident

_SECONDS = 300.0


def main() -> None:
    """Stage, upload and commit one save of the state."""
    state = model_state()
    with RunContext.from_env(sys.argv[1]) as context:
        coordinator = context.coordinator(0, 1)
        # Modules, threads and connections that are made once are no part of a save.
        for step, saved in ((1, {"w": torch.zeros(1)}), (2, state)):
            before = resident()
            coordinator.register(step, checkpoint_participants=all_ranks("model", world_size=1))
            coordinator.save_async("model", saved, step)
            coordinator.finish(step, timeout=_SECONDS)
    print(
        json.dumps(
            {
                "shard": size_of(state),
                "peak": peak() - before,
                "resident_afterwards": resident() - before,
            }
        )
    )


if __name__ == "__main__":
    main()
