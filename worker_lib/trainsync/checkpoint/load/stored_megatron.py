"""The whole weights of a Megatron model out of its shards in a store, for a process that serves."""

import tempfile
from pathlib import Path
from typing import Final

import torch

from trainsync.checkpoint.errors import CorruptCheckpointError
from trainsync.checkpoint.load.deadline import in_time
from trainsync.checkpoint.load.reshard.shard_files import Component
from trainsync.checkpoint.load.stored import DifferentBytesError, StoredFiles
from trainsync.checkpoint.load.stored_shards import StoredShards
from trainsync.checkpoint.megatron_shards import MegatronShards
from trainsync.checkpoint.merge.megatron import MegatronWeights
from trainsync.storage.objects.errors import ObjectChangedError, ObjectMissingError
from trainsync.storage.saves.manifest import Manifest

_CONFIG: Final = "config.json"


def stored_megatron_weights(
    files: StoredFiles,
    shards: StoredShards,
    manifest: Manifest,
    component: Component,
    what: str,
    deadline: float,
) -> dict[str, torch.Tensor]:
    """Full CPU tensors that own their memory, under the names that Hugging Face has for them.

    It needs mbridge (the extra ``megatron``), and the memory of the model and of its largest weight
    once more.

    Args:
        what: the step, for messages.
        deadline: by `time.monotonic`; looked at between tensors.

    Raises:
        CorruptCheckpointError: an object is gone or differs from the manifest, or the shards
            contradict each other.
        MergeError: mbridge does not know the model, or one of its weights.
        LoadTimeoutError: the deadline has passed.
        StoreError: the store cannot be read.
    """
    config = _config(files, manifest, f"{component.subdir}/huggingface/{_CONFIG}", what)
    shards.find(component.path(rank) for rank in sorted(component.ranks))
    held = MegatronShards(shards.open, component)
    with tempfile.TemporaryDirectory(prefix="trainsync-hf-") as folder:
        (Path(folder) / _CONFIG).write_bytes(config)
        weights = MegatronWeights(held, Path(folder), None)
    fetch_whole(held, shards)
    tensors = {}
    for entry in weights.entries:
        in_time(what, deadline)
        tensors[entry.name] = weights.tensor(entry).contiguous()
    return tensors


def fetch_whole(held: MegatronShards, files: StoredShards) -> None:
    """Have in memory what ``held.whole`` gives, each until ``held.forget_pages``.

    Raises:
        CorruptCheckpointError: a file is gone, or differs from the manifest; or a weight was not
            saved whole.
        StoreError: the store cannot be read.
    """
    tensors = held.tensors.items()
    wanted = [held.whole_box(key, index) for key, tensor in tensors for index in tensor.near]
    held.fetch(wanted, files.copy)


def _config(files: StoredFiles, manifest: Manifest, path: str, what: str) -> bytes:
    entry = next((entry for entry in manifest.files if entry.path == path), None)
    if entry is None:
        raise CorruptCheckpointError(f"{what}: the manifest does not list {path}")
    try:
        return files.read(entry)
    except (ObjectMissingError, ObjectChangedError, DifferentBytesError) as error:
        raise CorruptCheckpointError(f"{what}: {error}") from error
