"""The one caller's side of a save: register everyone who takes part, await the commit."""

import asyncio
import time
from collections.abc import Iterable

from trainsync.api.protocol import Participant, SaveKind, SaveRequest, SaveState, SaveStatus
from trainsync.checkpoint.errors import SaveTimeoutError, aborted_error
from trainsync.monitor.client import MonitorClient
from trainsync.monitor.errors import (
    MonitorUnavailableError,
    NotReadyError,
    StorageUnavailableError,
)

_POLL_SECONDS = 20.0  # of one question to the monitor, which answers as soon as it knows
_RETRY_SECONDS = 1.0


def all_ranks(*components: str, world_size: int) -> list[tuple[str, int]]:
    """Every (component, rank): the full set of participants of a save."""
    return [(component, rank) for component in components for rank in range(world_size)]


def register_saves(
    monitor: MonitorClient,
    step: int,
    state_dict_participants: Iterable[tuple[str, int]],
    checkpoint_participants: Iterable[tuple[str, int]],
    reuse_state_dict: bool,
) -> None:
    """See `CheckpointCoordinator.register`."""
    state_dict = _participants(state_dict_participants)
    checkpoint = _participants(checkpoint_participants)
    if not state_dict and not checkpoint:
        raise ValueError(f"step {step}: register needs at least one participant")
    if state_dict:
        monitor.register(SaveRequest(kind=SaveKind.STATE_DICT, step=step, participants=state_dict))
    if checkpoint:
        monitor.register(
            SaveRequest(
                kind=SaveKind.CHECKPOINT,
                step=step,
                participants=checkpoint,
                reuse_state_dict=reuse_state_dict or bool(state_dict),
            )
        )


async def await_commit(
    monitor: MonitorClient, kind: SaveKind, step: int, deadline: float
) -> SaveStatus:
    """Wait until the save is committed, at most until ``deadline`` (`time.monotonic`).

    A monitor that is away, or whose volume is, is asked again.

    Raises:
        SaveAbortedError: with the cause; `SaveSkippedError` when a rank skipped it.
        SaveTimeoutError: with how it stood.
        MonitorError: the monitor refuses.
    """
    what = f"{kind.value} of step {step}"
    last = "the monitor was not asked"
    while (left := deadline - time.monotonic()) > 0:
        try:
            status = await asyncio.to_thread(
                monitor.save_status, kind, step, min(_POLL_SECONDS, left)
            )
        except (MonitorUnavailableError, NotReadyError, StorageUnavailableError) as error:
            last = str(error)
            await asyncio.sleep(min(_RETRY_SECONDS, left))
            continue
        if status.state is SaveState.COMMITTED:
            return status
        if status.state is SaveState.ABORTED:
            cause = status.error or "no cause is known"
            raise aborted_error(f"{what} aborted: {cause}", cause)
        last = f"the monitor says {status.state.value}"
    raise SaveTimeoutError(f"{what} was not committed in time: {last}")


def _participants(pairs: Iterable[tuple[str, int]]) -> list[Participant]:
    return [Participant(component=component, rank=rank) for component, rank in pairs]
