"""Load the state saved by `trainsync.engines.megatron.training` in any parallel layout."""

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch

from trainsync.checkpoint.errors import CorruptCheckpointError, StateMismatchError
from trainsync.checkpoint.load.reshard.shard_files import Component
from trainsync.checkpoint.megatron_shards import (
    MegatronShards,
    WantedBox,
    describe,
    is_megatron,
    require,
)
from trainsync.checkpoint.training_state import check_rng_state, set_rng_state
from trainsync.engines.megatron.layout import ParallelLayout
from trainsync.engines.megatron.optimizer import (
    PREFIX,
    OptimizerShard,
    Region,
    distributed_optimizers,
    pieces,
)
from trainsync.engines.megatron.step_shards import StepShards
from trainsync.engines.megatron.training import (
    GROUPS,
    RNG,
    SCALER,
    SCHEDULE,
    TRACKER,
    counts_for_each_weight,
    identity,
)

logger = logging.getLogger(__name__)

_FP32_PARAM: Final = f"{PREFIX}fp32_param."
_STEP: Final = "step"


_Groups = Mapping[tuple[Any, ...], tuple[int, Mapping[str, Any]]]
"""For each of a rank's parameter groups: a rank that saved the group, and the saved group."""


@dataclass(frozen=True)
class _Saved:
    """The part of the saved state that a rank takes.

    Attributes:
        home: the saved rank whose scaler and schedule are taken.
        names: of the state of a weight, such as ``fp32_param``.
    """

    shards: MegatronShards
    home: int
    names: Sequence[str]
    groups: _Groups


