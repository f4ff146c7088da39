"""`load_sharded` against torch's loading and against reading the bytes, and its memory.

Two ranks load 0.5 GB each: FSDP2 weights and AdamW's moments, from the page cache, into an
allocated model and an optimizer without state, as after a start. In turn, in rounds:

- ours: `load_sharded`, with every file's digest and the agreement of the ranks
- DCP: ``torch.distributed.checkpoint.load`` alone, into allocated tensors, moments too, without any
  check. ``dcp_resume`` in the details has all calls of a start: ``get_state_dict``, ``load``,
  ``set_state_dict``
- the reading: each rank reads its files sequentially into newly allocated memory, as loaded state
  needs, and computes the xxh3-128 of the bytes. ``read_again`` in the details reads into memory
  that is allocated already

The figures are medians of the rounds' ratios of the slower rank's seconds. Memory is a rank's peak
of anonymous memory (without pages of files, which the system can reclaim) during a load above the
level afterwards, as a share of its files.
"""

import gc
import os
import shutil
import statistics
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Final

from tests.bench.checkpoint.checkpoint_state import scratch
from tests.bench.harness import Figure, spread
from tests.distributed.ranks import run_ranks, values_of

RANKS: Final = 2
ROUNDS: Final = 7
SECONDS: Final = 170.0
STEP: Final = 1
WAYS: Final = ("ours", "dcp", "dcp_resume", "read", "read_again")
_BLOCK: Final = 1 << 20


def run() -> list[Figure]:
    """`load_vs_dcp`, `load_vs_read` and `load_peak_memory_shards`."""
    with scratch() as directory:
        ranks = values_of(run_ranks(measure, directory, world_size=RANKS, seconds=SECONDS))
        shutil.rmtree(directory)
    # The ranks begin each way together; the slower rank determines the end.
    rounds = {
        way: [max(times) for times in zip(*(rank[way] for rank in ranks), strict=True)]
        for way in WAYS
    }
    size = ranks[0]["bytes"]
    details = {"bytes_a_rank": float(size), "rounds": float(ROUNDS)}
    for way in WAYS:
        details |= spread(f"{way}_seconds", rounds[way])
    details["ours_to_dcp_resume"] = _median_ratio(rounds["ours"], rounds["dcp_resume"])
    details["read_again_to_ours"] = _median_ratio(rounds["read_again"], rounds["ours"])
    memory = {
        f"rank_{number}_{name}": float(rank[name])
        for number, rank in enumerate(ranks)
        for name in ("peak_beyond", "peak_beyond_with_files")
    }
    return [
        Figure(
            "load_vs_dcp",
            _median_ratio(rounds["ours"], rounds["dcp"]),
            "of its time",
            "<= 1.1",
            "torch.distributed.checkpoint.load into tensors that are there, without digests",
            details,
        ),
        Figure(
            "load_vs_read",
            _median_ratio(rounds["read"], rounds["ours"]),
            "of the speed",
            ">= 0.8",
            "reading the same files into new memory, with xxh3-128 on the way",
            details,
        ),
        Figure(
            "load_peak_memory_shards",
            max(rank["peak_beyond"] for rank in ranks) / size,
            "of the files' bytes",
            "<= 0.2",
            "what a rank has of its own when it has loaded",
            memory | {"bytes_a_rank": float(size)},
        ),
    ]


