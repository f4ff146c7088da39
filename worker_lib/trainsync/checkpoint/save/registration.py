"""The registration of a save: its full set of participants, told to the monitor by one process."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import SupportsIndex

from trainsync.api import protocol
from trainsync.api.protocol import SaveKind, SaveRequest
from trainsync.monitor.client.base import MonitorClient
from trainsync.monitor.errors import (
    MonitorUnavailableError,
    NotReadyError,
    StorageUnavailableError,
)

AWAY = (MonitorUnavailableError, NotReadyError, StorageUnavailableError)
"""The monitor, or its volume, cannot be reached: a request is to be made again."""


def all_ranks(*components: str, world_size: int) -> list[tuple[str, int]]:
    """Every (component, rank): the full set of participants of a save.

    Raises:
        ValueError: ``world_size`` is not a number of ranks.
    """
    if isinstance(world_size, bool) or not isinstance(world_size, int) or world_size < 1:
        raise ValueError(f"world_size is {world_size!r}, expected an integer of at least 1")
    return [(component, rank) for component in components for rank in range(world_size)]


def check_step(step: object, what: str) -> None:
    """Refuse a value that is no step; ``what`` is for the message.

    Raises:
        TypeError: it is no integer.
        ValueError: it is negative.
    """
    if isinstance(step, bool) or not isinstance(step, SupportsIndex):
        raise TypeError(f"{what}: global_step is {step!r}, expected an integer")
    if step.__index__() < 0:
        raise ValueError(f"{what}: global_step is {step!r}, expected 0 or more")


@dataclass(frozen=True)
class Participants:
    """All (component, rank) that write to a step's saves, as `CheckpointCoordinator.register` has.

    Raises:
        ValueError: there is none, or one that cannot be; or the step is negative.
        TypeError: the step is no integer.
    """

    step: int
    state_dict: tuple[tuple[str, int], ...] = ()
    checkpoint: tuple[tuple[str, int], ...] = ()
    reuse_state_dict: bool = False

    def __post_init__(self) -> None:
        check_step(self.step, "register")
        if not self.state_dict and not self.checkpoint:
            raise ValueError(f"step {self.step}: register needs at least one participant")
        for pair in (*self.state_dict, *self.checkpoint):
            try:
                _wire([pair])
            except ValueError as error:  # pydantic's, of several lines
                raise ValueError(
                    f"step {self.step}: participant {pair!r} is refused: expected a component of "
                    "[a-z0-9_]{1,64} and a rank ≥ 0"
                ) from error

    @property
    def kinds(self) -> Iterator[SaveKind]:
        """Kinds of the saves, in the order in which they commit."""
        if self.state_dict:
            yield SaveKind.STATE_DICT
        if self.checkpoint:
            yield SaveKind.CHECKPOINT


def register_saves(monitor: MonitorClient, participants: Participants) -> None:
    """See `CheckpointCoordinator.register`.

    Raises:
        MonitorError: the monitor refuses, or cannot be reached.
    """
    step, state_dict = participants.step, participants.state_dict
    if state_dict:
        monitor.register(
            SaveRequest(kind=SaveKind.STATE_DICT, step=step, participants=_wire(state_dict))
        )
    if participants.checkpoint:
        monitor.register(
            SaveRequest(
                kind=SaveKind.CHECKPOINT,
                step=step,
                participants=_wire(participants.checkpoint),
                reuse_state_dict=participants.reuse_state_dict or bool(state_dict),
            )
        )


def _wire(pairs: Iterable[tuple[str, int]]) -> list[protocol.ParticipantRef]:
    return [protocol.ParticipantRef(component=component, rank=rank) for component, rank in pairs]
