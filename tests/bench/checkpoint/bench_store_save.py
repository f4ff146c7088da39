"""Saves into a bucket, against DCP through fsspec and against the bare upload of the same bytes.

One rank saves 0.52 GB of bf16 in 150 tensors to an S3 server on this machine (versitygw, on files
in memory). In turn, in rounds:

- ours: `save_async`, until the save is committed by the monitor in this process
- DCP: `async_save` by `FsspecWriter` and s3fs, until its metadata are there; its stager's memory is
  used again, as ours is. One thread and two, of which the faster counts. Without ``sync_files``,
  which calls `os.sync` of this machine
- write: what ours does with the staged state alone, archive and digests, until the objects are
  there
- raw: a multipart upload of one buffer with the bytes of that archive by obstore, with parts of the
  same size and as many at once

The figures are medians of the rounds' ratios of seconds. The server takes its part of the same
cores. A separate process takes the memory: see `tests.bench.checkpoint.store_peak_memory`.
"""

import io
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, Final

import torch
import torch.distributed.checkpoint as dcp
from obstore.store import S3Store
from torch.distributed.checkpoint import FsspecWriter
from trainsync import RunContext, all_ranks
from trainsync.api.protocol import SaveKind
from trainsync.checkpoint.save.files.dumping import dump
from trainsync.checkpoint.save.places.store import StorePlace
from trainsync.storage.objects.of_run import open_run_store
from trainsync.storage.saves.receipts import Participant

from tests.bench.checkpoint.bench_checkpoint_blocked import reusable_stager
from tests.bench.checkpoint.checkpoint_state import model_state, size_of
from tests.bench.harness import Figure, spread
from tests.bench.store_server import BUCKET, bucket

ROUNDS: Final = 5
LAYERS: Final = 15
DCP_THREADS: Final = (1, 2)
SECONDS: Final = 300.0


def run() -> Iterator[Figure]:
    """`store_save_vs_dcp_fsspec`, `store_write_vs_raw`, `store_peak_memory_shards`."""
    with bucket() as url:
        yield from _speeds(url)
        yield _memory(url)


class Ways:
    """What is timed; each call leaves objects, which `forget` removes."""

    def __init__(self, context: RunContext, url: str) -> None:
        self.state = model_state(LAYERS)
        self._coordinator = context.coordinator(0, 1)
        self._url = url
        self._store = S3Store(BUCKET)
        self.limits = open_run_store(url).limits
        self._stagers = {threads: reusable_stager(overlapped=False) for threads in DCP_THREADS}
        archive = io.BytesIO()
        torch.save(self.state, archive)
        self.archive = archive.getvalue()
        self._step = 0

    def ours(self) -> tuple[float, float]:
        """Seconds until the call returns, and until the save is committed."""
        self._step += 1
        every = all_ranks("model", world_size=1)
        started = time.perf_counter()
        self._coordinator.register(self._step, checkpoint_participants=every)
        self._coordinator.save_async("model", self.state, self._step)
        blocked = time.perf_counter() - started
        self._coordinator.finish(self._step, timeout=SECONDS)
        return blocked, time.perf_counter() - started

    def dcp(self, threads: int) -> tuple[float, float]:
        """The same of DCP."""
        started = time.perf_counter()
        writer = FsspecWriter(f"{self._url}/dcp", thread_count=threads, sync_files=False)
        saving: Any = dcp.async_save(
            self.state, storage_writer=writer, async_stager=self._stagers[threads]
        )
        blocked = time.perf_counter() - started
        saving.result(SECONDS)
        return blocked, time.perf_counter() - started

    def write(self) -> float:
        """Seconds until the objects of a state are there."""
        place = StorePlace(open_run_store(f"{self._url}/write"), 0, "benchmark0")
        part = place.part(SaveKind.CHECKPOINT, 1, Participant("model", 0))
        started = time.perf_counter()
        part.write_state("model.pt", partial(dump, self.state), size_of(self.state))
        return time.perf_counter() - started

    def raw(self) -> float:
        """Seconds of the bare upload."""
        started = time.perf_counter()
        self._store.put(
            "raw/model.pt",
            self.archive,
            use_multipart=True,
            chunk_size=self.limits.part_bytes,
            max_concurrency=self.limits.parts,
        )
        return time.perf_counter() - started

    def forget(self) -> None:
        """Remove the objects; what the monitor needs of the run stays."""
        for prefix in ("dcp", "write", "raw", "run/objects"):
            found = self._store.list(prefix=prefix).collect()
            self._store.delete([info["path"] for info in found])


def _speeds(url: str) -> list[Figure]:
    times: dict[str, list[float]] = {}
    with RunContext.from_env(f"{url}/run") as context:
        ways = Ways(context, url)
        calls: dict[str, Callable[[], Any]] = {"ours": ways.ours}
        calls |= {f"dcp_{n}_threads": lambda n=n: ways.dcp(n) for n in DCP_THREADS}
        calls |= {"write": ways.write, "raw": ways.raw}
        for number in range(ROUNDS + 1):
            for way, call in calls.items():
                taken = call()
                ways.forget()
                if number == 0:
                    continue  # it warms up
                if isinstance(taken, tuple):
                    blocked, taken = taken
                    times.setdefault(f"{way}_blocked", []).append(blocked)
                times.setdefault(way, []).append(taken)
    best = [
        min(each) for each in zip(*(times[f"dcp_{n}_threads"] for n in DCP_THREADS), strict=True)
    ]
    details = {"bytes": float(len(ways.archive)), "rounds": float(ROUNDS)}
    for way, values in times.items():
        details |= spread(f"{way}_seconds", values)
    limits = ways.limits
    return [
        Figure(
            "store_save_vs_dcp_fsspec",
            statistics.median(b / a for a, b in zip(times["ours"], best, strict=True)),
            "times as fast",
            ">= 1.5",
            "DCP `async_save` through fsspec and s3fs of the same state, the faster of "
            "one thread and two, until durable",
            details,
        ),
        Figure(
            "store_write_vs_raw",
            statistics.median(b / a for a, b in zip(times["write"], times["raw"], strict=True)),
            "of the speed",
            ">= 0.85",
            f"a bare multipart upload by obstore, {limits.parts} parts of "
            f"{limits.part_bytes >> 20} MiB at once",
            details,
        ),
    ]


def _memory(url: str) -> Figure:
    command = [sys.executable, "-m", "tests.bench.checkpoint.store_peak_memory", f"{url}/memory"]
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=600)
    found: dict[str, int] = json.loads(done.stdout)
    return Figure(
        "store_peak_memory_shards",
        found["peak"] / found["shard"],
        "shards",
        "<= 1.3",
        "the bytes of the shard itself (peak resident memory above the state)",
        {name: float(value) for name, value in found.items()},
    )
