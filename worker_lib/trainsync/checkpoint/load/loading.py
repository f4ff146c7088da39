"""Load a committed checkpoint: checked against the manifest, without running code.

`load_sharded` takes no reader lease: the monitor keeps the step that the attempt resumed from.
"""

import json
import logging
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch

from trainsync.checkpoint.errors import (
    CorruptCheckpointError,
    LoadFailedError,
    LoadPeerLostError,
    StateMismatchError,
    WorldSizeMismatchError,
)
from trainsync.checkpoint.load.account import LoadedBytes, report
from trainsync.checkpoint.load.reshard.model import ModelLoad
from trainsync.checkpoint.load.reshard.optimizer import OptimizerLoad
from trainsync.checkpoint.load.reshard.read import ComponentRead
from trainsync.checkpoint.load.reshard.shard_files import Component, find_component
from trainsync.checkpoint.load.resume import Resume, require_resume
from trainsync.checkpoint.load.state import Combine, StateLoad
from trainsync.checkpoint.load.step_files import StepFiles
from trainsync.checkpoint.load.verify import Need, assign, verify, verify_all
from trainsync.checkpoint.memory.neighbour.fetching import bring
from trainsync.checkpoint.shard_names import shard_file_name
from trainsync.checkpoint.training_state import LiveState, Stateful
from trainsync.dist.agreement import Agreement
from trainsync.dist.group_agreement import open_agreement

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Loaded:
    """The result of `load_sharded`.

    Attributes:
        step: training goes on after it.
        world_size: ranks that saved the model.
        restored: those of model, optimizer, scheduler, dataloader, generators and rng that go on
            from their saved state.
        not_restored: the others that were saved, or asked for, each with the reason.
        extra: the ``extra`` of ``training_state``: this rank's; rank 0's where another number of
            ranks saved.
        memory_bytes, volume_bytes: of the files that this rank read from memory (see
            ``checkpoint.memory``), and from the volume; of a run in a store, what it read there.
        neighbour_bytes: how many of ``memory_bytes`` came from another pod's memory.
    """

    step: int
    world_size: int
    restored: tuple[str, ...]
    not_restored: Mapping[str, str]
    extra: Mapping[str, Any]
    memory_bytes: int = 0
    volume_bytes: int = 0
    neighbour_bytes: int = 0


