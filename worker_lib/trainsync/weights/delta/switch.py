"""Whether what changed is looked for at all: not while nearly everything changes each time.

To look takes a copy of the last version and a second look at every byte, which is lost when the
version goes in full after all. So it stops when that happened several times in a row, and begins
again when a sample of the weights has changed little.
"""

import logging
from collections.abc import Callable, Iterator
from typing import Any, Final

import numpy as np
import torch

from trainsync.weights.buckets.tensor_part import TensorPart, dense
from trainsync.weights.buckets.tensor_stream import NamedTensors, Value

Bytes = np.ndarray[Any, np.dtype[np.uint8]]

logger = logging.getLogger(__name__)

MOST_OF_FULL: Final = 0.25
"""A delta of a greater share of the full bytes is not worth its making, nor its memory."""

OFF_AFTER: Final = 3
"""Versions in a row of which too much had changed."""

ON_BELOW: Final = 0.7 * MOST_OF_FULL
"""Clearly less, so that it does not go to and fro."""

_CHUNKS: Final = 8
_CHUNK_BYTES: Final = 1 << 10  # a whole number of elements of any dtype


def ranges(size: int) -> list[slice]:
    """Which of ``size`` bytes are in a sample: all of few, else some stretches all over them."""
    if size <= _CHUNKS * _CHUNK_BYTES:
        return [slice(0, size)]
    room = (size - _CHUNK_BYTES) // _CHUNK_BYTES
    starts = [room * number // (_CHUNKS - 1) * _CHUNK_BYTES for number in range(_CHUNKS)]
    return [slice(start, start + _CHUNK_BYTES) for start in starts]


def sample_of(data: Bytes) -> Bytes:
    """A copy of a little of ``data``."""
    return np.concatenate([data[part] for part in ranges(data.size)])


def delta_share(former: Bytes, now: Bytes, itemsize: int) -> float:
    """The bytes of a delta over those of the whole, as far as two samples tell."""
    if not now.size or former.size != now.size:
        return 1.0 if now.size else 0.0
    differ = (former != now).reshape(-1, itemsize).any(axis=1)
    return float(differ.mean()) * (2 + itemsize) / itemsize


class DeltaSwitch:
    """Learns the outcome of each version that was looked at; `watch` sees the others pass.

    Attributes:
        on: whether to look for what the next version changes.
        why: it is off; empty while it is on.
    """

    def __init__(self) -> None:
        self.on = True
        self.why = ""
        self._misses = 0
        self._samples: dict[tuple[str, int], Bytes] = {}

    def found(self, version: int, *, too_much: bool) -> None:
        """Whether so much had changed in this version that all of it went."""
        self._misses = self._misses + 1 if too_much else 0
        if self._misses >= OFF_AFTER:
            self.on = False
            self._tell(version, f"too much changed in {self._misses} versions in a row")

    def watch(
        self, version: int, tensors: Callable[[], NamedTensors]
    ) -> Callable[[], NamedTensors]:
        """The same tensors, of a version that is new; while off, to be on again in time."""
        watched = False

        def watching() -> Iterator[tuple[str, Value]]:
            nonlocal watched
            former, self._samples = self._samples, {}
            size = delta = 0.0
            for name, value in tensors():
                key = name, value.start if isinstance(value, TensorPart) else 0
                if isinstance(value, Value) and dense(value).is_contiguous():
                    now = self._samples[key] = _sample_of_tensor(dense(value))
                    if key in former:
                        itemsize, here = dense(value).element_size(), dense(value).nbytes
                        size += here
                        delta += here * delta_share(former[key], now, itemsize)
                yield name, value
                del value  # at most one is held
            if size and not watched:
                self._judge(version, delta / size)
            watched = True  # another pass over the same tensors tells nothing

        return watching

    def _judge(self, version: int, share: float) -> None:
        if share < ON_BELOW:
            self.on, self.why, self._misses = True, "", 0
            self._samples = {}
            logger.info("version %d: deltas are looked for again: little changes now", version)
        else:
            self.why = (
                f"too much changes: a delta of version {version} would have had about "
                f"{min(share, 9.99):.0%} of the bytes, more than {ON_BELOW:.0%}"
            )

    def _tell(self, version: int, why: str) -> None:
        self.why = why
        self._samples = {}
        logger.info("version %d: deltas are not looked for any more: %s", version, why)


def _sample_of_tensor(tensor: torch.Tensor) -> Bytes:
    raw = tensor.detach().reshape(-1).view(torch.uint8)
    sample: Bytes = torch.cat([raw[part] for part in ranges(raw.numel())]).cpu().numpy()
    return sample
