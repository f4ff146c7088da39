"""A bucket in shared memory, and the handle by which SGLang's workers map its tensors.

The memory is torch's own for processes that share tensors (strategy "file_system"): a file of
/dev/shm with a count of readers before the data. SGLang unpickles a handle with an unpickler that
calls a list of torch's functions alone. Nothing is unpickled here.
"""

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, cast

import torch
from torch.multiprocessing import reductions

from trainsync.engines.servers.sglang_routes.buckets import TensorBucket
from trainsync.weights.errors import SharedMemoryError
from trainsync.weights.transports.shared_memory.segment import SHARED_MEMORY, check_room

_PROTOCOL: Final = 4
# In place of a socket by which readers say that they are done: each starts a process of its own.
_NO_MANAGER: Final = b""


class SharedBucket:
    """Memory for one bucket after the other. `close` removes it; a process of torch's does when
    this one dies.

    Args:
        size: bytes.

    Attributes:
        data: the bytes.

    Raises:
        SharedMemoryError: there is no room for it.
    """

    def __init__(self, size: int) -> None:
        length = max(1, size)
        check_room(SHARED_MEMORY, length)
        try:
            self._storage = cast(Any, torch.UntypedStorage)._new_using_filename_cpu(length)
            _, self._handle, self._size = self._storage._share_filename_cpu_()
        except RuntimeError as error:
            raise SharedMemoryError(
                f"{SHARED_MEMORY} cannot have {length} bytes: {error}"
            ) from error
        self._storage._shared_incref()  # so that no reader is the last one, and removes it
        self.data = torch.empty(0, dtype=torch.uint8).set_(self._storage)

    def handle(self, bucket: TensorBucket, readers: int) -> bytes:
        """A list of (name, tensor), pickled: the bytes name the memory, and have none of it.

        Args:
            readers: that will unpickle it once each.
        """
        for _ in range(readers):
            self._storage._shared_incref()  # which torch's unpickling takes back
        memory = _Call(
            reductions.rebuild_storage_filename,
            torch.UntypedStorage,
            _NO_MANAGER,
            self._handle,
            self._size,
        )
        typed = {
            dtype: _Call(reductions.rebuild_typed_storage, memory, dtype)
            for dtype in dict.fromkeys(part.dtype for part in bucket.parts)
        }
        named = [
            (
                part.name,
                _Call(
                    reductions.rebuild_tensor,
                    torch.Tensor,
                    typed[part.dtype],
                    (part.offset // part.dtype.itemsize, part.shape, _strides(part.shape), False),
                ),
            )
            for part in bucket.parts
        ]
        return pickle.dumps(named, protocol=_PROTOCOL)

    def close(self) -> None:
        """Remove the memory; a reader that maps it still goes on reading it."""
        path = Path(SHARED_MEMORY, self._handle.decode().lstrip("/"))
        self.data, self._storage = torch.empty(0, dtype=torch.uint8), None
        path.unlink(missing_ok=True)  # torch's process of a server that died may have done it


class _Call:
    """Is pickled as the call of a function."""

    def __init__(self, function: Callable[..., Any], *arguments: Any) -> None:
        self._call = function, arguments

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return self._call


def _strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Of a contiguous tensor."""
    strides, step = [], 1
    for length in reversed(shape):
        strides.append(step)
        step *= max(1, length)
    return tuple(reversed(strides))
