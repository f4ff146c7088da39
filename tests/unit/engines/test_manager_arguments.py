"""What `FSDPCheckpointManager` is made with, and the reference's ways to say it."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import trainsync
from trainsync.api import env
from trainsync.engines.checkpoints import arguments
from trainsync.engines.checkpoints.arguments import reference_step


@pytest.fixture(scope="module", autouse=True)
def one_rank() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture
def made() -> tuple[Any, ...]:
    model = torch.nn.Linear(1, 1)
    return model, torch.optim.SGD(model.parameters()), None, None, None


def test_a_manager_of_a_namespace_is_that_of_the_environments_run(
    made: tuple[Any, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without Ray: that a Synchronizer is asked for is what the error says."""
    monkeypatch.setenv(env.CHECKPOINT_DIR, str(tmp_path))
    for namespace in ("", f"trainsync-{tmp_path.name}-1"):
        with pytest.raises(Exception, match=r"call ray\.init\(\) first"):
            trainsync.FSDPCheckpointManager(*made, ray_namespace=namespace)
    with pytest.raises(ValueError, match="ray_namespace is 'other'; expected 'trainsync-"):
        trainsync.FSDPCheckpointManager(*made, ray_namespace="other")


def test_two_ways_to_say_the_run_are_refused(made: tuple[Any, ...], tmp_path: Path) -> None:
    with trainsync.RunContext.from_env(tmp_path) as ctx:
        with pytest.raises(TypeError, match="ray_namespace='ns' is given with coordinator= or"):
            trainsync.FSDPCheckpointManager(
                *made, coordinator=ctx.coordinator(), ray_namespace="ns"
            )
        with pytest.raises(TypeError, match="takes no ray_namespacce; expected coordinator, sync"):
            trainsync.FSDPCheckpointManager(
                *made, coordinator=ctx.coordinator(), ray_namespacce="ns"
            )
        manager = trainsync.FSDPCheckpointManager(
            *made, coordinator=ctx.coordinator(), trust_remote_code=False
        )
        with pytest.raises(TypeError, match=r"expected save_checkpoint\(local_path, global_step=N"):
            manager.save_checkpoint(str(tmp_path / "global_step_5/actor"), 5, 3)
        manager.save_checkpoint(str(tmp_path / "global_step_5/actor"), 5)
        manager.wait_on_save_thread(60)
    assert (tmp_path / "global_step_5/MANIFEST.checkpoint.json").exists()


def test_a_manager_without_a_run_says_how_to_give_one(made: tuple[Any, ...]) -> None:
    with pytest.raises(TypeError, match=r"expected coordinator=ctx\.coordinator\(\), and sync"):
        trainsync.FSDPCheckpointManager(*made)


def test_a_step_in_the_second_place_is_the_references_step() -> None:
    assert reference_step(5, 0, False) == (None, 5)
    assert reference_step(None, 5, True) == (None, 5)
    assert reference_step("hdfs://x", 5, False) == ("hdfs://x", 5)
    with pytest.raises(ValueError, match="hdfs_path is 'hdfs://x'; expected None"):
        arguments.refuse_hdfs("hdfs://x")
    for given in ((5, 6, False), (5, 0, True), (True, 0, False), (1.5, 0, False)):
        with pytest.raises(TypeError, match="the second argument of save_checkpoint is"):
            reference_step(*given)
