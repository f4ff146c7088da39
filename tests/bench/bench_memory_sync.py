"""Method ``memory``, 1 GB through Ray: a trainer's weights into an explorer's model.

The peers are the reference's way (the dict of tensors as an argument of an actor, which hands it
on), once as Ray sends tensors by default, and once with Ray's own zero-copy tensors. All end with
the new values in the explorer's model; ours is checked by digest on the way, the others are not.
Trainer, hand-over and explorer are a process each, and the ways take turns.

Memory is what all three, and Ray's object store, hold at most during a synchronisation, beyond what
they held before the first. Ray deletes objects every 10 ms, as the operator's pods make it do; what
it comes to with Ray's own second is in the details.
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

from tests.bench.checkpoint_state import model_state, size_of
from tests.bench.harness import Figure, seconds, spread

ROUNDS = 5
_SAMPLE_SECONDS = 0.02
_DELETION_PERIOD = "RAY_free_objects_period_milliseconds"


class Trainer:
    """Holds a model, and sends it either way."""

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
    """What the reference's synchronizer does with a state dict."""

    def __init__(self) -> None:
        self._state: dict[str, torch.Tensor] = {}

    async def put(self, state: dict[str, torch.Tensor]) -> None:
        self._state = state

    async def get(self) -> dict[str, torch.Tensor]:
        return self._state


class Explorer:
    """Holds a model, and takes new values either way."""

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
    """The most bytes that some processes held while this was entered, beyond ``before``."""

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
    """Bytes of the processes together, and of the object store whoever has it mapped."""
    total = 0
    for pid in pids:
        rows = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]
        kib = {row.split(":")[0]: int(row.split()[1]) for row in rows}
        total += (kib["Pss"] - kib["Pss_Shmem"]) << 10
    return total + store_bytes(pids[-1])


def store_bytes(raylet: int) -> int:
    """What the object store has of the machine's memory, freed objects too."""
    total = 0
    for descriptor in Path(f"/proc/{raylet}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # closed meanwhile
            if "/shm/plasma" in str(descriptor.readlink()):
                total += descriptor.stat().st_blocks * 512
    return total


def raylets() -> list[int]:
    """The process of this Ray, not of another one on the machine, that holds the object store."""
    socket = ray.nodes()[0]["RayletSocketName"].encode()
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        words = path.read_bytes().split(b"\0")
        if words[0].endswith(b"/raylet") and any(socket in word for word in words):
            found.append(int(path.parent.name))
    return found


class Scene:
    """A Ray, a trainer, an explorer, and what the reference sends through.

    Args:
        period: milliseconds between Ray's deletions.
    """

    def __init__(self, period: int = 10) -> None:
        os.environ[_DELETION_PERIOD] = str(period)
        ray.init(
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
    """Models held at most in each of some synchronisations."""
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
            way()  # the first takes longer, for both
        for round_ in range(ROUNDS):
            for name, way in ways if round_ % 2 else ways[::-1]:
                found[name].append(seconds(way))
                time.sleep(1.5)  # what is freed, is freed now
        return found
    finally:
        ray.shutdown()


def run() -> list[Figure]:
    """Both figures."""
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