def load_sharded(
    resume: Resume,
    *,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    scheduler: Stateful | None = None,
    dataloader: Stateful | None = None,
    generators: Mapping[str, torch.Generator] | None = None,
    rng: bool = True,
    combine_dataloaders: Combine | None = None,
    subdir: str = "actor",
    timeout: float = 1800.0,
) -> Loaded:
    """Go on from a checkpoint; every rank of the default process group calls it alike.

    Loads components ``model`` (of ``model.state_dict()``), ``optim`` (of
    ``optimizer.state_dict()``) and ``extra_state`` (of `trainsync.training_state`), saved by any
    number of ranks: each rank reads the slices that it needs. Call it last before training goes
    on: random numbers that are drawn after it are the next ones of the training.

    Nothing live changes before every rank has read everything, and every file was found to be what
    the manifest says. A rank that fails, or ends, does not keep the others: they raise too.

    Args:
        model: given to ``fully_shard`` (on any mesh), or not sharded.
        rng: whether Python's, numpy's and torch's random numbers go on.
        combine_dataloaders: makes this rank's dataloader state out of those of all ranks that
            saved, in their order; needed where they were another number.
        subdir: folder inside the step's directory.
        timeout: seconds to wait for the slowest rank, at each of six points; and in which a rank
            reads all of its part of a bucket.

    Raises:
        TypeError: ``resume`` is None: there is nothing to load.
        CorruptCheckpointError: a file is missing, cut short or differs; names it.
        StateMismatchError: it does not fit; says what was expected.
        UnsupportedStateError: scheduler or dataloader cannot be restored.
        LoadTimeoutError, StoreError: the bucket was not read in time, or cannot be read.
        LoadFailedError: another rank failed; names it, and its cause.
        PeerLostError: another rank is gone; within 15 s.
    """
    require_resume(resume, "load_sharded")
    began = time.monotonic()
    ranks = open_agreement("load", timeout, LoadFailedError, LoadPeerLostError)
    with StepFiles(resume, began + timeout) as files:
        load = _RankLoad(resume, subdir, ranks, files)
        bring(resume, load.own_paths, files.memory, ranks, timeout / 4)

        def plan() -> str:
            live = LiveState(
                scheduler=scheduler, dataloader=dataloader, generators=generators or {}
            )
            load.plan(model, optimizer, live, rng, combine_dataloaders)
            files.find(load.paths)
            return json.dumps([socket.gethostname(), sorted(files.unchecked(load.paths))])

        answers = [json.loads(answer) for answer in ranks.do("planning to load", plan)]
        needs = [Need(host, frozenset(paths)) for host, paths in answers]
        ranks.do("checking the files", lambda: load.check(needs))
        ranks.do("reading", load.read)
        read = ranks.do("changing the live state (which may be partly changed)", load.apply)
        loaded = load.result(optimizer is not None)
    logger.log(
        logging.INFO if ranks.rank == 0 else logging.DEBUG,
        "step %d, saved by %d ranks: restored %s; not restored: %s; %s",
        loaded.step,
        loaded.world_size,
        ", ".join(loaded.restored),
        "; ".join(f"{name} ({why})" for name, why in loaded.not_restored.items()) or "nothing",
        load.bytes.describe(resume),
    )
    if ranks.rank == 0:
        report(resume, began, map(LoadedBytes.parse, read))
    return loaded


class _RankLoad:
    """One rank's part of a load, phase by phase."""

    def __init__(self, resume: Resume, subdir: str, ranks: Agreement, files: StepFiles) -> None:
        self._resume = resume
        self._files = files
        self._subdir = subdir
        self._ranks = ranks
        self._opened: list[str] = []
        self._parts: list[ModelLoad | OptimizerLoad] = []
        self._state: StateLoad
        self._world_size = 0

    @property
    def paths(self) -> set[str]:
        """Every file that this rank reads."""
        return self._state.paths.union(*(part.paths for part in self._parts))

    def own_paths(self) -> list[str]:
        """The files that the rank of this number saved; none where another number of ranks did."""
        rank, world_size = self._ranks.rank, self._ranks.world_size
        components = [self._component(name) for name in ("model", "optim", "extra_state")]
        return [
            found.path(found.home(rank, world_size))
            for found in components
            if found is not None and found.world_size == world_size
        ]

    def plan(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer | None,
        live: LiveState,
        rng: bool,
        combine: Combine | None,
    ) -> None:
        rank, world_size = self._ranks.rank, self._ranks.world_size
        self._find_own()
        self._state = StateLoad(
            self._files,
            self._component("extra_state"),
            live,
            rank,
            world_size,
            rng=rng,
            combine=combine,
        )
        try:
            self._parts.append(ModelLoad(self._reading("model"), model, rank))
            if optimizer is not None:
                self._parts.append(OptimizerLoad(self._reading("optim"), optimizer, rank))
        except Exception:
            self._raise_damage()
            raise
        for path in self.paths:
            self._resume.entry(path)  # raises when it was not saved

    def _raise_damage(self) -> None:
        """Raise damage of an opened file alone: it is why opening failed."""
        unchecked = self._files.unchecked(self._opened)
        for path in [path for path in self._opened if path in unchecked]:
            try:
                verify(self._resume, path)
            except CorruptCheckpointError as damage:
                raise damage from None

    def check(self, needs: list[Need]) -> str:
        sizes = {entry.path: entry.bytes for entry in self._resume.manifest.files}
        verify_all(self._resume, assign(needs, sizes)[self._ranks.rank])
        return ""

    def read(self) -> str:
        self._files.copy(chain.from_iterable(part.bring() for part in self._parts))
        for part in (*self._parts, self._state):
            part.read()
        return ""

    def apply(self) -> str:
        for part in (*self._parts, self._state):
            part.apply()
        return self.bytes.to_json()

    @property
    def bytes(self) -> LoadedBytes:
        """Progress of this rank's reads."""
        return self._files.bytes(self.paths)

    def result(self, with_optimizer: bool) -> Loaded:
        state, read = self._state, self.bytes
        restored = ["model", *(["optimizer"] if with_optimizer else []), *state.restored]
        not_restored = dict(state.not_restored)
        if not with_optimizer and self._component("optim") is not None:
            not_restored["optimizer"] = "it was saved, and not asked for"
        return Loaded(
            self._resume.step,
            self._world_size,
            tuple(restored),
            not_restored,
            state.extra,
            read.memory,
            read.volume,
            read.neighbour,
        )

    def _find_own(self) -> None:
        """Look in memory for what this rank reads at least, all of it at once."""
        rank, world_size = self._ranks.rank, self._ranks.world_size
        components = [self._component(name) for name in ("model", "optim", "extra_state")]
        self._files.find(
            found.path(found.home(rank, world_size)) for found in components if found is not None
        )

    def _component(self, name: str) -> Component | None:
        return find_component(self._resume.manifest.files, name, self._subdir)

    def _reading(self, name: str) -> ComponentRead:
        component = self._component(name)
        if component is None:
            raise StateMismatchError(
                f"the checkpoint of step {self._resume.step} has no component {name} in "
                f"{self._subdir}/; it has "
                + ", ".join(entry.path for entry in self._resume.manifest.files[:5])
            )
        if name == "model":
            self._world_size = component.world_size
        rank, world_size = self._ranks.rank, self._ranks.world_size
        self._opened.append(component.path(component.home(rank, world_size)))
        return ComponentRead(self._files, component, rank, world_size)


