"""What ``checkpoint_engine.engine_kwargs.trainsync`` may say, checked; pure but for dtypes."""

from dataclasses import dataclass
from typing import Final, Self

import torch

from trainsync.weights.transports.broadcast.deadlines import Deadlines

_MEGABYTE: Final = 1 << 20


@dataclass(frozen=True)
class SyncOptions:
    """How weights travel between verl's workers; equal in all of them.

    Attributes:
        bucket_size: bytes of one message on the wire.
        deadlines: of one synchronisation.
        delta: rollouts on other hosts get only what changed.
        same_host: rollouts on the sender's host read shared memory.
        dtype: floating-point weights are sent as this; None: as they come.
        host: the sender's address; None: the one that Ray knows.
    """

    bucket_size: int
    deadlines: Deadlines
    delta: bool
    same_host: bool
    dtype: torch.dtype | None
    host: str | None

    @classmethod
    def of(
        cls,
        largest_bucket: int,
        bucket_megabytes: int,
        timeout_seconds: float,
        delta: bool,
        same_host: bool,
        rollout_dtype: str | None,
        host: str | None,
    ) -> Self:
        """From the values of the configuration.

        Args:
            largest_bucket: bytes, ``update_weights_bucket_megabytes``: no message is larger.

        Raises:
            ValueError: a value is none of those that are possible; says where it stands.
        """
        if bucket_megabytes < 1:
            raise ValueError(f"{_at('bucket_megabytes')} is {bucket_megabytes}; expected 1 or more")
        if not timeout_seconds > 0:
            raise ValueError(f"{_at('timeout_seconds')} is {timeout_seconds}; expected more than 0")
        bucket_size = min(largest_bucket, bucket_megabytes * _MEGABYTE)
        return cls(
            bucket_size=bucket_size,
            deadlines=Deadlines.of(timeout_seconds, bucket_size),
            delta=delta,
            same_host=same_host,
            dtype=None if rollout_dtype is None else _dtype(rollout_dtype),
            host=host,
        )


def _dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise ValueError(
            f"{_at('rollout_dtype')} is {name!r}; expected a floating-point dtype, as bfloat16"
        )
    return dtype


def _at(name: str) -> str:
    return f"checkpoint_engine.engine_kwargs.trainsync.{name}"
