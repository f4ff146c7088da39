"""`load_sharded` from a bucket against the bare requests for the same bytes.

One rank loads a model and AdamW's moments, 0.5 GB, into an allocated model and an optimizer without
state, from an S3 server on this machine (versitygw, on files in memory). In turn, in rounds:

- ours: `load_sharded`, with the digest of every block
- raw: GETs of ranges of the same objects by obstore, of the same size and as many at once, whose
  bytes are dropped

The figure is the median of the rounds' ratios of seconds. ``kept`` in the details: the same GETs,
whose bytes go into newly allocated memory, with the xxh3-128 of each MiB, as any load must do. The
server takes its part of the same cores.
"""

import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import repeat
from typing import Any, Final

import numpy as np
import xxhash

from tests.bench.harness import Figure, spread
from tests.bench.store_server import BUCKET, bucket

ROUNDS: Final = 7
LAYERS: Final = 40  # of 4 MiB, with moments 12 MiB
STEP: Final = 1
PREFIX: Final = "runs/a"
_BLOCK: Final = 1 << 20


def run() -> list[Figure]:
    """`store_load_vs_raw`."""
    with bucket() as url:
        return [_measure(f"{url}/{PREFIX}")]


def _measure(url: str) -> Figure:
    import torch
    from obstore.store import S3Store
    from trainsync import RunContext, load_sharded
    from trainsync.checkpoint.load.ranges import AT_ONCE
    from trainsync.storage.objects.of_run import open_run_store

    model = torch.nn.Sequential(*(torch.nn.Linear(1024, 1024, bias=False) for _ in range(LAYERS)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 0.01)
    optimizer.step()
    optimizer.zero_grad()
    with RunContext.from_env(url) as context:
        coordinator = context.coordinator()
        coordinator.save(STEP, model=model, optimizer=optimizer)
        coordinator.finish(STEP, timeout=300)
        del optimizer
        resume = context.resume_here()
        assert resume is not None
        assert resume.store is not None
        store, keys = S3Store(BUCKET, prefix=PREFIX), resume.store.keys
        part = open_run_store(url).limits.part_bytes
        ranges = [
            (keys[entry.path], entry.bytes, start, min(start + part, entry.bytes))
            for entry in resume.manifest.files
            for start in range(0, entry.bytes, part)
        ]
        fetched = 0

        def ours() -> None:
            nonlocal fetched
            fresh = torch.optim.AdamW(model.parameters(), lr=1e-3)
            fetched = load_sharded(resume, model=model, optimizer=fresh).volume_bytes

        def raw() -> None:
            with ThreadPoolExecutor(AT_ONCE) as pool:
                for _ in pool.map(_get, repeat(store), ranges):
                    pass

        def kept() -> None:
            memory = {key: np.empty(size, np.uint8) for key, size, _, _ in ranges}
            with ThreadPoolExecutor(AT_ONCE) as pool:
                for _ in pool.map(_keep, repeat(store), repeat(memory), ranges):
                    pass

        times: dict[str, list[float]] = {"ours": [], "raw": [], "kept": []}
        for number in range(ROUNDS + 1):
            for way, call in (("ours", ours), ("raw", raw), ("kept", kept)):
                seconds = _timed(call)
                times[way] += [seconds] if number else []  # the first round warms up
    size = sum(entry.bytes for entry in resume.manifest.files)
    details = {"bytes": float(size), "fetched_bytes": float(fetched), "rounds": float(ROUNDS)}
    for way, values in times.items():
        details |= spread(f"{way}_seconds", values)
    details["kept_to_ours"] = statistics.median(
        a / b for a, b in zip(times["kept"], times["ours"], strict=True)
    )
    return Figure(
        "store_load_vs_raw",
        statistics.median(a / b for a, b in zip(times["raw"], times["ours"], strict=True)),
        "of the speed",
        ">= 0.85",
        f"{AT_ONCE} GETs at once, of {part >> 20} MiB each, of the same objects by obstore",
        details,
    )


def _get(store: Any, wanted: tuple[str, int, int, int]) -> Any:
    key, _, start, end = wanted
    return store.get_range(key, start=start, end=end)


def _keep(store: Any, memory: dict[str, Any], wanted: tuple[str, int, int, int]) -> None:
    key, _, start, end = wanted
    data = np.frombuffer(_get(store, wanted), np.uint8)
    target = memory[key][start:end]
    for at in range(0, end - start, _BLOCK):
        block = data[at : at + _BLOCK]
        xxhash.xxh3_128(block).hexdigest()
        np.copyto(target[at : at + _BLOCK], block)


def _timed(call: Callable[[], Any]) -> float:
    started = time.perf_counter()
    call()
    return time.perf_counter() - started
