"""What ranks with Megatron models do for `test_engines_megatron`. Import Megatron late."""

import asyncio
import logging
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from trainsync import (
    Resume,
    RunContext,
    all_ranks,
    megatron_load_state_dict,
    megatron_save_state_dict,
)
from trainsync.api.protocol import SaveKind
from trainsync.checkpoint.coordinator import CheckpointCoordinator
from trainsync.checkpoint.save.failpoints import WriteHooks
from trainsync.engines.protocol import adapt
from trainsync.storage.layout import RunDirectory
from trainsync.storage.saves.manifest import read_manifest
from trainsync.storage.saves.pointers import read_pointer
from trainsync.storage.saves.receipts import read_receipt

from tests.distributed.engines.fsdp_models import Content, content
from tests.distributed.forked import UNDER_VERL, preload

preload(*UNDER_VERL)

logger = logging.getLogger("test")
Results = dict[str, Any]

HOOK = "trainsync.integrations.verl.checkpoints"
POINTER_SECONDS = 60.0


def weights(engine: Any) -> dict[str, Content]:
    """Of the whole model, as explorers take them."""
    trained = adapt(engine)
    return {name: content(tensor) for name, tensor in trained.get_per_tensor_param()}


def forget(engine: Any) -> None:
    """What the next optimizer step does, and worse."""
    with torch.no_grad():
        for chunk in engine.module:
            for parameter in chunk.parameters():
                parameter.zero_()


def commit(coordinator: CheckpointCoordinator, step: int, timeout: float = 60) -> str:
    """Wait until the step's state dict is committed; what kept it from that, if anything did."""
    problem = ""
    try:
        coordinator.wait_all(timeout)
    except Exception as error:  # noqa: BLE001 - the test looks at it
        problem = f"{type(error).__name__}: {error}"
    dist.barrier()  # nothing is committed, and tidied away, before every rank has seen its receipt
    try:
        if dist.get_rank() == 0 and not problem:
            model = all_ranks("model", world_size=dist.get_world_size())
            saved = coordinator.register_and_monitor(
                step, is_state_dict=True, state_dict_participants=model, timeout=timeout
            )
            asyncio.run(saved)
    except Exception as error:  # noqa: BLE001 - the test looks at it
        problem = f"{type(error).__name__}: {error}"
    dist.barrier()
    return problem


def resume_from(directory: Path, step: int) -> Resume:
    run = RunDirectory(directory)
    manifest = read_manifest(run, SaveKind.STATE_DICT, step).manifest
    return Resume(step, run.step(step), manifest)


class Run:
    """A run's directory, joined by this rank; keeps this rank's receipts."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.context = RunContext.from_env(directory)
        self.receipts: list[dict[str, int]] = []
        self.coordinator = CheckpointCoordinator(
            self.context.monitor,
            directory,
            rank=dist.get_rank(),
            world_size=dist.get_world_size(),
            hooks=WriteHooks(self._phase),
        )

    def save(self, engine: Any, step: int, **options: Any) -> None:
        place = self.directory / f"global_step_{step}" / "actor"
        megatron_save_state_dict(engine, place, step, self.coordinator, logger, **options)

    def close(self) -> None:
        dist.barrier()
        self.context.close()
        dist.barrier()

    def _phase(self, phase: str) -> None:
        if phase == "receipt":
            name = f"model.{dist.get_rank()}.json"
            for path in self.directory.glob(f".staging/*/state_dict/*/receipts/{name}"):
                self.receipts.append(dict(read_receipt(path).coordinates))


# -- verl's engine ----------------------------------------------------------------------------


def verl_engine(directory: Path) -> Results:
    """Tensor parallelism of two, by verl's own MegatronEngine."""
    dist.init_process_group("gloo")
    from tests.distributed.engines import megatron_cpu

    model = directory / "hf"
    if dist.get_rank() == 0:
        megatron_cpu.make_model(model)
    dist.barrier()
    engine = megatron_cpu.make_engine(model, tp=2)
    run = Run(directory / "run")
    results: Results = {"before": weights(engine)}
    run.save(engine, 1)
    forget(engine)
    results["committed"] = commit(run.coordinator, 1)
    results["receipts"] = list(run.receipts)
    results["zeroed"] = weights(engine) != results["before"]
    megatron_load_state_dict(engine, resume_from(run.directory, 1), logger)
    results["loaded"] = weights(engine)
    results["by the engine"] = written_by_the_engine(run, engine)
    results["broken"] = broken_save(run, engine)
    run.close()
    results["hooked"] = hooked(directory, model)
    return results


