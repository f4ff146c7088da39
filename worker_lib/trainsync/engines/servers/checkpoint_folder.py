"""A staged version as a folder with a safetensors file, for servers that read files."""

import errno
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import torch

from trainsync.checkpoint.merge import safetensors
from trainsync.weights.errors import SharedMemoryError
from trainsync.weights.staging.index import StagedIndex
from trainsync.weights.transports.shared_memory.segment_store import segment_path

FILE: Final = "model.safetensors"
_SUFFIX: Final = ".checkpoint"


def lay_checkpoint(memory: Path, index: StagedIndex, tensors: Mapping[str, torch.Tensor]) -> Path:
    """Write a version beside its segment. What a driver that died has left goes with the segment's
    folder.

    Args:
        memory: the memory file system.
        tensors: of the version, those that are wanted.

    Returns:
        The folder, which the caller removes.

    Raises:
        SharedMemoryError: there is no room, or it cannot be written.
        MergeError: a dtype that safetensors does not have.
    """
    segment = segment_path(memory, index.segment)
    folder = segment.with_name(segment.name + _SUFFIX)
    shutil.rmtree(folder, ignore_errors=True)
    named = {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()}
    entries = [safetensors.TensorEntry(name, *what) for name, what in named.items()]
    try:
        folder.mkdir(mode=0o700)
        for file in safetensors.partition(entries, index.bytes):
            safetensors.write(
                folder / FILE, file, (tensors[entry.name] for entry in file), lambda _: None
            )
    except OSError as error:
        shutil.rmtree(folder, ignore_errors=True)
        what = "has no room for another copy" if error.errno == errno.ENOSPC else error.strerror
        raise SharedMemoryError(f"{memory}: {index.segment} cannot be laid: {what}") from error
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    return folder
