"""Load a committed step of a Megatron model, saved in any parallel layout, into this one."""

import logging
import time
from collections.abc import Mapping
from contextlib import AbstractContextManager, ExitStack
from typing import Any

from trainsync.checkpoint.errors import LoadFailedError, LoadPeerLostError, StateMismatchError
from trainsync.checkpoint.load.account import LoadedBytes, report
from trainsync.checkpoint.load.reshard.shard_files import Component, find_component
from trainsync.checkpoint.load.resume import Resume, require_resume
from trainsync.checkpoint.load.step_files import StepFiles
from trainsync.dist.group_agreement import open_agreement
from trainsync.engines.adapt import adapt
from trainsync.engines.checkpoints.save_plan import EXTRA, MODEL, OPTIMIZER
from trainsync.engines.megatron.step_shards import StepShards
from trainsync.engines.megatron.training_loading import MegatronOptimizerLoad, RandomLoad
from trainsync.engines.megatron.weights_loading import WeightsLoad
from trainsync.engines.verl.adapters import chunks


def megatron_load_state_dict(
    engine: Any,
    resume: Resume,
    logger: logging.Logger,
    *,
    subdir: str = "actor",
    timeout: float = 1800.0,
) -> None:
    """Load the weights that `megatron_save_state_dict` saved, in any parallel layout.

    Every rank calls this function with the same arguments and reads only the files with its part,
    from memory where they lie there (see ``checkpoint.memory``), else from the volume; of a bucket
    it reads only the ranges with its part. No live tensor changes before every file, or range, is
    verified and every rank has read its part. An optimizer with its own copy of the weights
    reloads them (``reload_model_params``).

    Args:
        engine: see `megatron_save_state_dict`.
        resume: the committed step; its manifest may be that of a checkpoint or of a state dict.
        subdir: folder inside the step's directory.
        timeout: seconds to wait for the slowest rank, at each of at most eight synchronisation
            points; and in which a rank reads all of its part of a bucket.

    Raises:
        StateMismatchError: another model; names both parallel layouts.
        UnsupportedStateError: Megatron returns copies of weights, which cannot be loaded in place.
        CorruptCheckpointError: a file is missing, or differs from the manifest.
        LoadTimeoutError, StoreError: the bucket was not read in time, or cannot be read.
        LoadFailedError: another rank failed; names the rank and the cause.
    """
    require_resume(resume, "megatron_load_state_dict")
    _load(engine, resume, {MODEL: component_of(resume, MODEL, subdir)}, logger, timeout)


def megatron_load_checkpoint(
    engine: Any,
    resume: Resume,
    logger: logging.Logger,
    *,
    subdir: str = "actor",
    timeout: float = 1800.0,
) -> None:
    """Go on from what `megatron_save_checkpoint` saved, in any parallel layout.

    Loads weights; with an optimizer its state and schedule; and, where they were saved, random
    numbers, whose generators start anew in another layout than the one that saved them. Reads as
    `megatron_load_state_dict` does, and changes nothing live before every rank has read all of its
    part.

    Args:
        engine: as it was saved, of any layout.
        resume, subdir, timeout: see `megatron_load_state_dict`.

    Raises:
        StateMismatchError: another model or optimizer, or the checkpoint has none.
        UnsupportedStateError: a trained weight is not in the model's ``sharded_state_dict``.
        And as `megatron_load_state_dict`.
    """
    require_resume(resume, "megatron_load_checkpoint")
    has_optimizer = getattr(adapt(engine), "optimizer", None) is not None
    names = [MODEL, OPTIMIZER] if has_optimizer else [MODEL]
    components = {name: component_of(resume, name, subdir) for name in names}
    random = find_component(resume.manifest.files, EXTRA, subdir)
    if random is not None:
        components[EXTRA] = random
    _load(engine, resume, components, logger, timeout)


def component_of(resume: Resume, name: str, subdir: str) -> Component:
    """A component of the step.

    Raises:
        StateMismatchError: it was not saved.
        CorruptCheckpointError: there are files of two numbers of ranks.
    """
    component = find_component(resume.manifest.files, name, subdir)
    if component is None:
        raise StateMismatchError(
            f"step {resume.step} has no component {name} in {subdir}/; it has "
            + ", ".join(sorted(entry.path for entry in resume.manifest.files)[:5])
        )
    return component


def load_state(
    engine: Any,
    shards: StepShards,
    components: Mapping[str, Component],
    logger: logging.Logger,
    *,
    with_schedule: bool = True,
) -> None:
    """Load components of a committed step; all ranks pass the same arguments.

    Args:
        engine: a `TrainingEngine`; for ``optim`` with ``optimizer``, and perhaps ``lr_scheduler``.
        components: by name; of ``model``, ``optim`` and ``extra_state``.
        with_schedule: whether the saved schedule is loaded, too.

    Raises:
        See `megatron_load_checkpoint`.
    """
    ranks = shards.ranks
    loads: list[WeightsLoad | MegatronOptimizerLoad | RandomLoad] = []

    def plan() -> set[str]:
        models, optimizer = chunks(engine.module), getattr(engine, "optimizer", None)
        if MODEL in components:
            loads.append(WeightsLoad(models, optimizer, shards, components[MODEL]))
        if OPTIMIZER in components:
            schedule = getattr(engine, "lr_scheduler", None) if with_schedule else None
            component = components[OPTIMIZER]
            loads.append(MegatronOptimizerLoad(optimizer, schedule, models, shards, component))
        if EXTRA in components:
            loads.append(RandomLoad(shards, components[EXTRA]))  # the last: others may draw numbers
        return set().union(*(load.plan() for load in loads))

    def read() -> str:
        for load in loads:
            load.read()
        return ""

    def apply() -> str:
        for load in loads:
            load.apply()
        return ""

    with ExitStack() as stack:
        ranks.do("bringing the model to its device", lambda: _enter(stack, engine.resident()))
        shards.check(plan, "planning to load")
        ranks.do("reading", read)
        ranks.do("changing the live state (which may be partly changed)", apply)
    for load in loads:
        logger.info("step %d: %s", shards.resume.step, load.describe())


def _load(
    engine: Any,
    resume: Resume,
    components: Mapping[str, Component],
    logger: logging.Logger,
    timeout: float,
) -> None:
    began = time.monotonic()
    ranks = open_agreement("load", timeout, LoadFailedError, LoadPeerLostError)
    with StepFiles(resume, began + timeout) as files:
        shards = StepShards(resume, files, ranks)
        shards.bring(components.values(), timeout / 4)
        load_state(adapt(engine), shards, components, logger)
        read = shards.bytes
    everyone = ranks.do("ending the load", read.to_json)
    if ranks.rank == 0:
        logger.info("step %d: %s", resume.step, read.describe(resume))
        report(resume, began, map(LoadedBytes.parse, everyone))


def _enter(stack: ExitStack, context: AbstractContextManager[None]) -> str:
    stack.enter_context(context)
    return ""
