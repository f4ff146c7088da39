"""Memory of a staged save beside the state, until the save is written: at least one shard."""

import json
import subprocess
import sys

from tests.bench.checkpoint.checkpoint_state import scratch
from tests.bench.harness import Figure


def measure(saves: int) -> dict[str, int]:
    """Bytes, in a new process; see `tests.bench.checkpoint.peak_memory`."""
    with scratch() as directory:
        done = subprocess.run(
            [
                sys.executable,
                "-m",
                "tests.bench.checkpoint.peak_memory",
                str(saves),
                str(directory),
            ],
            check=True,
            capture_output=True,
            text=True,
            timeout=600,
        )
    found: dict[str, int] = json.loads(done.stdout)
    return found


def run() -> list[Figure]:
    """`checkpoint_peak_memory_shards`: for each staged save, the worse of one and two of them."""
    details: dict[str, float] = {}
    worst = 0.0
    for saves in (1, 2):
        found = measure(saves)
        per_save = found["peak"] / saves / found["shard"]
        worst = max(worst, per_save)
        details[f"peak_shards_per_save_with_{saves}_staged"] = per_save
        details["shard_bytes"] = found["shard"]
        details[f"resident_afterwards_shards_with_{saves}_staged"] = (
            found["resident_afterwards"] / found["shard"]
        )
    return [
        Figure(
            name="checkpoint_peak_memory_shards",
            figure=worst,
            unit="shards per staged save",
            goal="<= 1.1",
            peer="the bytes of the shard itself (peak resident memory above the state)",
            details=details,
        )
    ]