def hooked(directory: Path, model: Path) -> Results:
    """A run of verl whose ``external_lib`` is ours; nothing else is different."""
    from tests.distributed.engines import megatron_cpu

    run = RunDirectory(directory / "hooked")
    os.environ["TRAINSYNC_CHECKPOINT_DIR"] = str(run.root)
    os.environ["TRAINSYNC_VERL_TOTAL_STEPS"] = "1"
    contents = ("model", "optimizer", "extra")

    def make(tp: int = 2, lib: str | None = HOOK) -> Any:
        return megatron_cpu.make_engine(model, tp=tp, contents=contents, external_lib=lib)

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
    seen["pointer"] = pointer_once_it_is(run, 5)
    return seen


def written_by_the_release_before(
    make: Callable[..., Any], place: str, next_step: Callable[[Any], Results]
) -> Results:
    """A checkpoint in which the engine wrote optimizer and random numbers for itself."""
    from trainsync.engines.megatron.checkpoints import ENGINE
    from trainsync.engines.megatron.layout import ParallelLayout
    from trainsync.engines.megatron.state_dicts import save_by_engine, save_weights
    from trainsync.engines.verl.adapters import VerlMegatronEngine
    from trainsync.integrations.verl import checkpoints as hook

    from tests.distributed.engines import megatron_cpu

    step, ranks = 5, dist.get_world_size()
    engine = make(lib=None)
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
    fresh.optimizer.step()  # without Transformer Engine it wants to have stepped before it loads
    fresh.load_checkpoint(place, None, False)
    megatron_cpu.own_steps(fresh)
    seen["resumed"] = next_step(fresh)
    seen["other layout"] = refused_layout(fresh, place)
    return seen


def pointer_once_it_is(run: RunDirectory, step: int) -> int | None:
    """A commit is told when its manifest is in place; the pointer moves after that."""
    deadline = time.monotonic() + POINTER_SECONDS
    while (found := read_pointer(run, SaveKind.CHECKPOINT)) != step:
        if time.monotonic() > deadline:
            break
        time.sleep(0.02)  # between two looks
    return found


def refused_layout(engine: Any, place: str) -> str:
    """What is said where the optimizer was saved by another layout."""
    from trainsync.engines.megatron import checkpoints

    class Other(checkpoints.ParallelLayout):
        def __init__(self) -> None:
            super().__init__()
            self.sizes = {**self.sizes, "tp": 1, "dp": 2}

    ours = checkpoints.ParallelLayout
    checkpoints.ParallelLayout = Other  # type: ignore[misc]
    try:
        return _said(lambda: engine.load_checkpoint(place, None, False))
    finally:
        checkpoints.ParallelLayout = ours  # type: ignore[misc]


def broken_checkpoint(engine: Any, place: str) -> Results:
    """Rank 1's engine fails while it writes for itself; what each rank hears of it."""
    manager = engine.checkpoint_mananager
    before = manager.checkpoint_save_contents = ["model", "optimizer", "extra", "hf_model"]
    seen: list[list[str]] = []

    def save(**options: Any) -> None:
        seen.append(list(manager.checkpoint_save_contents))
        if dist.get_rank() == 1:
            raise RuntimeError("the disk is on fire")

    manager.save_checkpoint, theirs = save, manager.save_checkpoint
    # What the engine does after its manager would wait for the rank that raised.
    dist.barrier, barrier = lambda *args, **kwargs: None, dist.barrier
    try:
        told = _said(lambda: engine.save_checkpoint(place, None, 4))
    finally:
        manager.save_checkpoint, dist.barrier = theirs, barrier
    dist.barrier()
    return {"told": told, "within": seen, "after": list(manager.checkpoint_save_contents) == before}


def _said(call: Callable[[], object]) -> str:
    try:
        call()
    except Exception as error:  # noqa: BLE001 - the test looks at it
        return f"{type(error).__name__}: {error}"
    return ""


def written_by_the_engine(run: Run, engine: Any) -> Results:
    """The path of engines that write for themselves."""
    manager = engine.checkpoint_mananager
    run.save(engine, 2, synchronous=True)
    return {
        "committed": commit(run.coordinator, 2),
        "contents": list(manager.checkpoint_save_contents),
        "asynchronous": manager.checkpoint_config.async_save,
        "remembered": list(manager.previous_saved_paths),
    }


def broken_save(run: Run, engine: Any) -> Results:
    """A save in which the engine raises on rank 1."""
    manager = engine.checkpoint_mananager
    seen: list[list[str]] = []
    early: list[bool] = []
    own_file = f"megatron_config_rank_{dist.get_rank()}.json"

    def save(**options: Any) -> None:
        seen.append(list(manager.checkpoint_save_contents))
        early.append((Path(options["local_path"]) / own_file).exists())
        if dist.get_rank() == 1:
            raise RuntimeError("the disk is on fire")
        (Path(options["local_path"]) / "weights").write_bytes(b"")

    manager.save_checkpoint, before = save, manager.save_checkpoint
    # What the engine does after its manager would wait for the rank that raised.
    engine.save_checkpoint, engine_save = save, engine.save_checkpoint
    try:
        run.save(engine, 3, synchronous=True)
        raised = ""
    except Exception as error:  # noqa: BLE001 - the test looks at it
        raised = f"{type(error).__name__}: {error}"
    finally:
        manager.save_checkpoint, engine.save_checkpoint = before, engine_save
    return {
        "raised": raised,
        "committed": commit(run.coordinator, 3, timeout=30),
        "within": seen,
        "written before": early,
        "contents": list(manager.checkpoint_save_contents),
    }


