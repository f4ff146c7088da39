"""Checks the options of ``checkpoint_engine.engine_kwargs.trainsync``; pure but for dtypes."""

from dataclasses import dataclass
from typing import Final, Self

import torch

from trainsync.weights.transports.broadcast.deadlines import Deadlines

_MEGABYTE: Final = 1 << 20


@dataclass(frozen=True)
class SyncOptions:
    """Options of the weight transfer, equal in all of verl's workers.

    Attributes:
        bucket_size: bytes of one message.
        deadlines: limits of one synchronisation.
        delta: rollouts on other hosts get only the changes.
        same_host: rollouts on the sender's host read shared memory.
        dtype: dtype in which floating-point weights are sent; None: no conversion.
        host: the sender's address; None: the node's address in Ray.
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
        """Options from the configuration's values.

        Args:
            largest_bucket: ``update_weights_bucket_megabytes`` in bytes; the largest message.

        Raises:
            ValueError: a value is invalid; names its key.
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
