"""What an import of the library may load."""

import subprocess
import sys

import pytest
import trainsync

HEAVY = ("torch", "ray", "numpy", "kubernetes", "fastapi")
# A fifth of what a trainer takes to start, for processes that shard nothing.
SHARDING = ("torch.distributed.tensor", "torch.distributed.fsdp")


def loaded_by(statement: str, modules: tuple[str, ...] = HEAVY) -> set[str]:
    code = f"{statement}; import sys; print(*(m for m in {modules!r} if m in sys.modules))"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    return set(done.stdout.split())


@pytest.mark.parametrize(
    "statement",
    [
        "import trainsync",
        "import trainsync.api.protocol, trainsync.storage.saves.manifest",
        "import trainsync.runtime.context",
        "from trainsync import RunContext, Resume",
        "import trainsync.checkpoint.load.resume",
    ],
)
def test_joining_a_run_loads_neither_torch_nor_ray(statement: str) -> None:
    assert loaded_by(statement) == set()


def test_a_trainer_and_an_explorer_load_what_shards_a_model_only_if_they_use_it() -> None:
    names = "CheckpointCoordinator, ExplorerClient, ModuleEngine, WeightPublisher, load_sharded"
    assert loaded_by(f"from trainsync import {names}", SHARDING) == set()


def test_every_public_name_is_there() -> None:
    for name in trainsync.__all__:
        assert getattr(trainsync, name).__name__ == name
        assert name in dir(trainsync)


def test_a_name_that_is_none_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = trainsync.nothing
