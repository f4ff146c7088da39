"""Saving and resuming by the short calls on several ranks, and from one wrapper into another."""

import os
import shutil
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from trainsync import RunContext, load_sharded
from trainsync.runtime.errors import JoinError

from tests.distributed.processes.forked import preload
from tests.distributed.ranks import run_ranks, values_of

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(150)]

preload("torch._dynamo.repro.after_dynamo", "torch._inductor.compile_fx")  # by torch.compile

STEP = 4
WRAPPERS = ("fsdp2", "ddp", "compiled fsdp2", "plain")


def make(wrapper: str, seed: int) -> tuple[Any, Any]:
    """A model and its optimizer, wrapped."""
    torch.manual_seed(seed)
    model: Any = torch.nn.Sequential(torch.nn.Linear(6, 10), torch.nn.Linear(10, 3))
    if "fsdp2" in wrapper:
        fully_shard(model[0])
        fully_shard(model)
    if wrapper == "compiled fsdp2":
        model = torch.compile(model)
    if wrapper == "ddp":
        model = torch.nn.parallel.DistributedDataParallel(model)
    return model, torch.optim.AdamW(model.parameters(), lr=0.1)


def whole(model: Any, optimizer: Any) -> list[list[float]]:
    """Weights and moments, in the order of the parameters. A collective."""
    tensors: list[Any] = [*model.state_dict().values()]
    for state in optimizer.state_dict()["state"].values():
        tensors += [state["exp_avg"], state["exp_avg_sq"]]
    full = [t.full_tensor() if hasattr(t, "full_tensor") else t for t in tensors]
    return [tensor.flatten().tolist() for tensor in full]


def save(directory: Path, wrapper: str) -> list[list[float]]:
    dist.init_process_group("gloo")
    model, optimizer = make(wrapper, 0)
    for number, parameter in enumerate(model.parameters(), 1):
        parameter.grad = torch.full_like(parameter, 0.1 * number)
    optimizer.step()
    with RunContext.from_env(directory) as ctx:
        assert ctx.resume() is None
        coordinator = ctx.coordinator()
        coordinator.save(STEP, model=model, optimizer=optimizer, extra={"rank": ctx.attempt})
        status = coordinator.finish(STEP, timeout=60)
        assert status is not None
        return whole(model, optimizer)


def load(directory: Path) -> dict[str, list[list[float]]]:
    dist.init_process_group("gloo")
    found = {}
    with RunContext.from_env(directory) as ctx:
        if dist.get_rank() == 0:
            ctx.resume()  # alone, as some do: it does not wait for the others
        dist.barrier()
        resume = ctx.resume()
        assert resume is not None
        for wrapper in WRAPPERS:
            model, optimizer = make(wrapper, 1)
            loaded = load_sharded(resume, model=model, optimizer=optimizer, timeout=30)
            assert loaded.step == STEP
            found[wrapper] = whole(model, optimizer)
        dist.barrier()
        return found


@pytest.mark.parametrize("wrapper", ["fsdp2", "ddp", "compiled fsdp2"])
def test_each_wrapper_resumes_into_every_other(tmp_path: Path, wrapper: str) -> None:
    saved = values_of(run_ranks(save, tmp_path / "run", wrapper))
    for ranks in (2, 1) if wrapper == "fsdp2" else (2,):
        directory = Path(shutil.copytree(tmp_path / "run", tmp_path / f"run-{ranks}"))
        for found in values_of(run_ranks(load, directory, world_size=ranks)):
            assert found == dict.fromkeys(WRAPPERS, saved[0])


def refused(directory: Path) -> str:
    dist.init_process_group("gloo")
    with RunContext.from_env(directory) as ctx:
        dist.barrier()
        try:
            ctx.resume()
        except Exception as error:  # noqa: BLE001 - the test looks at it
            return f"{type(error).__name__}: {error}"
    return "resumed"


def test_what_keeps_rank_0_from_resuming_is_raised_on_every_rank(tmp_path: Path) -> None:
    values_of(run_ranks(save, tmp_path / "run", "plain"))
    manifest = tmp_path / f"run/global_step_{STEP}/MANIFEST.checkpoint.json"
    manifest.write_text("{")
    first, second = values_of(run_ranks(refused, tmp_path / "run"))
    assert first.startswith("NoValidCheckpointError: ")
    assert second.startswith("JoinError: resume: rank 0 could not ask: NoValidCheckpointError: ")


def left_by_rank_0(directory: Path) -> tuple[str, float]:
    dist.init_process_group("gloo")
    ctx = RunContext.from_env(directory)
    ctx.resume()
    dist.barrier()
    told = directory / "told"
    if dist.get_rank() == 0:
        ended = (
            f"for i in $(seq 60); do [ -e {told} ] && break; sleep 1; done; kill -9 {os.getpid()}"
        )
        subprocess.Popen(["bash", "-c", ended])
        os.kill(os.getpid(), signal.SIGSTOP)  # it hosts the store, which answers no more
    began = time.monotonic()
    try:
        ctx.resume()
    except JoinError as error:
        return str(error), time.monotonic() - began
    finally:
        told.touch()
    return "resumed", 0.0


def test_a_rank_0_that_was_stopped_is_not_waited_for(tmp_path: Path) -> None:
    first, second = run_ranks(left_by_rank_0, tmp_path / "run")
    assert first.exit_code == -signal.SIGKILL
    assert second.error is None, second.error
    message, seconds = second.value
    assert message.startswith("resume: ")
    assert "is gone" in message
    assert seconds < 30
