"""Load a committed Megatron state dict, saved in any parallel layout, into this one."""

import logging
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack
from functools import partial
from typing import Any

import torch

from trainsync.checkpoint.errors import LoadFailedError, LoadPeerLostError, StateMismatchError
from trainsync.checkpoint.load.account import LoadedBytes, report
from trainsync.checkpoint.load.reshard.shard_files import find_component
from trainsync.checkpoint.load.resume import Resume, require_resume
from trainsync.checkpoint.megatron_shards import MegatronShards, describe, require
from trainsync.checkpoint.memory.lookup import Sources
from trainsync.dist.group_agreement import open_agreement
from trainsync.engines.adapt import adapt
from trainsync.engines.megatron.layout import ParallelLayout
from trainsync.engines.megatron.state import live_tensors, refuse_copies
from trainsync.engines.megatron.step_shards import StepShards
from trainsync.engines.verl.adapters import chunks

_COMPONENT = "model"


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
    from memory where they lie there (see ``checkpoint.memory``), else from the volume.
    No live tensor changes before every file is verified against the manifest and every rank has
    read its part. An optimizer with its own copy of the weights reloads them
    (``reload_model_params``).

    Args:
        engine: see `megatron_save_state_dict`.
        resume: the committed step; its manifest may be that of a checkpoint or of a state dict.
        subdir: folder inside the step's directory.
        timeout: seconds to wait for the slowest rank, at each of at most eight synchronisation
            points.

    Raises:
        StateMismatchError: another model; names both parallel layouts.
        UnsupportedPlaceError: the step is in a bucket.
        UnsupportedStateError: Megatron returns copies of weights, which cannot be loaded in place.
        CorruptCheckpointError: a file is missing, or differs from the manifest.
        LoadFailedError: another rank failed; names the rank and the cause.
    """
    require_resume(resume, "megatron_load_state_dict")
    began = time.monotonic()
    ranks = open_agreement("load", timeout, LoadFailedError, LoadPeerLostError)
    with Sources(resume) as memory:
        shards = StepShards(resume, memory, ranks)
        found = find_component(resume.manifest.files, _COMPONENT, subdir)
        shards.bring([] if found is None else [found], timeout / 4)
        read = load_weights(engine, shards, logger, subdir)
    everyone = ranks.do("ending the load", read.to_json)
    if ranks.rank == 0:
        logger.info("step %d: %s", resume.step, read.describe(resume))
        report(resume, began, map(LoadedBytes.parse, everyone))


def load_weights(
    engine: Any, shards: StepShards, logger: logging.Logger, subdir: str
) -> LoadedBytes:
    """As `megatron_load_state_dict`; returns the bytes of the files that this rank read."""
    trained = adapt(engine)
    load = _WeightsLoad(chunks(trained.module), shards, subdir)
    ranks = shards.ranks
    read = shards.check(load.plan, "planning to load")
    with ExitStack() as stack:
        ranks.do("bringing the model to its device", lambda: _enter(stack, trained.resident()))
        ranks.do("reading", load.read)
        optimizer = getattr(trained, "optimizer", None)

        def apply() -> str:
            load.apply()
            if optimizer is not None and hasattr(optimizer, "reload_model_params"):
                optimizer.reload_model_params()
            return ""

        ranks.do("changing the live state (which may be partly changed)", apply)
    logger.info(
        "step %d: weights saved by %s loaded by %s",
        shards.resume.step,
        describe(load.shards.layout),
        load.layout,
    )
    return read


def _enter(stack: ExitStack, context: AbstractContextManager[None]) -> str:
    stack.enter_context(context)
    return ""


class _WeightsLoad:
    """One rank's part, phase by phase."""

    shards: MegatronShards

    def __init__(self, models: list[torch.nn.Module], step: StepShards, subdir: str) -> None:
        self.layout = ParallelLayout()
        self._models = models
        self._step = step
        self._subdir = subdir
        self._live: list[Any] = []
        self._read: list[torch.Tensor] = []

    def plan(self) -> set[str]:
        resume, subdir = self._step.resume, self._subdir
        component = find_component(resume.manifest.files, _COMPONENT, subdir)
        if component is None:
            raise StateMismatchError(
                f"step {resume.step} has no component {_COMPONENT} in {subdir}/; it has "
                + ", ".join(sorted(entry.path for entry in resume.manifest.files)[:5])
            )
        needed = partial(self._needed, self._tensors())
        self.shards, paths = self._step.open(component, needed)
        return paths

    def _needed(self, tensors: Sequence[Any], shards: MegatronShards) -> set[str]:
        paths: set[str] = set()
        for tensor in tensors:
            require(shards, tensor.key, tuple(tensor.global_shape), str(self.layout))
            paths |= shards.paths_of(tensor.key, tensor.global_offset, _size(tensor))
        return paths

    def read(self) -> str:
        # Read only now: moving an offloaded model to its device may give parameters new memory.
        self._live = self._tensors()
        for tensor in self._live:
            self._read.append(self.shards.read(tensor.key, tensor.global_offset, _size(tensor)))
        return ""

    @torch.no_grad()
    def apply(self) -> None:
        for tensor, saved in zip(self._live, self._read, strict=True):
            tensor.data.copy_(saved)

    def _tensors(self) -> list[Any]:
        found = list(live_tensors(self._models))
        refuse_copies(found, self._models)
        return found


def _size(tensor: Any) -> tuple[int, ...]:
    """Size of a live tensor's box in its global tensor."""
    leading: int = tensor.prepend_axis_num
    return (1,) * leading + tuple(tensor.local_shape)
