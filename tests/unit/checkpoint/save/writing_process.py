"""A process that saves ``model`` as rank 0 of 1: ``python -m …writing_process DIRECTORY``.

It reads lines of JSON, {"step": 5, "value": 1.0}, and answers each with {"error": null or text}.
"""

import json
import sys
from pathlib import Path

import torch
from trainsync.checkpoint.coordinator import CheckpointCoordinator
from trainsync.monitor.client.disk import DiskMonitorClient

INCARNATION = "0123456789abcdef"


def main(directory: Path) -> None:
    client = DiskMonitorClient(directory, attempt=0, incarnation=INCARNATION)
    coordinator = CheckpointCoordinator(client, directory)
    print("ready", flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        error = None
        try:
            coordinator.save_sync(
                "model", {"w": torch.full((1000,), asked["value"])}, asked["step"]
            )
        except Exception as problem:  # noqa: BLE001 - told
            error = f"{type(problem).__name__}: {problem}"
        print(json.dumps({"error": error}), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
