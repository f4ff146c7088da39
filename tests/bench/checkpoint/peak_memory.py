"""Child of `bench_checkpoint_memory`: memory that staging and writing add to a process.

``python -m tests.bench.checkpoint.peak_memory SAVES DIRECTORY`` prints a JSON object of bytes. A
separate process, since the system reports only the peak of a process's whole life.
"""

import json
import resource
import sys
import threading
from pathlib import Path

import torch

from tests.bench.checkpoint.checkpoint_state import coordinator_in, model_state, size_of


def resident() -> int:
    """Resident bytes now."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()


def peak() -> int:
    """Peak resident bytes since this program began; `getrusage` would include its parent's."""
    lines = Path("/proc/self/status").read_text().splitlines()
    (kilobytes,) = (line.split()[1] for line in lines if line.startswith("VmHWM:"))
    return int(kilobytes) * 1024


def main() -> None:
    """Stage ``SAVES`` saves of the state, each in separate memory, and write them."""
    saves, directory = int(sys.argv[1]), Path(sys.argv[2])
    state = model_state()
    go = threading.Event()
    coordinator = coordinator_in(directory)
    # Modules and threads that are loaded once are no part of a save.
    coordinator.save_async("model", {"w": torch.zeros(1)}, 1)
    coordinator.wait_all(60)
    before = resident()
    # Keeps the first save's memory in use, so that the second save cannot reuse it.
    coordinator.save_async("gate", lambda path: _wait(go, path), 2)
    for step in range(2, 2 + saves):
        coordinator.save_async("model", state, step)
    go.set()
    coordinator.wait_all(600)
    print(
        json.dumps(
            {
                "shard": size_of(state),
                "peak": peak() - before,
                "resident_afterwards": resident() - before,
            }
        )
    )


def _wait(go: threading.Event, path: Path) -> None:
    assert go.wait(600)
    (path / "gate").write_text("")


if __name__ == "__main__":
    main()
