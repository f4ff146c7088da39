"""The method ``memory`` with an explorer that runs out of memory."""

import resource
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import ray
import torch
from trainsync import ExplorerClient, Synchronizer
from trainsync.weights.buckets.schema import Schema, SchemaEntry
from trainsync.weights.errors import WeightsUnavailableError
from trainsync.weights.transports.object_store.packing import digest_of, digest_of_part
from trainsync.weights.versions import PartMeta

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(300)]

TIMEOUT = 60


@pytest.fixture
def synchronizer(ray_cluster: None) -> Any:
    return Synchronizer.create("out-of-memory")


HALF = 9 << 20  # elements: 72 MiB in all, more than glibc keeps in reserve


def upload_halves(synchronizer: Any, version: int) -> None:
    """What two ranks send of one tensor of 72 MiB."""
    for rank in range(2):
        data = torch.full((HALF,), float(version)).view(torch.uint8).numpy()
        piece = SchemaEntry("w", "float32", 4, (2 * HALF,), (rank * HALF,), (HALF,), 0, 0)
        digests = (digest_of([data]),)
        schema = Schema((piece,)).encode()
        part = PartMeta(rank, 2, data.nbytes, digest_of_part(digests), schema, digests)
        call = synchronizer.set_model_state_dict.remote([ray.put([data])], version, part)
        ray.get(call, timeout=TIMEOUT)


class Engine:
    """Holds its model, and may take up no more memory than ``spare`` while it loads a new one."""

    def __init__(self, synchronizer: Any) -> None:
        self._client = ExplorerClient(synchronizer, "poor", timeout=TIMEOUT)
        self._weight = torch.zeros(2 * HALF)
        self._spare: int | None = None

    def update(self, served: int, spare: int | None) -> int | None:
        self._spare = spare
        return self._client.update(self, served)

    def first_and_last(self) -> tuple[float, float]:
        return self._weight[0].item(), self._weight[-1].item()

    def begin_update(self, version: int) -> None:
        pass

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        before = resource.getrlimit(resource.RLIMIT_AS)
        if self._spare is not None:
            size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
            resource.setrlimit(resource.RLIMIT_AS, (size + self._spare, before[1]))
        try:
            for _, tensor in weights:
                self._weight.copy_(tensor)
        finally:
            resource.setrlimit(resource.RLIMIT_AS, before)


def test_an_explorer_out_of_memory_says_so_and_keeps_what_it_has_and_others_go_on(
    synchronizer: Any,
) -> None:
    base = 1
    poor = ray.remote(num_cpus=0)(Engine).remote(synchronizer)
    rich = ExplorerClient(synchronizer, "rich", timeout=TIMEOUT)
    upload_halves(synchronizer, base)
    assert ray.get(poor.update.remote(-1, None), timeout=TIMEOUT) == base

    upload_halves(synchronizer, base + 1)
    with pytest.raises(WeightsUnavailableError, match="w: no memory to put 75497472 bytes"):
        ray.get(poor.update.remote(base, 16 << 20), timeout=TIMEOUT)
    assert ray.get(poor.first_and_last.remote(), timeout=TIMEOUT) == (base, base)
    weights = rich.wait_and_fetch(base, timeout=TIMEOUT)
    assert weights is not None
    assert torch.equal(weights.state_dict["w"], torch.full((2 * HALF,), float(base + 1)))
    rich.acknowledge(weights)
    seen = ray.get(synchronizer.get_status.remote(), timeout=TIMEOUT).explorers
    assert (seen["rich"].version, seen["poor"].version) == (base + 1, base)

    assert ray.get(poor.update.remote(base, None), timeout=TIMEOUT) == base + 1
    assert ray.get(poor.first_and_last.remote(), timeout=TIMEOUT) == (base + 1, base + 1)
    ray.kill(poor)
