"""The part of a save that one call of ``save_*`` gives, and the options of saving."""

import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch

from trainsync.api.protocol import SaveKind
from trainsync.api.spec import SAVE_DEADLINE_SECONDS
from trainsync.checkpoint.memory.kept import KeptShards
from trainsync.checkpoint.rescue.rescuer import Rescuer
from trainsync.checkpoint.save.permits import WritePermits
from trainsync.checkpoint.save.registration import check_step

State = Mapping[str, Any]
SaveFunction = Callable[[Path], object]
WhenFull = Literal["wait", "skip"]


@dataclass(frozen=True)
class SavePart:
    """The part of a save that one call gives."""

    name: str
    source: SaveFunction | State
    step: int
    kind: SaveKind
    subdir: str
    attachments: Mapping[str, bytes]
    coordinates: Mapping[str, int] = field(default_factory=dict)  # see `Receipt`
    shard_name: str = ""
    """The name in the file name of a state: ``name`` without the coordinator's prefix."""
    with_checkpoint: bool = False
    """See `CheckpointCoordinator.save_async`."""

    def __post_init__(self) -> None:
        if not isinstance(self.name, str):
            raise TypeError(f"name is {self.name!r}, expected a str such as 'model'")
        if isinstance(self.source, torch.nn.Module | torch.optim.Optimizer):
            raise TypeError(
                f"{self.name}: got a {type(self.source).__name__}, expected its state_dict(), or a "
                "function that writes into the directory it is given"
            )
        if not (isinstance(self.source, Mapping) or callable(self.source)):
            raise TypeError(
                f"{self.name}: got {_short(self.source)}, expected a state (a mapping such as "
                "model.state_dict()), or a function that writes into the directory it is given"
            )
        check_step(self.step, self.name)
        object.__setattr__(self, "step", operator.index(self.step))
        object.__setattr__(self, "shard_name", self.shard_name or self.name)

    def path(self, relative: str) -> str:
        """Path of a file of this part, relative to the step's directory."""
        return f"{self.subdir}/{relative}" if self.subdir else relative

    @property
    def is_resumed_from(self) -> bool:
        """Whether a checkpoint has it, as far as is known."""
        return self.kind is SaveKind.CHECKPOINT or self.with_checkpoint

    @property
    def label(self) -> str:
        """A name for people and for the part's thread."""
        return f"{self.name}-step{self.step}"


def refuse_empty(name: str, source: object) -> None:
    """Raises `ValueError`: there is nothing in it to resume from."""
    if isinstance(source, Mapping) and not source:
        raise ValueError(f"{name}: the state is empty: nothing could be resumed from it")


def _short(value: object) -> str:
    return "None" if value is None else f"a {type(value).__module__}.{type(value).__qualname__}"


@dataclass(frozen=True)
class SavingOptions:
    """See `CheckpointCoordinator`."""

    staging_slots: int = 2
    staging_timeout: float = 1800.0
    when_full: WhenFull = "wait"
    copy_timeout: float = 300.0
    permits: WritePermits | None = None
    memory: KeptShards | None = None
    rescuer: Rescuer | None = None
    save_timeout: float = SAVE_DEADLINE_SECONDS
