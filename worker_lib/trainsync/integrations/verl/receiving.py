"""The rollouts' side of verl's backend."""

import asyncio
import os
import secrets
import socket
import threading
import time
from collections.abc import AsyncIterator
from typing import Final

import torch

from trainsync.integrations.verl.options import SyncOptions
from trainsync.weights.buckets.served import ServedVersion
from trainsync.weights.errors import WeightsUnavailableError
from trainsync.weights.transports.broadcast.link import TrainerEndpoint
from trainsync.weights.transports.broadcast.receiver import WeightReceiver
from trainsync.weights.transports.shared_memory.segment import SHARED_MEMORY

_LATE_SECONDS: Final = 5.0  # longer than the sender's own delay
_LOOK_SECONDS: Final = 0.5  # between checks for a cancelled synchronisation


class Receiver:
    """A rollout worker's link and weights, kept between synchronisations."""

    def __init__(self, options: SyncOptions) -> None:
        self.name = f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(4)}"
        self._options = options
        self._endpoint: TrainerEndpoint | None = None
        self._receiver: WeightReceiver | None = None

    @property
    def version(self) -> int:
        """The last version received; -1 before the first."""
        return -1 if self._receiver is None else self._receiver.version

    def follow(self, endpoint: TrainerEndpoint) -> None:
        """Connect to the trainer at ``endpoint`` in the background, and stay connected."""
        self._endpoint = endpoint
        if self._receiver is None:
            self._receiver = WeightReceiver(
                self.name,
                lambda: self._endpoint,
                deadlines=self._options.deadlines,
                shared_memory=SHARED_MEMORY if self._options.same_host else None,
            )

    async def weights(
        self, version: int, given_up: threading.Event
    ) -> AsyncIterator[tuple[str, torch.Tensor]]:
        """(name, full tensor) of ``version``, after the digest check, on this worker's device.

        Args:
            given_up: set when this version will not be sent any more.

        Raises:
            WeightsUnavailableError: the version did not arrive; the current weights stay.
        """
        receiver = self._receiver
        if receiver is None:
            raise WeightsUnavailableError("receive_weights was called before init_process_group")
        await self._wait(receiver, version, given_up)
        device = torch.accelerator.current_accelerator() if _on_accelerator() else None
        with receiver.reading() as served:
            if served is None or served.version != version:
                found = "nothing" if served is None else f"version {served.version}"
                raise WeightsUnavailableError(
                    f"version {version} was replaced: {self.name} has {found}"
                )
            for name, tensor in served.tensors.items():
                yield name, tensor if device is None else tensor.to(device)

    def close(self) -> None:
        """Close the link to the trainer."""
        if self._receiver is not None:
            self._receiver.close()

    async def _wait(
        self, receiver: WeightReceiver, version: int, given_up: threading.Event
    ) -> ServedVersion:
        deadlines = self._options.deadlines
        end = time.monotonic() + deadlines.whole + deadlines.connect + _LATE_SECONDS
        while True:
            try:
                return await asyncio.to_thread(receiver.wait_newer, version - 1, _LOOK_SECONDS)
            except WeightsUnavailableError as error:
                if given_up.is_set():
                    raise WeightsUnavailableError(
                        f"version {version} was given up before it came to {self.name}"
                    ) from error
                if time.monotonic() > end:
                    raise


def _on_accelerator() -> bool:
    return bool(torch.accelerator.is_available())
