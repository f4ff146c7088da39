"""Whole checkpoints of verl's Megatron engine with our ``external_lib``."""

import asyncio
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from trainsync import all_ranks
from trainsync.api.protocol import SaveKind
from trainsync.storage.layout import RunDirectory
from trainsync.storage.saves.pointers import read_pointer

from tests.distributed.engines.fsdp_models import Content, content
from tests.distributed.engines.megatron_job import Results, said, weights

HOOK = "trainsync.integrations.verl.checkpoints"
POINTER_SECONDS = 60.0


def hooked(directory: Path, model: Path) -> Results:
    """A verl run with our ``external_lib`` and no other change."""
    from tests.distributed.engines import megatron_cpu

    run = RunDirectory(directory / "hooked")
    os.environ["TRAINSYNC_CHECKPOINT_DIR"] = str(run.root)
    os.environ["TRAINSYNC_VERL_TOTAL_STEPS"] = "1"
    contents = ("model", "optimizer", "extra")

    def make(tp: int = 2) -> Any:
        return megatron_cpu.make_engine(model, tp=tp, contents=contents, external_lib=HOOK)

    def place(step: int) -> str:
        return str(run.root / f"global_step_{step}" / "actor")

    def next_step(engine: Any) -> Results:
        numbers = torch.rand(3).tolist()
        megatron_cpu.train(engine, 2)
        rate = engine.optimizer.param_groups[0]["lr"]
        return {"numbers": numbers, "weights": weights(engine), "rate": rate}

    engine = make()
    megatron_cpu.train(engine, 1)
    torch.manual_seed(7 + dist.get_rank())
    engine.save_checkpoint(place(1), None, 1)
    committed = dist.get_rank() > 0 or run.manifest(SaveKind.CHECKPOINT, 1).exists()
    seen: Results = {"committed": committed, "went on": next_step(engine)}
    dist.barrier()
    fresh = make()
    torch.manual_seed(0)
    fresh.load_checkpoint(place(1), None, False)
    seen["resumed"] = next_step(fresh)
    fresh.checkpoint_mananager.checkpoint_load_contents = ["model"]
    fresh.load_checkpoint(place(1), None, False)
    seen["weights alone"] = next_step(fresh)
    data_parallel = make(tp=1)
    data_parallel.load_checkpoint(place(1), None, False)
    data_parallel.save_checkpoint(place(2), None, 2)
    back = make()
    back.load_checkpoint(place(2), None, False)
    back.save_checkpoint(place(3), None, 3)
    seen["reshaped"] = next_step(back)
    seen["broken"] = broken_checkpoint(back, place(4))
    seen["by the engine"] = written_by_the_release_before(make, place(5), next_step)
    seen["pointer"] = wait_for_pointer(run, 5)
    seen["critic"] = actor_and_critic(model, run)
    return seen


def actor_and_critic(model: Path, run: RunDirectory) -> Results:
    """Two models of a run: saved one after another, committed together, and resumed."""
    from tests.distributed.engines import megatron_cpu

    contents, step = ("model", "optimizer", "extra"), 6

    def make() -> dict[str, Any]:
        return {
            name: megatron_cpu.make_engine(
                model, tp=2, contents=contents, external_lib=HOOK, critic=name == "critic"
            )
            for name in ("actor", "critic")
        }

    def next_step(engine: Any) -> Results:
        megatron_cpu.train(engine, 2)
        return {"weights": _shards(engine), "rate": engine.optimizer.param_groups[0]["lr"]}

    engines = make()
    for name, engine in engines.items():
        megatron_cpu.train(engine, 1)
        engine.save_checkpoint(str(run.step(step) / name), None, step)
    pointer = wait_for_pointer(run, step) if dist.get_rank() == 0 else step
    went_on = {name: next_step(engine) for name, engine in engines.items()}
    dist.barrier()
    fresh = make()
    for name, engine in fresh.items():
        engine.load_checkpoint(str(run.step(step) / name), None, False)
    resumed = {name: next_step(engine) for name, engine in fresh.items()}
    return {"pointer": pointer, "went on": went_on, "resumed": resumed}


def _shards(engine: Any) -> dict[str, Content]:
    """This rank's parameters; a critic's have no names in Hugging Face."""
    return {
        name: content(parameter)
        for chunk in engine.module
        for name, parameter in chunk.named_parameters()
    }