# -- Megatron core alone ----------------------------------------------------------------------


def layouts(directory: Path) -> Results:
    """Step 1 is saved by two pipeline stages, step 2 by two data parallel ranks."""
    dist.init_process_group("gloo")
    from tests.distributed.engines import megatron_cpu

    if dist.get_rank() == 0:
        megatron_cpu.make_model(directory / "hf")
    dist.barrier()
    engine = megatron_cpu.make_trained(directory / "hf", pp=2)
    run = Run(directory / "run")
    results: Results = {"before": weights(engine)}
    run.save(engine, 1)
    forget(engine)
    results["pipeline"] = commit(run.coordinator, 1)
    engine = megatron_cpu.make_trained(directory / "hf")
    run.save(engine, 2)
    forget(engine)
    results["copies"] = commit(run.coordinator, 2)
    engine = megatron_cpu.make_trained(directory / "hf", tp=2)
    for step in (1, 2):
        forget(engine)
        megatron_load_state_dict(engine, resume_from(run.directory, step), logger)
        results[f"loaded {step}"] = weights(engine)
    other = another_model(directory)
    results["refused"] = _said(
        lambda: megatron_load_state_dict(other, resume_from(run.directory, 1), logger)
    )
    run.close()
    results["experts"] = experts(directory / "experts")
    return results


OF_EXPERTS = {
    "ep=2": {"ep": 2},
    "dp=2": {},
    "tp=2": {"tp": 2},
    "tp=2 ep=2": {"tp": 2, "ep": 2, "etp": 1},
}
NUMBERED = 6


def experts(directory: Path) -> Results:
    """Expert parallel ranks save step 1, which every layout loads, and saves as a step again."""
    from tests.distributed.engines import megatron_cpu

    model = directory / "hf"
    if dist.get_rank() == 0:
        megatron_cpu.make_experts(model)
    dist.barrier()
    run = Run(directory / "run")
    engine = megatron_cpu.make_trained(model, ep=2)
    results: Results = {"before": weights(engine), "zeroed": [], "loaded": {}}
    run.save(engine, 1)
    forget(engine)
    results["committed"] = [commit(run.coordinator, 1)]
    for step, (name, sizes) in enumerate(OF_EXPERTS.items(), start=2):
        if step > 2:  # the first is the layout that saved
            engine = megatron_cpu.make_trained(model, load=False, **sizes)
            forget(engine)
        results["zeroed"].append(weights(engine) != results["before"])
        megatron_load_state_dict(engine, resume_from(run.directory, 1), logger)
        results["loaded"][name] = weights(engine)
        run.save(engine, step)
        results["committed"].append(commit(run.coordinator, step))
    # As models have it whose first layers have no experts: Megatron numbers layers in names then.
    engine = megatron_cpu.make_trained(model, ep=2, moe_layer_freq=[1, 1])
    run.save(engine, NUMBERED)
    forget(engine)
    results["committed"].append(commit(run.coordinator, NUMBERED))
    megatron_load_state_dict(engine, resume_from(run.directory, NUMBERED), logger)
    results["loaded"]["numbered layers"] = weights(engine)
    results["receipts"] = list(run.receipts)
    run.close()
    return results


def another_model(directory: Path) -> Any:
    """Of other sizes, with random weights."""
    from transformers import Qwen2Config

    from tests.distributed.engines import megatron_cpu

    if dist.get_rank() == 0:
        config = Qwen2Config.from_pretrained(str(directory / "hf"))
        config.intermediate_size *= 2
        config.save_pretrained(str(directory / "other"))
    dist.barrier()
    return megatron_cpu.make_trained(directory / "other", tp=2, load=False)


class Faulty:
    """A Megatron engine that calls ``fault`` on one rank amid its gathers."""

    def __init__(self, engine: Any, on_rank: int, fault: Callable[[], None]) -> None:
        self.module = engine.module
        self._engine = engine
        self._fault = fault if dist.get_rank() == on_rank else lambda: None

    def get_per_tensor_param(self) -> tuple[Iterator[tuple[str, torch.Tensor]], None]:
        def given() -> Iterator[tuple[str, torch.Tensor]]:
            for number, item in enumerate(adapt(self._engine).get_per_tensor_param()):
                if number == 4:
                    self._fault()
                yield item

        return given(), None
