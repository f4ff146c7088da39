"""Time of a broadcast from an explorer's death until the others serve the version."""

import signal
import statistics
import tempfile
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Final

import torch

from tests.bench.harness import Figure, spread
from tests.distributed.weights.broadcast.broadcast_job import BUCKET_SIZE, DEADLINES, Job

REPEATS: Final = 20
SECONDS: Final = 60.0
_TENSORS: Final = 290
_TOTAL: Final = 20_000_000  # bytes
_BUCKETS: Final = _TOTAL // BUCKET_SIZE


def model(version: int) -> Iterator[tuple[str, torch.Tensor]]:
    """bf16 tensors, one at a time; the value of every element is the version."""
    for number in range(_TENSORS):
        yield f"t{number}", torch.full((_TOTAL // 2 // _TENSORS,), version % 256).bfloat16()


def recover(job: Job, version: int, bucket: int) -> float:
    """Seconds from the death of one of three explorers, at its ``bucket``-th, to the report."""
    victim = job.explorers["explorer-1"]
    victim.ask("arm", "bucket", signal.SIGKILL, bucket)
    job.trainer.begin("broadcast", version, partial(model, version))
    victim.process.join(SECONDS)
    if victim.process.is_alive():
        raise RuntimeError("the explorer was not killed")
    died = time.perf_counter()
    report = job.trainer.result(SECONDS)
    seconds = time.perf_counter() - died
    if report.served != ("explorer-0", "explorer-2") or set(report.lost) != {"explorer-1"}:
        raise RuntimeError(f"the others do not serve it, or nobody was lost: {report}")
    job.join("explorer-1")
    if not job.trainer.ask("wait_for", 3, SECONDS):
        raise RuntimeError("the explorer did not come back")
    return seconds


def run() -> list[Figure]:
    """`sync_recovery_seconds`."""
    with tempfile.TemporaryDirectory() as directory:
        job = Job(Path(directory), explorers=3)
        try:
            job.trainer.ask("broadcast", 1, partial(model, 1))
            times = [
                recover(job, number + 2, 1 + number * (_BUCKETS - 1) // REPEATS)
                for number in range(REPEATS)
            ]
        finally:
            job.end()
    details = spread("sync_recovery", times)
    details |= {"repeats": float(REPEATS), "bytes": float(_TOTAL), "explorers": 3.0}
    return [
        Figure(
            name="sync_recovery_seconds",
            figure=statistics.median(times),
            unit="s from an explorer's kill -9 until the others serve the version",
            goal=f"<= {DEADLINES.bucket:g}",
            peer="the bucket's deadline, which waiting for the dead one would take",
            details=details,
        )
    ]
