"""Method ``memory``: 1 GB of a trainer's weights through Ray into an explorer's model.

The peers are the reference's way (the dict of tensors as an argument of an actor, which forwards
the dict), once with Ray's default serialisation, and once with Ray's zero-copy tensors. All end
with the new values in the explorer's model; only ours checks a digest. Trainer, forwarding actor
and explorer are separate processes, and the ways take turns.

Memory is the peak of all three processes and Ray's object store during a synchronisation, above the
level before the first. Ray deletes objects every 10 ms, as in the operator's pods; the details have
the memory with Ray's default of one second.
"""

import contextlib
import os
import statistics
import threading
import time
from pathlib import Path
from typing import Any

import ray
import torch
from trainsync import ExplorerClient, Synchronizer, Uploader

from tests.bench.checkpoint.checkpoint_state import model_state, size_of
from tests.bench.harness import Figure, seconds, spread

ROUNDS = 5
_SAMPLE_SECONDS = 0.02
_DELETION_PERIOD = "RAY_free_objects_period_milliseconds"


class Trainer:
    """Holds a model and sends the weights either way."""

    def __init__(self, synchronizer: Any, holder: Any) -> None:
        self._state = model_state()
        self._uploader = Uploader(0, 1)
        self._synchronizer = synchronizer
        self._holder = holder

    def pid(self) -> int:
        return os.getpid()

    def upload(self, version: int) -> None:
        self._uploader.upload(self._state, self._synchronizer, version, timeout=300)

    def send(self) -> None:
        ray.get(self._holder.put.remote(self._state), timeout=300)


class Holder:
    """Forwards a state dict, like the reference's synchronizer."""

    def __init__(self) -> None:
        self._state: dict[str, torch.Tensor] = {}

    async def put(self, state: dict[str, torch.Tensor]) -> None:
        self._state = state

    async def get(self) -> dict[str, torch.Tensor]:
        return self._state


class Explorer:
    """Holds a model and takes new values either way."""

    def __init__(self, synchronizer: Any, holder: Any) -> None:
        self._model = model_state()
        self._client = ExplorerClient(synchronizer, "explorer", timeout=300)
        self._holder = holder

    def pid(self) -> int:
        return os.getpid()

    def fetch(self, version: int) -> None:
        weights = self._client.wait_and_fetch(version - 1)
        assert weights is not None
        self._load(weights.state_dict)
        self._client.acknowledge(weights)

    def receive(self) -> None:
        self._load(ray.get(self._holder.get.remote(), timeout=300))

    def _load(self, state: dict[str, torch.Tensor]) -> None:
        for name, tensor in self._model.items():
            tensor.copy_(state[name])


class Memory:
    """Context that measures the peak bytes of some processes above ``before``."""

    def __init__(self, pids: list[int], before: int) -> None:
        self._pids, self._before = pids, before
        self._stop = threading.Event()
        self.most = 0

    def __enter__(self) -> "Memory":
        self._thread = threading.Thread(target=self._run)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stop.wait(_SAMPLE_SECONDS):
            self.most = max(self.most, held(self._pids) - self._before)


def held(pids: list[int]) -> int:
    """Bytes of the processes together, and of the object store once."""
    total = 0
    for pid in pids:
        rows = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]
        kib = {row.split(":")[0]: int(row.split()[1]) for row in rows}
        total += (kib["Pss"] - kib["Pss_Shmem"]) << 10
    return total + store_bytes(pids[-1])


def store_bytes(raylet: int) -> int:
    """Bytes of the machine's memory in the object store, freed objects included."""
    total = 0
    for descriptor in Path(f"/proc/{raylet}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # the process has closed the file
            if "/shm/plasma" in str(descriptor.readlink()):
                total += descriptor.stat().st_blocks * 512
    return total


def raylets() -> list[int]:
    """The process with the object store of this Ray, not of another Ray on the machine."""
    socket = ray.nodes()[0]["RayletSocketName"].encode()
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        words = path.read_bytes().split(b"\0")
        if words[0].endswith(b"/raylet") and any(socket in word for word in words):
            found.append(int(path.parent.name))
    return found


class Scene:
    """A Ray, a trainer, an explorer, and the reference's forwarding actor.

    Args:
        period: milliseconds between Ray's deletions.
    """

    def __init__(self, period: int = 10) -> None:
        os.environ[_DELETION_PERIOD] = str(period)
        ray.init(
            address="local",
            num_cpus=4,
            object_store_memory=4 << 30,
            include_dashboard=False,
            log_to_driver=False,
            runtime_env={"env_vars": {"PYTHONPATH": os.environ.get("PYTHONPATH", "")}},
        )
        synchronizer = Synchronizer.create("bench")
        holder = ray.remote(num_cpus=0)(Holder).remote()
        actors = [
            ray.remote(num_cpus=0)(kind).remote(synchronizer, holder)
            for kind in (Trainer, Explorer)
        ]
        self._trainer, self._explorer = actors
        self.pids = ray.get([actor.pid.remote() for actor in actors], timeout=120) + raylets()
        assert len(self.pids) == 3
        self._version = -1

    def ours(self) -> None:
        self._version += 1
        ray.get(self._trainer.upload.remote(self._version), timeout=300)
        ray.get(self._explorer.fetch.remote(self._version), timeout=300)

    def peer(self) -> None:
        ray.get(self._trainer.send.remote(), timeout=300)
        ray.get(self._explorer.receive.remote(), timeout=300)


def measure_memory(period: int) -> list[float]:
    """Peak memory of each synchronisation, in models."""
    try:
        scene = Scene(period)
        before, model = held(scene.pids), size_of(model_state())
        found = []
        for _ in range(ROUNDS):
            with Memory(scene.pids, before) as memory:
                scene.ours()
            found.append(memory.most / model)
        return found
    finally:
        ray.shutdown()


def measure_time(zero_copy: bool) -> dict[str, list[float]]:
    """Seconds of each round, by way."""
    os.environ["RAY_ENABLE_ZERO_COPY_TORCH_TENSORS"] = "1" if zero_copy else "0"
    try:
        scene = Scene()
        found: dict[str, list[float]] = {"ours": [], "peer": []}
        ways = [("ours", scene.ours), ("peer", scene.peer)]
        for _, way in ways:
            way()  # the first synchronisation is slower, both ways
        for round_ in range(ROUNDS):
            for name, way in ways if round_ % 2 else ways[::-1]:
                found[name].append(seconds(way))
                time.sleep(1.5)  # wait until Ray has freed its objects
        return found
    finally:
        ray.shutdown()


def run() -> list[Figure]:
    """The figures of time and memory."""
    plain, zero_copy = measure_time(zero_copy=False), measure_time(zero_copy=True)
    often, default = measure_memory(10), measure_memory(1000)
    ours = statistics.median(plain["ours"])
    return [
        Figure(
            "memory_vs_reference",
            statistics.median(plain["peer"]) / ours,
            "times as fast",
            ">= 3",
            "the state dict as an actor's argument",
            spread("seconds", plain["ours"])
            | spread("reference_seconds", plain["peer"])
            | spread("seconds_next_to_zero_copy", zero_copy["ours"])
            | spread("ray_zero_copy_seconds", zero_copy["peer"]),
        ),
        Figure(
            "memory_peak_models",
            max(often),
            "models",
            "<= 1.2",
            "the size of the model",
            spread("models", often) | spread("models_with_rays_default", default),
        ),
    ]
