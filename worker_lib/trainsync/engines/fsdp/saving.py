"""Hands one rank's part of a state dict or checkpoint to the coordinator; no rank waits here."""

import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch

from trainsync.checkpoint.coordinator import CheckpointCoordinator
from trainsync.engines.checkpoints.arguments import MERGED
from trainsync.engines.checkpoints.save_plan import EXTRA, HF_MODEL, MODEL, OPTIMIZER, SavePlan
from trainsync.engines.fsdp import training_parts
from trainsync.engines.fsdp.training_parts import State, TrainedParts
from trainsync.engines.hf import export
from trainsync.engines.hf.config import FOLDER, merger_files

# Made once for each module: (tokenizer or processor, {LoRA is merged: the small files}).
_FILES: "weakref.WeakKeyDictionary[torch.nn.Module, tuple[Any, dict[bool, dict[str, bytes]]]]" = (
    weakref.WeakKeyDictionary()
)


def stage_state_dict(
    coordinator: CheckpointCoordinator,
    module: torch.nn.Module,
    weights: State,
    step: int,
    folder: str,
    processing_class: Any,
    attachments: Mapping[str, bytes] | None = None,
    *,
    with_checkpoint: bool = False,
) -> bool:
    """Stage this rank's weights as the step's state dict; whether the coordinator accepted them.

    Args:
        folder: inside the step's directory.
        processing_class: see `PartsSaver`.
        attachments: files that rank 0 writes beside those that a merge of the shards needs.
        with_checkpoint: see `CheckpointCoordinator.save_async`.

    Raises:
        The errors of `CheckpointCoordinator.save_async`.
    """
    small = small_files(coordinator, module, processing_class, merged=folder == MERGED)
    return coordinator.save_async(
        MODEL,
        weights,
        step,
        is_state_dict=True,
        subdir=folder,
        attachments=small | dict(attachments or {}) if coordinator.rank == 0 else {},
        with_checkpoint=with_checkpoint,
    )


def small_files(
    coordinator: CheckpointCoordinator,
    module: torch.nn.Module,
    processing_class: Any,
    *,
    merged: bool = False,
) -> dict[str, bytes]:
    """On rank 0 the small files that a merge of the shards needs; see `merger_files`."""
    if coordinator.rank != 0:
        return {}
    known = _FILES.get(module)
    if known is None or known[0] is not processing_class:
        known = _FILES[module] = processing_class, {}
    if merged not in known[1]:
        ranks = coordinator.world_size
        known[1][merged] = merger_files(module, ranks, processing_class, merged=merged)
    return known[1][merged]


class PartsSaver:
    """Saves a rank's model, optimizer and extra state.

    Args:
        processing_class: tokenizer or processor that goes with the weights, or None.
    """

    def __init__(
        self, coordinator: CheckpointCoordinator, module: torch.nn.Module, processing_class: Any
    ) -> None:
        self._coordinator = coordinator
        self._module = module
        self._processing_class = processing_class
        self._skeleton: Any = None

    def save_state_dict(
        self, folder: str, step: int, weights: State, *, with_checkpoint: bool = False
    ) -> bool:
        """See `stage_state_dict`."""
        return stage_state_dict(
            self._coordinator,
            self._module,
            weights,
            step,
            folder,
            self._processing_class,
            with_checkpoint=with_checkpoint,
        )

    def save(
        self,
        plan: SavePlan,
        step: int,
        states: dict[str, State],
        full: dict[str, torch.Tensor],
    ) -> dict[str, bool]:
        """Whether the coordinator accepted each component.

        Args:
            states: `MODEL`, `OPTIMIZER` and `EXTRA`, those that the plan names.
            full: see `export.gather_full_state`.

        Raises:
            The errors of `CheckpointCoordinator.save_async`.
        """
        taken = {}
        if plan.saves_state_dict:
            weights = states[MODEL]
            taken[MODEL] = self.save_state_dict(plan.folder, step, weights, with_checkpoint=True)
        own = [MODEL] if plan.saves_model and not plan.saves_state_dict else []
        sources: dict[str, Any] = {
            name: states[name] for name in (*own, OPTIMIZER, EXTRA) if name in states
        }
        if plan.export and self._coordinator.rank == 0:
            self._skeleton = self._skeleton or export.skeleton(self._module)
            adapter = export.adapter_config(self._module)
            sources[HF_MODEL] = export.exporter(self._skeleton, full, adapter, FOLDER)
        for number, (name, source) in enumerate(sources.items()):
            # A checkpoint with a state dict gets the small files from there.
            small = self._small_files() if number == 0 and not plan.has_state_dict else {}
            taken[name] = self._coordinator.save_async(
                name, source, step, subdir=plan.folder, attachments=small
            )
        return taken

    def _small_files(self) -> dict[str, bytes]:
        return small_files(self._coordinator, self._module, self._processing_class)


def states_of(
    plan: SavePlan, trained: TrainedParts, rng: Callable[[], State], *, adapter_only: bool
) -> dict[str, State]:
    """The states that the plan names. Tensors alias the trained ones.

    With FSDP1 this is a collective, so it runs first: a later failure leaves no rank waiting.

    Args:
        rng: returns the state of the random generators.
    """
    states = {}
    if plan.saves_model:
        states[MODEL] = training_parts.weights(trained.module, adapter_only=adapter_only)
    if OPTIMIZER in plan.components:
        states[OPTIMIZER] = training_parts.optimizer_state(trained.module, trained.optimizer)
    if EXTRA in plan.components:
        states[EXTRA] = training_parts.extra_state(trained.scheduler, rng())
    return states