class MegatronOptimizerLoad:
    """One rank's part of loading ``optim``: `plan`, then `read` and `apply` when all files were
    checked.

    Args:
        schedule: Megatron's OptimizerParamScheduler; None leaves the schedule unchanged.
        chunks: a model for each virtual pipeline stage, without wrappers, on their device.

    Raises:
        StateMismatchError: this kind of optimizer cannot be loaded.
    """

    def __init__(
        self,
        optimizer: Any,
        schedule: Any,
        chunks: Sequence[torch.nn.Module],
        step: StepShards,
        component: Component,
    ) -> None:
        found = distributed_optimizers(optimizer)
        if found is None:
            raise StateMismatchError(
                f"step {step.resume.step} has the state of Megatron's distributed optimizer, and "
                f"it is loaded into a {type(optimizer).__name__} that is not distributed; "
                "expected use_distributed_optimizer, or load_contents without optimizer"
            )
        self._optimizers = found
        self._schedule = schedule
        self._chunks = chunks
        self._step = step
        self._component = component
        self._layout = ParallelLayout()

    def plan(self) -> set[str]:
        """The files that this rank reads. Changes no state.

        Raises:
            StateMismatchError: another model or other parameter groups; names both layouts.
            CorruptCheckpointError: a file is missing, or the files contradict each other.
            UnsupportedStateError: see `pieces`.
        """
        live = pieces(self._optimizers, self._chunks)
        shards, paths = self._step.open(
            self._component, lambda shards: self._paths(live, self._find(shards))
        )
        self._saved = self._find(shards)
        return paths

    def read(self) -> None:
        """Read of a bucket all of it, into memory; nothing live changes. What is mapped is read
        when it is applied.

        Raises:
            CorruptCheckpointError: a file is gone, or differs. StoreError, LoadTimeoutError: the
                bucket was not read.
        """
        saved, files = self._saved, self._step.files
        shards = saved.shards
        for rank in {saved.home, *(rank for rank, _ in saved.groups.values())}:
            shards.beside[rank] = files.real(shards.path(rank), shards.beside[rank])
        self._saved = self._find(shards)
        live = pieces(self._optimizers, self._chunks)
        shards.fetch(_wanted(live, saved.names), files.copy)

    @torch.no_grad()
    def apply(self) -> None:
        """Change the live optimizer.

        Raises:
            CorruptCheckpointError: a part of a tensor is missing in the checkpoint.
        """
        saved = self._saved
        for optimizer in self._optimizers:
            _begin(optimizer, saved.names)
        steps = self._steps(saved.groups)
        for piece in pieces(self._optimizers, self._chunks):
            state = {name: _flat(saved.shards, name, piece) for name in saved.names}
            piece.fill(state, steps.get(id(piece.main_weight())))
        self._restore_groups(saved.groups)
        beside = saved.shards.beside[saved.home]
        for optimizer in self._optimizers:
            if optimizer.grad_scaler and beside[SCALER] is not None:
                optimizer.grad_scaler.load_state_dict(beside[SCALER])
        if self._schedule is not None and beside[SCHEDULE] is not None:
            self._schedule.num_steps = 0  # loading adds the saved steps
            self._schedule.load_state_dict(beside[SCHEDULE])

    def describe(self) -> str:
        """What was loaded, for people."""
        return f"optimizer saved by {self._saved.shards.describe()} loaded by {self._layout}"

    # -- inside -------------------------------------------------------------------------------

    def _find(self, shards: MegatronShards) -> _Saved:
        home = self._find_home(shards)
        return _Saved(shards, home, _state_names(shards), self._find_groups(shards, home))

    def _paths(self, live: Sequence[OptimizerShard], saved: _Saved) -> set[str]:
        """The files that hold ``saved``."""
        shards = saved.shards
        paths = {shards.path(rank) for rank, _ in saved.groups.values()}
        paths.add(shards.path(saved.home))
        for piece in live:
            for region in piece.regions:
                shape = tuple(region.tensor.global_shape)
                for box in _boxes(region, saved.names):
                    require(shards, box[0], shape, str(self._layout))
                    paths |= shards.paths_of(*box)
        return paths

    def _find_home(self, shards: MegatronShards) -> int:
        """The saved rank whose groups are taken where several have them: this one, if the ranks
        that saved had the same layout."""
        rank = self._step.ranks.rank
        sizes = {name: shards.layout.get(name) for name in self._layout.sizes}
        same = self._component.world_size == self._step.ranks.world_size
        if same and sizes == self._layout.sizes and rank in shards.beside:
            return rank
        return min(shards.beside)

    def _find_groups(self, shards: MegatronShards, home: int) -> _Groups:
        saved: dict[tuple[Any, ...], tuple[int, Mapping[str, Any]]] = {}
        order = sorted(shards.beside, key=lambda rank: (rank != home, rank))
        for rank, beside in ((rank, shards.beside[rank]) for rank in order):
            for group in beside[GROUPS]:
                known = saved.get(identity(group))
                # A rank without a weight in the group has not saved the group's steps.
                if known is None or (known[1].get(_STEP) is None and group.get(_STEP) is not None):
                    saved[identity(group)] = rank, group
        found = {}
        for optimizer in self._optimizers:
            for group in optimizer.optimizer.param_groups:
                name = identity(group)
                if name not in saved:
                    raise StateMismatchError(
                        f"the checkpoint has no parameter group {name}: it was saved by "
                        f"{shards.describe()} and is loaded by {self._layout}; expected the "
                        "same model and optimizer"
                    )
                found[name] = saved[name]
        return found

    def _steps(self, groups: _Groups) -> dict[int, float]:
        """Step counts of the optimizer's weights that keep one each, by the weight's identity."""
        steps: dict[int, float] = {}
        for optimizer in self._optimizers:
            if counts_for_each_weight(optimizer):
                for group in optimizer.optimizer.param_groups:
                    step = groups[identity(group)][1].get(_STEP)
                    steps |= {id(w): float(step) for w in group["params"] if step is not None}
        return steps

    def _restore_groups(self, groups: _Groups) -> None:
        for optimizer in self._optimizers:
            for group in optimizer.optimizer.param_groups:
                _, saved = groups[identity(group)]
                for key, value in saved.items():
                    if key == _STEP and (counts_for_each_weight(optimizer) or value is None):
                        continue
                    live = group.get(key)
                    if isinstance(live, torch.Tensor) and isinstance(value, torch.Tensor):
                        live.copy_(value)
                    else:
                        group[key] = value.item() if isinstance(value, torch.Tensor) else value


