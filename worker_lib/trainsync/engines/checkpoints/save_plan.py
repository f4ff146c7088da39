"""Which saves a checkpoint consists of, and which rank writes what; it looks at the run once.

The weights of a checkpoint are its step's state dict, registered with it and reused. An adapter
alone, weights alone, and a step whose state dict was skipped have a ``model`` of their own in the
checkpoint.
"""

from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from trainsync.api.protocol import SaveKind
from trainsync.checkpoint.save.registration import Participants, all_ranks
from trainsync.storage.layout import RunDirectory
from trainsync.storage.objects import commits
from trainsync.storage.objects.of_run import open_run_store

OPTIMIZER, EXTRA, HF_MODEL, MODEL = "optim", "extra_state", "hf_model", "model"

ENGINE = "engine"
"""Component of the files that an engine writes for itself."""


class ModelMode(StrEnum):
    """How a checkpoint comes by its weights."""

    STATE_DICT = "state_dict"
    """Saved now as the step's state dict, whose files the checkpoint takes over."""
    REUSE = "reuse"
    """The step's state dict was saved before."""
    OWN = "own"
    """Saved now as a part of the checkpoint alone."""
    OWN_UNWATCHED = "own_unwatched"
    """As ``own``; an earlier attempt committed a state dict of the step, which no checkpoint
    supersedes: only if the weights are the same can both stand."""
    NONE = "none"
    """It has none."""


@dataclass(frozen=True)
class SavePlan:
    """One checkpoint.

    Attributes:
        folder: of the step, where the files go.
        components: those besides the model, which every rank stages.
        export: rank 0 also writes the whole model.
        by_engine: what verl names that the engine writes for itself, on every rank.
        held: see `SaveTarget`.
    """

    folder: str
    model: ModelMode
    components: tuple[str, ...]
    export: bool = False
    by_engine: tuple[str, ...] = ()
    held: bool = False

    @property
    def saves_model(self) -> bool:
        """Whether ranks write weights now."""
        return self.model not in (ModelMode.REUSE, ModelMode.NONE)

    @property
    def saves_state_dict(self) -> bool:
        """Whether the weights are written as the step's state dict."""
        return self.model is ModelMode.STATE_DICT

    @property
    def has_state_dict(self) -> bool:
        """Whether the checkpoint takes over the files of the step's state dict."""
        return self.model in (ModelMode.STATE_DICT, ModelMode.REUSE)

    def participants(self, step: int, world_size: int, prefix: str = "") -> Participants:
        """All (component, rank) that write to it; ``prefix`` is the coordinator's."""
        model = all_ranks(prefix + MODEL, world_size=world_size)
        names = [*self.components, *([ENGINE] if self.by_engine else [])]
        checkpoint = all_ranks(*(prefix + name for name in names), world_size=world_size)
        if self.saves_model and not self.saves_state_dict:
            checkpoint = model + checkpoint
        if self.export:
            checkpoint.append((prefix + HF_MODEL, 0))
        return Participants(
            step,
            # Also where it was saved before: the monitor must know it first, or might take an
            # older attempt's for what the checkpoint reuses.
            state_dict=tuple(model) if self.has_state_dict else (),
            checkpoint=tuple(checkpoint),
            reuse_state_dict=self.has_state_dict,
        )


def choose_model_mode(
    step: int,
    *,
    wanted: bool,
    adapter_only: bool,
    alone: bool,
    saved: int | None,
    skipped: int | None,
    exists: bool,
) -> ModelMode:
    """How the checkpoint of ``step`` comes by its weights.

    Args:
        wanted: ``model`` is among ``save_contents``.
        adapter_only: the adapter's weights alone are to be saved, which are no state dict.
        alone: the checkpoint has nothing else, and needs a participant of its own.
        saved: the step whose state dict this attempt saved last.
        skipped: the last step whose state dict was given up for want of memory.
        exists: a state dict of the step is committed, whose files those of the checkpoint would
            replace: on a volume.
    """
    if not wanted:
        return ModelMode.NONE
    if saved == step and not alone:
        return ModelMode.REUSE
    if not (alone or adapter_only or skipped == step):
        return ModelMode.STATE_DICT  # an earlier attempt's gives way to it
    return ModelMode.OWN_UNWATCHED if exists and saved != step else ModelMode.OWN


def state_dict_exists(where: Path | str, step: int) -> bool:
    """Whether a state dict of ``step`` is committed in the run.

    Args:
        where: its directory, or the URL of its store, of which that takes a request.

    Raises:
        StoreError: the store cannot be read.
    """
    if isinstance(where, str):
        return commits.is_committed(open_run_store(where), SaveKind.STATE_DICT, step)
    return RunDirectory(where).manifest(SaveKind.STATE_DICT, step).is_file()
