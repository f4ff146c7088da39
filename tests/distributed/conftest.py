"""Fixtures of the tests with Ray."""

import os
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from tests.distributed.processes import ray_environment  # noqa: F401 - set before Ray is imported
from tests.distributed.processes.forked_workers import forking_python

LONGEST = (
    "test_restart_in_place.py",
    "test_faults_slice.py",
    "test_kept_batches.py",
    "test_tiny_grpo.py",
    "test_verl_users.py",
    "test_documented_scripts.py",
    "test_memory_delta.py",
    "test_restart_in_a_bucket.py",
    "test_fsdp_checkpoint_manager.py",
    "test_verl_workers.py",
    "test_synchronizer_faults.py",
    "test_two_clusters.py",
    "test_pacing_ray.py",
    "test_checkpoint_fsdp.py",
    "test_traces.py",
    "test_same_step.py",
    "test_megatron.py",
    "test_synchronizer_hosts.py",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Let the longest files begin first: one that begins last leaves the other worker idle."""
    rank = {name: place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: rank.get(item.path.name, len(rank)))


@pytest.fixture(scope="session")
def ray_address() -> Iterator[str]:
    """The address of a small Ray of all modules that this process runs.

    Each job has a namespace of its own, and its actors end with it. Workers find modules where this
    process does.
    """
    import ray
    from ray.cluster_utils import Cluster

    from tests.distributed.small_ray.starting import small_ray

    resources = {"num_cpus": 4, "object_store_memory": 200 << 20}
    # The log monitor reads the logs of all modules' workers again and again, for no driver.
    without = {"include_dashboard": False, "include_log_monitor": False, "no_monitor": True}
    with pytest.MonkeyPatch.context() as patch, small_ray():
        # It writes the address where every `ray.init()` of this machine looks for one.
        patch.setattr(ray._private.utils, "write_ray_address", lambda *_: None)
        patch.setenv("PYTHONPATH", os.pathsep.join(path for path in sys.path if path))
        cluster = Cluster(True, head_node_args={**resources, **without})
    yield cluster.address
    cluster.shutdown()


@pytest.fixture(scope="session")
def ray_of_ranks(ray_address: str) -> dict[str, Any]:
    """Arguments of ``ray.init`` in a rank, which is a driver of that Ray; workers are forked."""
    runtime_env = {"py_executable": forking_python()}
    return {"address": ray_address, "log_to_driver": False, "runtime_env": runtime_env}


@pytest.fixture(scope="module")
def ray_cluster(request: pytest.FixtureRequest, ray_address: str) -> Iterator[None]:
    """This process is a driver of a small Ray, whose workers get the module's functions by value.

    The workers are forked, see `tests.distributed.processes.forked_workers`.
    """
    import ray

    runtime_env: dict[str, Any] = {
        "env_vars": {"OMP_NUM_THREADS": "1"},
        "py_executable": forking_python(),
    }
    ray.cloudpickle.register_pickle_by_value(request.module)
    ray.init(address=ray_address, log_to_driver=False, runtime_env=runtime_env)
    yield
    ray.shutdown()
    ray.cloudpickle.unregister_pickle_by_value(request.module)
