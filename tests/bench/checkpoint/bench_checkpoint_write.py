"""Bytes per second to disk, with digest and fsync, against ``dd conv=fsync`` of the same size.

In turn, on the same disk: `writer.write_state` from the first byte to the fsync of the directory,
and dd with blocks of 1 MB and of 8 MB. The better of two tries counts. The figure is the median
of the rounds' ratios.
"""

import statistics
import subprocess
import time
from functools import partial
from pathlib import Path

import torch
from trainsync.checkpoint.save.files import writer
from trainsync.checkpoint.save.files.dumping import dump

from tests.bench.checkpoint.checkpoint_state import model_state, scratch
from tests.bench.harness import Figure, seconds, spread

ROUNDS = 7
WARM_UP = 1


def save(directory: Path, state: dict[str, torch.Tensor]) -> tuple[int, float]:
    """Returns the file's bytes and the seconds."""
    started = time.perf_counter()
    entry = writer.write(directory, "actor/model.pt", partial(dump, state))
    spent = time.perf_counter() - started
    (directory / "actor/model.pt").unlink()
    return entry.bytes, spent


def dd(directory: Path, size: int, block: int) -> float:
    """Seconds for ``size`` bytes, rounded up to whole blocks, with the start of the process."""
    path, count = directory / "dd", -(-size // block)
    spent = seconds(
        lambda: subprocess.run(
            ["dd", "if=/dev/zero", f"of={path}", f"bs={block}", f"count={count}", "conv=fsync"],
            check=True,
            capture_output=True,
        )
    )
    path.unlink()
    return spent


def run() -> list[Figure]:
    """`checkpoint_write_vs_dd`."""
    state = model_state()
    ours, peer = [], []
    with scratch() as directory:
        for round_ in range(WARM_UP + ROUNDS):
            size, own = zip(*(save(directory, state) for _ in range(2)), strict=True)
            theirs = [dd(directory, size[0], block) for block in (1 << 20, 8 << 20)]
            if round_ >= WARM_UP:
                ours.append(min(own))
                peer.append(min(theirs))
    return [
        Figure(
            name="checkpoint_write_vs_dd",
            figure=statistics.median(b / a for a, b in zip(ours, peer, strict=True)),
            unit="ratio of bytes per second",
            goal=">= 0.9",
            peer="dd conv=fsync of the same size to the same disk, the faster of two block sizes",
            details={
                "bytes": size[0],
                "rounds": ROUNDS,
                "ratio_of_minima": min(peer) / min(ours),
                "bytes_per_second_median": size[0] / statistics.median(ours),
                **spread("write_seconds", ours),
                **spread("dd_seconds", peer),
            },
        )
    ]