def measure(directory: Path) -> dict[str, Any]:
    """One rank: save once both ways, then load in rounds."""
    import torch
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
    from trainsync import RunContext, load_sharded

    dist.init_process_group("gloo")
    model = _model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 0.01)
    optimizer.step()
    optimizer.zero_grad()
    context = RunContext.from_env(directory / "run")
    coordinator = context.coordinator()
    coordinator.save(STEP, model=model, optimizer=optimizer)
    coordinator.finish(STEP, timeout=SECONDS)
    weights, states = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optim": states}, checkpoint_id=directory / "dcp")
    del weights, states
    expected = _sum(model, optimizer)
    resume = context.resume()
    assert resume is not None
    own = sorted(resume.path.glob(f"actor/*_rank_{dist.get_rank()}.pt"))

    def ours() -> torch.optim.Optimizer:
        fresh = torch.optim.AdamW(model.parameters(), lr=1e-3)
        load_sharded(resume, model=model, optimizer=fresh)
        return fresh

    def theirs() -> torch.optim.Optimizer:
        fresh = torch.optim.AdamW(model.parameters(), lr=1e-3)
        model_state, states = get_state_dict(model, fresh)
        dcp.load({"model": model_state, "optim": states}, checkpoint_id=directory / "dcp")
        set_state_dict(model, fresh, model_state_dict=model_state, optim_state_dict=states)
        return fresh

    memory = [torch.zeros(path.stat().st_size, dtype=torch.uint8) for path in own]
    del optimizer
    times: dict[str, Any] = {way: [] for way in WAYS}
    for number in range(ROUNDS + 1):
        found: dict[str, float] = {}
        for way, load in (("ours", ours), ("dcp_resume", theirs)):
            _zero(model)
            found[way], loaded = _timed(load)
            if number == 0:  # the first round warms up and checks the result
                assert _sum(model, loaded) == expected, f"{way} loaded something else"
        there = dict(zip(("model", "optim"), get_state_dict(model, loaded), strict=True))
        del loaded
        found["dcp"], _ = _timed(partial(dcp.load, there, checkpoint_id=directory / "dcp"))
        del there
        found["read"], _ = _timed(partial(read_with_digests, own))
        found["read_again"], _ = _timed(partial(read_with_digests, own, memory))
        for way, seconds in found.items():
            times[way] += [seconds] if number else []
    memory.clear()
    gc.collect()  # an optimizer of an earlier round would count as memory that this load gives back
    with PeakMemory() as peak:
        kept = ours()
        peak.stop()
    del kept
    dist.barrier()
    context.close()
    return times | {
        "bytes": sum(path.stat().st_size for path in own),
        "peak_beyond": peak.own - peak.own_afterwards,
        "peak_beyond_with_files": peak.whole - peak.own_afterwards,
    }


def read_with_digests(paths: list[Path], memory: list[Any] | None = None) -> None:
    """Read all files into ``memory`` or new memory, one thread for each, with digests."""
    places = memory or [None] * len(paths)
    threads = [
        threading.Thread(target=_read_with_digest, args=pair)
        for pair in zip(paths, places, strict=True)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def _read_with_digest(path: Path, place: Any) -> None:
    import torch
    import xxhash

    size = path.stat().st_size
    place = torch.empty(size, dtype=torch.uint8) if place is None else place
    memory = memoryview(place.numpy())
    hasher, done = xxhash.xxh3_128(), 0
    descriptor = os.open(path, os.O_RDONLY)
    try:
        while done < size:
            block = memory[done : done + _BLOCK]
            done += os.readv(descriptor, [block])
            hasher.update(block)
    finally:
        os.close(descriptor)


class PeakMemory:
    """Context that samples the memory of this process every few milliseconds.

    Attributes:
        own: peak bytes without pages of files.
        whole: peak bytes with pages of files.
        own_afterwards: bytes without pages of files when `stop` was called.
    """

    def __init__(self) -> None:
        self.own = self.whole = self.own_afterwards = 0
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch)

    def __enter__(self) -> "PeakMemory":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def stop(self) -> None:
        """Record the present memory and end sampling."""
        self._ended.set()
        self._thread.join()
        self.own_afterwards = memory_now()["RssAnon"]

    def _watch(self) -> None:
        while not self._ended.wait(0.002):
            now = memory_now()
            self.own = max(self.own, now["RssAnon"])
            self.whole = max(self.whole, now["VmRSS"])


def memory_now() -> dict[str, int]:
    """``RssAnon`` and ``VmRSS`` of this process, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    fields = dict(line.split(":", 1) for line in lines)
    return {name: int(fields[name].split()[0]) * 1024 for name in ("RssAnon", "VmRSS")}


def _model() -> Any:
    """0.33 GB of float32 weights over two ranks, with moments 0.5 GB a rank."""
    import torch
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    layers = []
    for _ in range(20):
        layers.append(torch.nn.Linear(1024, 2730))
        layers.append(torch.nn.Linear(2730, 1024))
    model = torch.nn.Sequential(*layers)[:30]
    for layer in model:
        fully_shard(layer)
    return fully_shard(model)


def _zero(model: Any) -> None:
    import torch

    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()


def _sum(model: Any, optimizer: Any) -> list[float]:
    """A sum of some values, to check that all were loaded."""
    tensors = [*model.parameters()]
    for parameter in model.parameters():
        state = optimizer.state[parameter]
        tensors += [state["exp_avg"], state["exp_avg_sq"]]
    return [tensor.to_local().double().sum().item() for tensor in tensors]


def _timed(call: Callable[[], Any]) -> tuple[float, Any]:
    import torch.distributed as dist

    dist.barrier()
    started = time.perf_counter()
    result = call()
    return time.perf_counter() - started, result


def _median_ratio(above: list[float], below: list[float]) -> float:
    return statistics.median(a / b for a, b in zip(above, below, strict=True))
