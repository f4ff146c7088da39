"""The method ``memory`` with delta: an explorer on another node fetches only what changed.

Both nodes are Rays on this machine; the trainer is on the one, explorers are on both.
"""

from collections.abc import Iterator
from typing import Any

import pytest
import ray
import torch
from ray.cluster_utils import Cluster
from trainsync import ExplorerClient, Synchronizer, Uploader
from trainsync.weights.transports.object_store.fetcher import MemorySource

from tests.distributed.engines.fsdp_models import Content, content
from tests.distributed.processes.forked_workers import forking_python
from tests.distributed.small_ray.starting import small_ray

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(240)]

ELEMENTS = 1 << 20  # of two bytes
FAR = "another-node"
TIMEOUT = 90


@pytest.fixture(scope="module")
def two_nodes(request: pytest.FixtureRequest) -> Iterator[None]:
    ray.cloudpickle.register_pickle_by_value(request.module)
    store = {"object_store_memory": 80 << 20, "num_cpus": 1}
    with pytest.MonkeyPatch.context() as patch, small_ray():
        # It writes the address where every `ray.init()` of this machine looks for one.
        patch.setattr(ray._private.utils, "write_ray_address", lambda *_: None)
        cluster = Cluster(True, head_node_args={**store, "include_dashboard": False})
    try:
        with small_ray():
            cluster.add_node(**store, resources={FAR: 4})
        ray.init(
            address=cluster.address,
            log_to_driver=False,
            runtime_env={
                "env_vars": {"OMP_NUM_THREADS": "1"},
                "py_executable": forking_python(),
            },
        )
        yield
    finally:
        ray.shutdown()
        cluster.shutdown()
        ray.cloudpickle.unregister_pickle_by_value(request.module)


@pytest.fixture
def synchronizer(two_nodes: None, request: pytest.FixtureRequest) -> Iterator[Any]:
    handle = Synchronizer.create(request.node.name)
    yield handle
    ray.kill(handle)


class Explorer:
    """One explorer, on the node where Ray puts it."""

    def __init__(self, synchronizer: Any, name: str) -> None:
        self._client = ExplorerClient(synchronizer, name, TIMEOUT, MemorySource(delta=True))

    def take(self, version: int, spoil: bool = False) -> tuple[int, dict[str, Content]]:
        """Bytes that were fetched for ``version``, and the tensors."""
        weights = self._client.wait_and_fetch(version - 1)
        assert weights is not None
        assert weights.version == version
        found = {name: content(tensor) for name, tensor in weights.state_dict.items()}
        if spoil:  # a forbidden write, which the digest must detect
            weights.state_dict["bf16"].zero_()
        self._client.acknowledge(weights)
        return weights.bytes, found


def explorer(synchronizer: Any, name: str, *, far: bool) -> Any:
    options: Any = ray.remote(Explorer)
    made = options.options(
        num_cpus=0, resources={FAR: 1} if far else {"node:__internal_head__": 0.01}
    )
    return made.remote(synchronizer, name)


def state(number: int) -> dict[str, torch.Tensor]:
    """Weights of which a step changes about 1 %."""
    generator = torch.Generator().manual_seed(5)
    bf16 = torch.randn(ELEMENTS, generator=generator).bfloat16()
    for turn in range(number):
        bf16[torch.rand(ELEMENTS, generator=torch.Generator().manual_seed(turn)) < 0.01] += 1
    return {"bf16": bf16, "frozen": torch.arange(5000.0), "step": torch.tensor(number)}


def expected(number: int) -> dict[str, Content]:
    return {name: content(tensor) for name, tensor in state(number).items()}


def take(one: Any, version: int, **options: Any) -> int:
    """The bytes that the explorer fetched; it has the trainer's very tensors."""
    fetched, found = ray.get(one.take.remote(version, **options), timeout=TIMEOUT)
    assert found == expected(version)
    return int(fetched)


def test_an_explorer_elsewhere_fetches_what_changed_and_whoever_lacks_the_base_all_of_it(
    synchronizer: Any,
) -> None:
    far = explorer(synchronizer, "far", far=True)
    near = explorer(synchronizer, "near", far=False)
    uploader = Uploader(0, 1, delta=True)
    total = uploader.upload(state(0), synchronizer, 0, TIMEOUT).bytes
    assert take(far, 0) == take(near, 0) == total
    changed = 0
    for version in (1, 2):
        uploader.upload(state(version), synchronizer, version, TIMEOUT)
        changed += (fetched := take(far, version))
        assert 0 < fetched < 0.03 * total
        assert take(near, version) == total, "nothing is copied to it: it reads the node's memory"
    late = explorer(synchronizer, "late", far=True)
    assert take(late, 2) == total
    _, told = ray.get(synchronizer.next_report.remote(0, TIMEOUT), timeout=TIMEOUT)
    ways = {"whole": 2 * total, "delta": changed, "shared_memory": 3 * total}
    assert {way: size for way, size in told.taken.items() if size} == ways
    uploader.upload(state(3), synchronizer, 3, TIMEOUT)  # `far` does not take this one
    assert take(late, 3) < 0.03 * total
    uploader.upload(state(4), synchronizer, 4, TIMEOUT)
    assert take(far, 4) == total
    assert take(late, 4) < 0.03 * total


def test_a_copy_that_was_written_to_is_found_out_and_all_of_it_is_fetched(
    synchronizer: Any,
) -> None:
    far = explorer(synchronizer, "far", far=True)
    uploader = Uploader(0, 1, delta=True)
    total = uploader.upload(state(0), synchronizer, 0, TIMEOUT).bytes
    take(far, 0, spoil=True)
    uploader.upload(state(1), synchronizer, 1, TIMEOUT)
    assert take(far, 1) > total
    uploader.upload(state(2), synchronizer, 2, TIMEOUT)
    assert take(far, 2) < 0.03 * total


def test_a_new_trainer_process_starts_with_all_of_it(synchronizer: Any) -> None:
    far = explorer(synchronizer, "far", far=True)
    total = Uploader(0, 1, delta=True).upload(state(0), synchronizer, 0, TIMEOUT).bytes
    assert take(far, 0) == total
    Uploader(0, 1, delta=True).upload(state(1), synchronizer, 1, TIMEOUT)
    assert take(far, 1) == total
