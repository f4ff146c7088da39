"""The whole weights of a committed step in a store, for a process that serves.

As `whole_weights` on a volume, without a file of this machine: ranges of the shards go into the
tensors, each block compared with its digest on the way. To read is the only right that it needs.
"""

from pathlib import Path

import torch

from trainsync.checkpoint.load.deadline import FilesInTime
from trainsync.checkpoint.load.reshard.read import ComponentRead
from trainsync.checkpoint.load.resume import Resume
from trainsync.checkpoint.load.stored import OpenedFiles
from trainsync.checkpoint.load.stored_megatron import stored_megatron_weights
from trainsync.checkpoint.load.stored_shards import StoredShards
from trainsync.checkpoint.load.whole_weights import model_of, want_all
from trainsync.checkpoint.megatron_shards import is_megatron
from trainsync.storage.layout import step_name
from trainsync.storage.objects.bucket import ObjectBucket
from trainsync.storage.objects.manifests import Stored


def stored_weights(
    bucket: ObjectBucket, stored: Stored, *, deadline: float
) -> dict[str, torch.Tensor]:
    """Full CPU tensors that own their memory, under the names that the trainer's state has; of a
    Megatron model, see `stored_megatron_weights`.

    Args:
        bucket: the run's store, which gives up at the deadline (`ObjectBucket.until`).
        deadline: by `time.monotonic`; looked at before each request.

    Raises:
        CorruptCheckpointError: an object is gone or differs from the manifest.
        StateMismatchError, MergeError: the step holds no weights of one model.
        LoadTimeoutError: the deadline has passed.
        StoreError: the store cannot be read.
    """
    manifest = stored.manifest
    what = f"{manifest.kind.value} {manifest.step}"
    files = FilesInTime.by(OpenedFiles.of(bucket, stored), what, deadline, bucket)
    resume = Resume(manifest.step, Path(step_name(manifest.step)), manifest, store=files)
    shards = StoredShards(resume, files)
    reading = ComponentRead(shards, model_of(manifest), 0, 1)
    if is_megatron(reading.state):
        component = reading.component
        return stored_megatron_weights(files, shards, manifest, component, what, deadline)
    names = want_all(reading)
    shards.find(reading.paths)
    found = reading.read()
    return {name: found[name,] for name in names}