def written_by_the_release_before(
    make: Callable[..., Any], place: str, next_step: Callable[[Any], Results]
) -> Results:
    """A checkpoint in which the engine wrote optimizer and random numbers for itself."""
    from trainsync.engines.checkpoints.save_plan import ENGINE
    from trainsync.engines.megatron.layout import ParallelLayout
    from trainsync.engines.megatron.state_dicts import save_by_engine, save_weights
    from trainsync.engines.verl.adapters import VerlMegatronEngine
    from trainsync.integrations.verl import checkpoints as hook

    from tests.distributed.engines import megatron_cpu

    step, ranks = 5, dist.get_world_size()
    engine = make()
    del engine.save_checkpoint  # restores the engine's own method
    megatron_cpu.train(engine, 1)
    trained, layout = VerlMegatronEngine(engine), ParallelLayout()
    coordinator = hook._context().coordinator()
    save_weights(trained, "actor", step, coordinator, layout, is_state_dict=True)
    if dist.get_rank() == 0:
        coordinator.register(
            step,
            state_dict_participants=all_ranks("model", world_size=ranks),
            checkpoint_participants=all_ranks(ENGINE, world_size=ranks),
        )
    contents = ("optimizer", "extra")
    save_by_engine(
        trained, ENGINE, contents, "actor", step, coordinator, layout, is_state_dict=False
    )
    coordinator.wait_all(60)
    asyncio.run(coordinator.register_and_monitor(step, timeout=60))
    dist.barrier()
    seen: Results = {"went on": next_step(engine)}
    fresh = make()
    fresh.optimizer.step()  # without Transformer Engine a load needs an earlier step
    fresh.load_checkpoint(place, None, False)
    megatron_cpu.own_steps(fresh)
    seen["resumed"] = next_step(fresh)
    seen["other layout"] = refused_layout(fresh, place)
    return seen


def wait_for_pointer(run: RunDirectory, step: int) -> int | None:
    """Wait for the pointer, which moves after the manifest that ends a wait for the commit."""
    deadline = time.monotonic() + POINTER_SECONDS
    while (found := read_pointer(run, SaveKind.CHECKPOINT)) != step:
        if time.monotonic() > deadline:
            break
        time.sleep(0.02)  # polling interval
    return found


def refused_layout(engine: Any, place: str) -> str:
    """The error for an optimizer saved in another layout."""
    from trainsync.engines.megatron import checkpoints

    class Other(checkpoints.ParallelLayout):
        def __init__(self) -> None:
            super().__init__()
            self.sizes = {**self.sizes, "tp": 1, "dp": 2}

    ours = checkpoints.ParallelLayout
    checkpoints.ParallelLayout = Other  # type: ignore[misc]
    try:
        return said(lambda: engine.load_checkpoint(place, None, False))
    finally:
        checkpoints.ParallelLayout = ours  # type: ignore[misc]


def broken_checkpoint(engine: Any, place: str) -> Results:
    """Rank 1's engine fails in its own write; returns each rank's error."""
    from trainsync.engines.verl.install import _COMMITS
    from trainsync.integrations.verl import checkpoints as hook

    manager = engine.checkpoint_mananager
    before = manager.checkpoint_save_contents = ["model", "optimizer", "extra", "hf_model"]
    seen: list[list[str]] = []

    def save(**options: Any) -> None:
        seen.append(list(manager.checkpoint_save_contents))
        if dist.get_rank() == 1:
            raise RuntimeError("the disk is on fire")

    manager.save_checkpoint, theirs = save, manager.save_checkpoint
    # The engine's code after its manager's call would wait for the rank that raised.
    dist.barrier, barrier = lambda *args, **kwargs: None, dist.barrier
    try:
        told = said(lambda: engine.save_checkpoint(place, None, 4))
    finally:
        manager.save_checkpoint, dist.barrier = theirs, barrier
    if dist.get_rank() == 0:
        # The monitor may tell of the abort only now: the next save is not to raise it again.
        said(lambda: _COMMITS[hook._context()].watch.wait(60))
    dist.barrier()
    return {"told": told, "within": seen, "after": list(manager.checkpoint_save_contents) == before}