def _state_names(shards: MegatronShards) -> list[str]:
    """``fp32_param`` and the saved state's names; before the first step there are no others."""
    weights = [key for key in shards.tensors if key.startswith(_FP32_PARAM)]
    if not weights:
        return ["fp32_param"]
    # The longest name is no suffix of another name.
    suffix = "." + max(weights, key=len).removeprefix(_FP32_PARAM)
    return [
        key.removeprefix(PREFIX).removesuffix(suffix)
        for key in shards.tensors
        if key.endswith(suffix) and key.startswith(PREFIX)
    ]


def _begin(optimizer: Any, names: Sequence[str]) -> None:
    """Give each weight empty state to fill, or none."""
    inner = optimizer.optimizer
    if names == ["fp32_param"]:
        inner.state.clear()
        return
    optimizer.init_state_fn(inner, optimizer.config)
    if not counts_for_each_weight(optimizer):
        return
    for group in inner.param_groups:
        for weight in group["params"]:
            # Megatron's own load shares one count between all weights, and each weight's step
            # raises it.
            inner.state[weight][_STEP] = torch.zeros((), dtype=torch.float32)


def _wanted(live: Sequence[OptimizerShard], names: Sequence[str]) -> Iterator[WantedBox]:
    """The saved boxes of what a rank's optimizer has."""
    for piece in live:
        for region in piece.regions:
            yield from _boxes(region, names)


def _boxes(region: Region, names: Sequence[str]) -> Iterator[WantedBox]:
    """The boxes of a region in the global tensors of these names."""
    for name in names:
        yield f"{PREFIX}{name}.{region.tensor.key}", region.start, region.size


def _flat(shards: MegatronShards, name: str, piece: OptimizerShard) -> torch.Tensor:
    """The saved state ``name`` of a piece, one-dimensional."""
    flat: torch.Tensor | None = None
    for region in piece.regions:
        (wanted,) = _boxes(region, [name])
        box = shards.read(*wanted)
        if flat is None:
            flat = torch.empty(piece.length, dtype=box.dtype)
        flat[region.elements].copy_(box.reshape(-1))
    assert flat is not None, "a piece has at least one element"
    return flat


class RandomLoad:
    """One rank's part of loading ``extra_state``; used like `MegatronOptimizerLoad`.

    Generators saved in another layout have no rank here: the live generators then stay unchanged.
    """

    def __init__(self, step: StepShards, component: Component) -> None:
        self._resume = step.resume
        self._files = step.files
        self._component = component
        self._rank = step.ranks.rank
        self._same_number = component.world_size == step.ranks.world_size
        self._state: Mapping[str, Any] | None = None

    def plan(self) -> set[str]:
        """See `MegatronOptimizerLoad.plan`.

        Raises:
            StateMismatchError, CorruptCheckpointError: the saved component has unexpected content.
        """
        self._component.home(0, 1)  # raises if the file is missing
        path = self._component.path(self._rank if self._same_number else 0)
        state = self._files.load(path)
        if not is_megatron(state) or TRACKER not in state:
            raise CorruptCheckpointError(f"{path} has no random numbers of a Megatron rank")
        check_rng_state(state[RNG])
        live = ParallelLayout()
        if {name: state["layout"].get(name) for name in live.sizes} == live.sizes:
            self._state = state
        elif self._rank == 0:
            logger.warning(
                "random numbers of step %d were saved by %s and are loaded by %s: generators "
                "start anew",
                self._resume.step,
                describe(state["layout"]),
                live,
            )
        return {path}

    def read(self) -> None:
        """Nothing: `plan` has read the one file."""

    def describe(self) -> str:
        """What was loaded, for people."""
        return "random numbers loaded" if self._state is not None else "random numbers start anew"

    def apply(self) -> None:
        """Restore the saved generators."""
        from megatron.core.tensor_parallel import get_cuda_rng_tracker

        if self._state is not None:
            set_rng_state(self._state[RNG])
            get_cuda_rng_tracker().set_states(dict(self._state[TRACKER]))
