"""The method ``memory`` at its limits: a store with room for one version.

The versions are of 60 MiB, the store is of 100, and Ray may not move to the disk what does not fit.
"""

import uuid
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import ray
import torch
from trainsync import ExplorerClient, Synchronizer, Uploader
from trainsync.weights.errors import (
    DigestMismatchError,
    NothingPublishedError,
    StoreFullError,
)
from trainsync.weights.synchronizer.failover import SynchronizerFailover
from trainsync.weights.transports.object_store.fetcher import MemorySource
from trainsync.weights.transports.object_store.packing import Packing, digest_of_part
from trainsync.weights.versions import PartMeta

from tests.distributed.processes.forked_workers import forking_python
from tests.distributed.small_ray.starting import small_ray

pytestmark = [
    pytest.mark.distributed,
    pytest.mark.timeout(300),
    pytest.mark.usefixtures("small_store"),
]

ELEMENTS = 15 << 20  # of 4 bytes
TIMEOUT = 60


@pytest.fixture(scope="module")
def small_store(request: pytest.FixtureRequest) -> Iterator[None]:
    ray.cloudpickle.register_pickle_by_value(request.module)
    with small_ray():
        ray.init(
            address="local",
            num_cpus=2,
            object_store_memory=100 << 20,
            include_dashboard=False,
            log_to_driver=False,
            runtime_env={
                "env_vars": {"OMP_NUM_THREADS": "1"},
                "py_executable": forking_python(),
            },
            _system_config={"local_fs_capacity_threshold": 0.0},
        )
    yield
    ray.shutdown()
    ray.cloudpickle.unregister_pickle_by_value(request.module)


@pytest.fixture(scope="module")
def shared() -> Any:
    return Synchronizer.create("memory")


@pytest.fixture
def synchronizer(shared: Any) -> Iterator[Any]:
    yield shared
    for name in ray.get(shared.get_status.remote(), timeout=TIMEOUT).explorers:
        ray.get(shared.leave.remote(name), timeout=TIMEOUT)


@pytest.fixture
def base(synchronizer: Any) -> int:
    """A version newer than any that an earlier test published."""
    version: int = ray.get(synchronizer.get_status.remote(), timeout=TIMEOUT).version
    return version + 1


def large(value: float) -> dict[str, torch.Tensor]:
    return {"w": torch.full((ELEMENTS,), float(value))}


def serve(explorer: ExplorerClient, version: int) -> None:
    """Fetch ``version``, look at it, acknowledge it."""
    weights = explorer.wait_and_fetch(version - 1, timeout=TIMEOUT)
    assert weights is not None
    assert weights.version == version
    assert torch.equal(
        weights.state_dict["w"][::4096], torch.full((ELEMENTS // 4096,), float(version))
    )
    explorer.acknowledge(weights)


@pytest.mark.parametrize("kept", [False, True])
def test_each_version_takes_the_room_of_the_one_before(kept: bool) -> None:
    failover = SynchronizerFailover(f"room-{uuid.uuid4()}") if kept else None
    handle = failover.handle if failover else Synchronizer.create(f"room-{uuid.uuid4()}")
    explorer, uploader = ExplorerClient(handle, "e", timeout=TIMEOUT), Uploader(0, 1)
    try:
        for version in range(4):
            uploader.upload(large(version), handle, version, timeout=TIMEOUT)
            serve(explorer, version)
    finally:
        if failover:
            failover.close(TIMEOUT)
        ray.kill(handle)


def test_a_full_store_is_said_and_what_was_published_stays_until_there_is_room(
    synchronizer: Any, base: int
) -> None:
    explorer, uploader = ExplorerClient(synchronizer, "e", timeout=TIMEOUT), Uploader(0, 1)
    uploader.upload(large(base), synchronizer, base, timeout=TIMEOUT)
    with pytest.raises(StoreFullError, match=f"version {base + 1}, rank 0: 62914560 more bytes"):
        uploader.upload(large(base + 1), synchronizer, base + 1, timeout=TIMEOUT)
    serve(explorer, base)
    uploader.upload(large(base + 2), synchronizer, base + 2, timeout=TIMEOUT)
    serve(explorer, base + 2)


def test_who_comes_when_room_was_made_waits_for_the_next_version(
    synchronizer: Any, base: int
) -> None:
    uploader = Uploader(0, 1)
    uploader.upload(large(base), synchronizer, base, timeout=TIMEOUT)
    assert ray.get(synchronizer.make_room.remote(base + 1), timeout=TIMEOUT)
    late = ExplorerClient(synchronizer, "late", timeout=TIMEOUT)
    with pytest.raises(NothingPublishedError, match=f"version {base} has made room"):
        late.fetch()
    uploader.upload(large(base + 1), synchronizer, base + 1, timeout=TIMEOUT)
    serve(late, base + 1)


STATE = {
    "bf16": torch.randn(700, 3).to(torch.bfloat16),
    "fp8": torch.randn(999).to(torch.float8_e4m3fn),
    "scalar": torch.tensor(3, dtype=torch.int64),
    "empty": torch.empty(0, 5),
    "transposed": torch.randn(40, 60).t(),
}


def test_what_comes_out_of_the_store_is_what_went_in_and_is_not_copied(
    synchronizer: Any, base: int
) -> None:
    state = {**STATE, "tied": STATE["bf16"]}
    Uploader(0, 1).upload(state, synchronizer, base, timeout=TIMEOUT)
    explorer = ExplorerClient(synchronizer, "e", timeout=TIMEOUT)
    first = explorer.fetch().state_dict["bf16"]
    fetched = explorer.fetch().state_dict
    assert list(fetched) == list(state)
    for name, tensor in state.items():
        assert fetched[name].dtype == tensor.dtype
        assert torch.equal(fetched[name].float(), tensor.float()), name
    assert fetched["bf16"].data_ptr() == first.data_ptr() == fetched["tied"].data_ptr()


def test_only_the_buckets_with_wanted_tensors_are_fetched(synchronizer: Any, base: int) -> None:
    packing = Packing({"a": torch.ones(8), "b": torch.ones(8)}, rank=0, limit=32)
    buckets = list(packing.buckets())
    digests = tuple(bucket.digest for bucket in buckets)
    part = PartMeta(0, 1, 64, digest_of_part(digests), packing.schema.encode(), digests)
    spoilt = [ray.put(list(buckets[0].arrays)), ray.put([np.zeros(32, np.uint8)])]
    ray.get(synchronizer.set_model_state_dict.remote(spoilt, base, part), timeout=TIMEOUT)

    only_a = ExplorerClient(synchronizer, "a", TIMEOUT, MemorySource(lambda name: name == "a"))
    weights = only_a.fetch()
    assert list(weights.state_dict) == ["a"]
    assert weights.bytes == 32
    assert torch.equal(weights.state_dict["a"], torch.ones(8))
    with pytest.raises(DigestMismatchError, match=f"version {base}, rank 0, bucket 1"):
        ExplorerClient(synchronizer, "all", TIMEOUT).fetch()
