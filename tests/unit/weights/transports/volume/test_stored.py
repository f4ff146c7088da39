"""What a reader of a bucket does where this machine, not the bucket, fails it."""

import tempfile
from collections.abc import Mapping

import pytest
import torch
from trainsync.storage.objects import commits
from trainsync.storage.objects.bucket import ObjectBucket
from trainsync.storage.objects.manifests import Stored
from trainsync.weights.errors import WeightsUnavailableError
from trainsync.weights.transports.volume.stored import StoredStateDicts
from trainsync.weights.versions import CheckpointLocation, Published

from tests.unit.storage.objects.memory import STATE_DICT, manifest_of, memory, save


def test_a_machine_without_room_for_a_file_is_asked_again_later() -> None:
    """A Megatron model's configuration lies in one meanwhile."""

    def read(
        bucket: ObjectBucket, stored: Stored, *, deadline: float
    ) -> Mapping[str, torch.Tensor]:
        with tempfile.TemporaryDirectory(dir="/no/such/place"):
            return {}

    bucket = memory()
    save(bucket, manifest_of(1, kind=STATE_DICT))
    stored = commits.read_manifest(bucket, STATE_DICT, 1)
    where = CheckpointLocation("global_step_1", stored.digest, 0, 1)
    published = Published.saved(1, stored.digest, stored.manifest.bytes, where)
    source = StoredStateDicts(bucket, read)
    with pytest.raises(WeightsUnavailableError, match=r"could not be read: .*/no/such"):
        source.fetch(published, 10.0)
