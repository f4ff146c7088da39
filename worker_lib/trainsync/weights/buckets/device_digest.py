"""A digest of a stream that a GPU takes itself, where a copy to the host would cost more.

NH, the almost-universal hash of UMAC (RFC 4418, over signed words), twice with shifted keys, over
each chunk of each tensor; xxh3-128 over the chunks' values in order and the tensors' sizes. The
keys are fixed: it finds damage, and is no signature. Every device gives the same value.
"""

import hashlib
import struct
from collections.abc import Callable, Iterator
from functools import cache
from math import prod
from typing import Final

import numpy as np
import torch
import xxhash

from trainsync.weights.buckets.tensor_part import TensorPart, dense
from trainsync.weights.buckets.tensor_stream import NamedTensors, Value
from trainsync.weights.errors import InconsistentUploadError

_SCHEME: Final = "nh-128"
_CHUNK_BYTES: Final = 4 << 20
"""Looked at in one go: four operations on it take a GPU as long as starting them, and what is held
meanwhile is three times as much."""

_WORD: Final = 4  # bytes
_PAIR: Final = 2 * _WORD
_ROUNDS: Final = 2  # of 64 bits each


class DeviceDigest:
    """Takes one tensor after the other, each on the device where it is."""

    def __init__(self) -> None:
        self._hasher = xxhash.xxh3_128()
        self._values: list[torch.Tensor] = []  # int64 of shape (_ROUNDS,), of each chunk

    def update(self, value: Value) -> None:
        """The bytes of the next tensor of the stream, row-major; the host does not wait for it."""
        tensor = dense(value)
        raw = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
        if not isinstance(value, TensorPart):
            self._hasher.update(struct.pack("<Q", raw.numel()))
        elif value.start == 0:  # a part is of whole chunks: they are the same as of the whole
            self._hasher.update(struct.pack("<Q", prod(value.shape) * tensor.element_size()))
        for start in range(0, raw.numel(), _CHUNK_BYTES):
            self._values.append(_nh(raw[start : start + _CHUNK_BYTES]))

    def over(self, tensors: NamedTensors) -> Iterator[tuple[str, Value]]:
        """The same tensors, which must not change while they are used."""
        for name, tensor in tensors:
            yield name, tensor
            self.update(tensor)  # its user found it to be a dense tensor
            del tensor  # at most one is held

    def result(self) -> str:
        """The digest of all bytes that came; waits for the devices."""
        if self._values:
            device = self._values[0].device
            values = torch.stack([value.to(device) for value in self._values])
            self._hasher.update(values.cpu().numpy().astype("<i8").tobytes())
            self._values.clear()
        return f"{_SCHEME}:{self._hasher.hexdigest()}"


def is_of_device(digest: str | None) -> bool:
    """Whether a `DeviceDigest` gave it."""
    return digest is not None and digest.startswith(f"{_SCHEME}:")


def held_to(tensors: Callable[[], NamedTensors], digest: str) -> Callable[[], NamedTensors]:
    """The same tensors, which are still those of ``digest``, a `DeviceDigest`'s.

    The iterator raises InconsistentUploadError after the last tensor if they are not.
    """

    def checked(given: NamedTensors) -> Iterator[tuple[str, Value]]:
        found = DeviceDigest()
        yield from found.over(given)
        now = found.result()
        if now != digest:
            raise InconsistentUploadError(
                f"the tensors have {now}, but had {digest} when they were sent before"
            )

    return lambda: checked(tensors())  # begun at once: a gather may be slow to


def _nh(raw: torch.Tensor) -> torch.Tensor:
    """Both rounds' values (int64) of a chunk (uint8), as if zeros made it up to whole pairs."""
    if raw.numel() % _PAIR or raw.storage_offset() % _WORD:
        whole = raw.new_zeros(-(-raw.numel() // _PAIR) * _PAIR)
        whole[: raw.numel()] = raw
        raw = whole
    words = raw.view(torch.int32)
    keys = _keys(raw.device)
    values = []
    for start in range(0, _ROUNDS * 2, 2):
        pairs = (words + keys[start : start + words.numel()]).view(-1, 2)  # wraps, as NH wants
        values.append((pairs[:, 0].to(torch.int64) * pairs[:, 1]).sum())
    return torch.stack(values)


@cache
def _keys(device: torch.device) -> torch.Tensor:
    size = _CHUNK_BYTES + (_ROUNDS - 1) * _PAIR
    data = hashlib.shake_128(b"trainsync nh-128").digest(size)
    return torch.from_numpy(np.frombuffer(data, dtype="<i4").copy()).to(device)
