"""Load a committed Megatron state dict, saved in any parallel layout, into this one."""

import json
import logging
import socket
from contextlib import AbstractContextManager, ExitStack
from typing import Any

import torch

from trainsync.checkpoint.errors import LoadFailedError, LoadPeerLostError, StateMismatchError
from trainsync.checkpoint.load.reshard.shard_files import find_component
from trainsync.checkpoint.load.resume import Resume, require_resume
from trainsync.checkpoint.load.verify import Need, assign, verify
from trainsync.checkpoint.megatron_shards import MegatronShards, describe, require
from trainsync.dist.group_agreement import open_agreement
from trainsync.engines.adapt import adapt
from trainsync.engines.megatron.layout import ParallelLayout
from trainsync.engines.megatron.state import live_tensors, refuse_copies
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

    Every rank calls this function with the same arguments and reads only the files with its part.
    No live tensor changes before every file is verified against the manifest and every rank has
    read its part. An optimizer with its own copy of the weights reloads them
    (``reload_model_params``).

    Args:
        engine: see `megatron_save_state_dict`.
        resume: the committed step; its manifest may be that of a checkpoint or of a state dict.
        subdir: folder inside the step's directory.
        timeout: seconds to wait for the slowest rank, at each of five synchronisation points.

    Raises:
        StateMismatchError: another model; names both parallel layouts.
        UnsupportedStateError: Megatron returns copies of weights, which cannot be loaded in place.
        CorruptCheckpointError: a file is missing, or differs from the manifest.
        LoadFailedError: another rank failed; names the rank and the cause.
    """
    require_resume(resume, "megatron_load_state_dict")
    trained = adapt(engine)
    models = chunks(trained.module)
    load = _WeightsLoad(models, resume, subdir)
    ranks = open_agreement("load", timeout, LoadFailedError, LoadPeerLostError)
    answers = ranks.do("planning to load", load.plan)
    needs = [Need(host, frozenset(paths)) for host, paths in map(json.loads, answers)]
    ranks.do("checking the files", lambda: load.check(assign(needs, load.sizes)[ranks.rank]))
    with ExitStack() as stack:
        ranks.do("bringing the model to its device", lambda: _enter(stack, trained.resident()))
        ranks.do("reading", load.read)
        ranks.do("changing the live state (which may be partly changed)", load.apply)
        optimizer = getattr(trained, "optimizer", None)
        if optimizer is not None and hasattr(optimizer, "reload_model_params"):
            optimizer.reload_model_params()
    logger.info(
        "step %d: weights saved by %s loaded by %s",
        resume.step,
        describe(load.shards.layout),
        load.layout,
    )


def _enter(stack: ExitStack, context: AbstractContextManager[None]) -> str:
    stack.enter_context(context)
    return ""


class _WeightsLoad:
    """One rank's part, phase by phase."""

    shards: MegatronShards

    def __init__(self, models: list[torch.nn.Module], resume: Resume, subdir: str) -> None:
        self.layout = ParallelLayout()
        self.sizes = {entry.path: entry.bytes for entry in resume.manifest.files}
        self._models = models
        self._resume = resume
        self._subdir = subdir
        self._live: list[Any] = []
        self._read: list[torch.Tensor] = []

    def plan(self) -> str:
        resume, subdir = self._resume, self._subdir
        component = find_component(resume.manifest.files, _COMPONENT, subdir)
        if component is None:
            raise StateMismatchError(
                f"step {resume.step} has no component {_COMPONENT} in {subdir}/; it has "
                + ", ".join(sorted(self.sizes)[:5])
            )
        self.shards = MegatronShards(resume.path, component)
        paths: set[str] = set()
        for tensor in self._tensors():
            require(self.shards, tensor.key, tuple(tensor.global_shape), str(self.layout))
            paths |= self.shards.paths(tensor.key)
        return json.dumps([socket.gethostname(), sorted(paths)])

    def check(self, paths: list[str]) -> str:
        for path in paths:
            verify(self._resume, path)
        return ""

    def read(self) -> str:
        # Read only now: moving an offloaded model to its device may give parameters new memory.
        self._live = self._tensors()
        for tensor in self._live:
            size = (1,) * tensor.prepend_axis_num + tuple(tensor.local_shape)
            self._read.append(self.shards.read(tensor.key, tensor.global_offset, size))
        return ""

    @torch.no_grad()
    def apply(self) -> str:
        for tensor, saved in zip(self._live, self._read, strict=True):
            tensor.data.copy_(saved)
        return ""

    def _tensors(self) -> list[Any]:
        found = list(live_tensors(self._models))
        refuse_copies(found, self._models)
        return found
