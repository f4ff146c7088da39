"""Two ranks saved; one, three and four ranks on other meshes go on, and two again after three."""

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from trainsync import RunContext, all_ranks, load_sharded, training_state

from tests.distributed.checkpoint.resume_job import Job, build_model, whole_state
from tests.distributed.ranks import run_ranks, values_of

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(150)]

SAVED = 4


def start_over(states: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Any sensible function of all ranks' states; this one begins a new order."""
    return {"order": torch.empty(0, dtype=torch.long), "generator": states[0]["generator"]}


def train(directory: Path | str, last: int) -> dict[str, Any]:
    job = Job(directory, combine=start_over)
    before = job.whole()
    losses = job.run(last)
    result = {
        "losses": losses,
        "before": before,
        "after": job.whole(),
        "restored": () if job.loaded is None else job.loaded.restored,
        "not_restored": {} if job.loaded is None else job.loaded.not_restored,
        "seen": job.seen,
        "lr": job.schedule.get_last_lr(),
    }
    job.close()
    return result


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    directory = tmp_path_factory.mktemp("run") / "two"
    return directory, values_of(run_ranks(train, directory, SAVED))[0]


@pytest.mark.parametrize("ranks", [1, 3])
def test_another_number_of_ranks_goes_on_with_equal_weights_and_moments(
    two_ranks: tuple[Path, dict[str, Any]], tmp_path: Path, ranks: int
) -> None:
    source, saved = two_ranks
    directory = Path(shutil.copytree(source, tmp_path / "run"))
    resumed = values_of(run_ranks(train, directory, SAVED + 2, world_size=ranks))
    for result in resumed:
        assert result["before"] == saved["after"]
        assert list(result["losses"]) == [SAVED + 1, SAVED + 2]
        assert result["after"] != result["before"]
        assert result["seen"] == SAVED + 2
        assert result["restored"] == ("model", "optimizer", "scheduler", "dataloader")
        assert result["not_restored"] == {"rng": "it was saved by 2 ranks, each with its own"}
    # What the other number of ranks committed is resumed from by the first number.
    back = values_of(run_ranks(train, directory, SAVED + 4))
    assert [result["before"] for result in back] == [resumed[0]["after"]] * 2
    assert all(len(result["losses"]) == 2 for result in back)


def on_two_dimensions(directory: Path) -> dict[str, Any]:
    """Load on meshes of two dimensions, and save from one."""
    dist.init_process_group("gloo")
    context = RunContext.from_env(directory)
    resume = context.resume()
    assert resume is not None
    found: dict[str, Any] = {}
    for name in ("replicated", "tensor parallel"):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))
        model = build_model()
        if name == "replicated":
            fully_shard(model, mesh=mesh)
        else:
            plan = {"0": ColwiseParallel(), "3": RowwiseParallel()}
            model = parallelize_module(model, mesh["inner"], plan)
            fully_shard(model, mesh=mesh["outer"])
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
        loaded = load_sharded(resume, model=model, optimizer=optimizer, timeout=30)
        found[name] = whole_state(model, optimizer)
        found["placements"] = {str(p.placements) for p in model.state_dict().values()}
        found["restored"] = loaded.restored
        found["not_restored"] = sorted(loaded.not_restored)
    coordinator = context.coordinator()
    coordinator.save_async("model", model.state_dict(), SAVED + 1)
    coordinator.save_async("optim", optimizer.state_dict(), SAVED + 1)
    coordinator.save_async("extra_state", training_state(), SAVED + 1)
    coordinator.wait_all(60)
    if dist.get_rank() == 0:
        import asyncio

        everyone = all_ranks("model", "optim", "extra_state", world_size=4)
        asyncio.run(
            coordinator.register_and_monitor(
                SAVED + 1, checkpoint_participants=everyone, timeout=60
            )
        )
    dist.barrier()
    context.close()
    return found


def test_meshes_of_two_dimensions_are_loaded_and_saved(
    two_ranks: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    source, saved = two_ranks
    directory = Path(shutil.copytree(source, tmp_path / "run"))
    for found in values_of(run_ranks(on_two_dimensions, directory, world_size=4)):
        assert found["replicated"] == saved["after"]
        assert found["tensor parallel"] == saved["after"]
        assert any("_StridedShard" in placement for placement in found["placements"])
        assert found["restored"] == ("model", "optimizer")
        assert found["not_restored"] == ["dataloader", "rng", "scheduler"]
    # And one process without a process group takes what the four saved.
    with RunContext.from_env(directory, environ={}) as context:
        resume = context.resume()
        assert resume is not None
        assert resume.step == SAVED + 1
        model = build_model()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
        load_sharded(resume, model=model, optimizer=optimizer)
        assert whole_state(model, optimizer) == saved["after"]
