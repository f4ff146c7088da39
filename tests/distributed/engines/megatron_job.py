"""Functions of ranks with Megatron models, for `test_megatron`. Import Megatron late."""

import asyncio
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from trainsync import (
    Resume,
    RunContext,
    all_ranks,
    failpoints,
    megatron_load_state_dict,
    megatron_save_state_dict,
)
from trainsync.api.protocol import SaveKind
from trainsync.checkpoint.coordinator import CheckpointCoordinator
from trainsync.engines.adapt import adapt
from trainsync.storage.layout import RunDirectory
from trainsync.storage.saves.manifest import read_manifest
from trainsync.storage.saves.receipts import read_receipt

from tests.distributed.engines.fsdp_models import Content, content
from tests.distributed.processes.forked import UNDER_VERL, preload

preload(*UNDER_VERL)

logger = logging.getLogger("test")
Results = dict[str, Any]


def weights(engine: Any) -> dict[str, Content]:
    """Weights of the whole model, in the format of explorers."""
    trained = adapt(engine)
    return {name: content(tensor) for name, tensor in trained.get_per_tensor_param()}


def forget(engine: Any) -> None:
    """Overwrite all weights with zeros."""
    with torch.no_grad():
        for chunk in engine.module:
            for parameter in chunk.parameters():
                parameter.zero_()


def commit(coordinator: CheckpointCoordinator, step: int, timeout: float = 60) -> str:
    """Wait until the step's state dict is committed; returns the error, if any."""
    problem = ""
    try:
        coordinator.wait_all(timeout)
    except Exception as error:  # noqa: BLE001 - the test looks at it
        problem = f"{type(error).__name__}: {error}"
    dist.barrier()  # no commit and cleanup before every rank has seen its receipt
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
        )
        failpoints.enable(failpoints.SAVE, self._phase)

    def save(self, engine: Any, step: int, **options: Any) -> None:
        place = self.directory / f"global_step_{step}" / "actor"
        megatron_save_state_dict(engine, place, step, self.coordinator, logger, **options)

    def close(self) -> None:
        dist.barrier()
        self.context.close()
        failpoints.disable_all()
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
    from tests.distributed.engines import megatron_cpu, megatron_hooked

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
    results["hooked"] = megatron_hooked.hooked(directory, model)
    return results


def said(call: Callable[[], object]) -> str:
    try:
        call()
    except Exception as error:  # noqa: BLE001 - the test looks at it
        return f"{type(error).__name__}: {error}"
    return ""


def written_by_the_engine(run: Run, engine: Any) -> Results:
    """The way of engines that write with their own code."""
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
    # The engine's code after its manager's call would wait for the rank that raised.
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
    results["refused"] = said(
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
    """Expert parallel ranks save step 1, which every layout loads and saves as another step."""
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
        if step > 2:  # the first layout is the one that saved
            engine = megatron_cpu.make_trained(model, load=False, **sizes)
            forget(engine)
        results["zeroed"].append(weights(engine) != results["before"])
        megatron_load_state_dict(engine, resume_from(run.directory, 1), logger)
        results["loaded"][name] = weights(engine)
        run.save(engine, step)
        results["committed"].append(commit(run.coordinator, step))
    # As in models whose first layers have no experts: Megatron then puts layer numbers into names.
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
    """A model of other sizes, with random weights."""
    from transformers import Qwen2Config

    from tests.distributed.engines import megatron_cpu

    if dist.get_rank() == 0:
        config = Qwen2Config.from_pretrained(str(directory / "hf"))
        config.intermediate_size *= 2
        config.save_pretrained(str(directory / "other"))
    dist.barrier()
    return megatron_cpu.make_trained(directory / "other", tp=2, load=False)


class Faulty:
    """A Megatron engine that calls ``fault`` on one rank during its gathers."""

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