def load_shard(resume: Resume, path: str, map_location: str | torch.device = "cpu") -> Any:
    """One file of the checkpoint, after its size and digest were checked.

    Args:
        path: relative to the step's directory, for instance
            ``actor/model_world_size_2_rank_0.pt``.

    Raises:
        CorruptCheckpointError: missing, or not what the manifest says.
    """
    require_resume(resume, "load_shard")
    with StepFiles(resume) as files:
        return read_shard(resume, files, path, map_location)


def read_shard(
    resume: Resume, files: StepFiles, path: str, map_location: str | torch.device = "cpu"
) -> Any:
    """As `load_shard`, with files that the caller has open."""
    resume.entry(path)  # raises when it was not saved
    verify_all(resume, sorted(files.unchecked([path])))
    return files.load(path, map_location)


def load_rank_shard(
    resume: Resume,
    name: str,
    *,
    rank: int,
    world_size: int,
    subdir: str = "actor",
    map_location: str | torch.device = "cpu",
) -> Any:
    """The state that ``save_async(name, …)`` saved on ``rank``; DTensors need the process group.

    Raises:
        WorldSizeMismatchError: another number of ranks saved it.
        CorruptCheckpointError: see `load_shard`.
    """
    require_resume(resume, "load_rank_shard")
    path = rank_shard_path(resume, name, rank, world_size, subdir)
    return load_shard(resume, path, map_location)


def rank_shard_path(resume: Resume, name: str, rank: int, world_size: int, subdir: str) -> str:
    """Where a rank's state lies, relative to the step's directory. Raises
    `WorldSizeMismatchError`: another number of ranks saved it."""
    component = find_component(resume.manifest.files, name, subdir)
    if component is not None and component.world_size != world_size:
        raise WorldSizeMismatchError(
            f"{name} of step {resume.step} was saved by {component.world_size} ranks and cannot "
            f"be loaded by {world_size}; expected the same number of ranks, or load_sharded, "
            "which makes the shards anew"
        )
    return f"{subdir}/{shard_file_name(name, rank, world_size)}"
