"""The whole weights of a Megatron model out of its shards in a store, for a process that serves."""

import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Final

import torch

from trainsync.checkpoint.errors import CorruptCheckpointError
from trainsync.checkpoint.load.reshard.files import Pair
from trainsync.checkpoint.load.reshard.shard_files import Component
from trainsync.checkpoint.load.stored import DifferentBytesError, StoredFiles
from trainsync.checkpoint.load.stored_shards import StoredShards
from trainsync.checkpoint.load.whole_weights import in_time
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
    held = FetchedShards(shards, component)
    with tempfile.TemporaryDirectory(prefix="trainsync-hf-") as folder:
        (Path(folder) / _CONFIG).write_bytes(config)
        weights = MegatronWeights(held, Path(folder), None)
    held.fetch()
    tensors = {}
    for entry in weights.entries:
        in_time(what, deadline)
        tensors[entry.name] = weights.tensor(entry).contiguous()
    return tensors


class FetchedShards(MegatronShards):
    """Shards in a store: planned with by what their files say, read once `fetch` has ended.

    Args:
        files: opens shards by their index alone.

    Raises:
        As `MegatronShards`; StoreError: the store cannot be read.
    """

    def __init__(self, files: StoredShards, component: Component) -> None:
        self._files = files
        super().__init__(files.open, component)

    def fetch(self) -> None:
        """Have all boxes in memory. `paths` knows none any more.

        Raises:
            CorruptCheckpointError: a file is gone, or differs from the manifest.
            StoreError: the store cannot be read.
        """
        pairs: list[Pair] = []
        for tensor in self.tensors.values():
            tensor.near.clear()
            for rank, box in tensor.boxes:
                made = torch.empty(box.data.shape, dtype=box.data.dtype, device="cpu")
                pairs.append((self.path(rank), made, box.data))
                near = tensor.near.setdefault(box.start[: box.leading], [])
                near.append((rank, replace(box, data=made)))
            tensor.boxes.clear()
        self._files.copy(pairs)

    def forget_pages(self, key: str, index: tuple[int, ...]) -> None:
        """Let go of what `whole` read: there is no file behind it, so it is not read again."""
        self.tensors[key].near.pop(index, None)


def _config(files: StoredFiles, manifest: Manifest, path: str, what: str) -> bytes:
    entry = next((entry for entry in manifest.files if entry.path == path), None)
    if entry is None:
        raise CorruptCheckpointError(f"{what}: the manifest does not list {path}")
    try:
        return files.read(entry)
    except (ObjectMissingError, ObjectChangedError, DifferentBytesError) as error:
        raise CorruptCheckpointError(f"{what}: {error}") from error
