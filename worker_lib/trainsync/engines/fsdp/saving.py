"""Hands one rank's parts of a checkpoint to the coordinator; no rank waits for another here."""

from collections.abc import Callable
from typing import Any

import torch

from trainsync.checkpoint.coordinator import CheckpointCoordinator
from trainsync.engines.checkpoints.save_plan import EXTRA, HF_MODEL, MODEL, OPTIMIZER, SavePlan
from trainsync.engines.fsdp import training_parts
from trainsync.engines.fsdp.training_parts import State, TrainedParts
from trainsync.engines.hf import export
from trainsync.engines.hf.config import FOLDER, merger_files
from trainsync.engines.verl.arguments import MERGED


class PartsSaver:
    """Saves a rank's model, optimizer and extra state. Caches the small files that never change.

    Args:
        processing_class: tokenizer or processor that goes with the weights, or None.
    """

    def __init__(
        self, coordinator: CheckpointCoordinator, module: torch.nn.Module, processing_class: Any
    ) -> None:
        self._coordinator = coordinator
        self._module = module
        self._processing_class = processing_class
        self._merger_files: dict[bool, dict[str, bytes]] = {}  # key: LoRA is merged
        self._skeleton: Any = None

    def save_state_dict(self, folder: str, step: int, weights: State) -> bool:
        """Whether the coordinator accepted the state dict. Raises as
        `CheckpointCoordinator.save_async`."""
        return self._coordinator.save_async(
            MODEL,
            weights,
            step,
            is_state_dict=True,
            subdir=folder,
            attachments=self._small_files(merged=folder == MERGED),
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
            taken[MODEL] = self.save_state_dict(plan.folder, step, states[MODEL])
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

    def _small_files(self, *, merged: bool = False) -> dict[str, bytes]:
        """On rank 0 the small files that a merge of the shards needs."""
        if self._coordinator.rank != 0:
            return {}
        if merged not in self._merger_files:
            ranks = self._coordinator.world_size
            self._merger_files[merged] = merger_files(
                self._module, ranks, self._processing_class, merged=merged
            )
        return self._merger_files[merged]


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
