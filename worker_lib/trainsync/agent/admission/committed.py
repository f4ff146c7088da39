"""Committed versions of a run in a bucket, with their proofs."""

from collections.abc import Mapping
from pathlib import Path

import torch

from trainsync.agent.admission.reading import FetchedVersion, NoProofError
from trainsync.agent.metrics import AgentMetrics
from trainsync.agent.version import Version
from trainsync.checkpoint.load.stored import DifferentBytesError, OpenedFiles
from trainsync.storage.errors import DamagedFileError
from trainsync.storage.objects.bucket import ObjectBucket
from trainsync.storage.objects.errors import ObjectChangedError, ObjectMissingError
from trainsync.storage.objects.manifests import Stored
from trainsync.weights.errors import DigestMismatchError
from trainsync.weights.proof.record import PROOF_NAME, Proof, decode_proof
from trainsync.weights.transports.volume.stored import ReadsStoredWeights, StoredStateDicts


class BucketVersions:
    """Reads the committed versions of a run's bucket. See `ReadsVersions`. One thread.

    Args:
        bucket: with the right to read alone.
        read: puts weights together.
        required: whether a version without a proof is refused.
    """

    def __init__(self, bucket: ObjectBucket, read: ReadsStoredWeights, *, required: bool) -> None:
        self._read = read
        self._required = required
        self._weights = StoredStateDicts(bucket, self._read_all)
        self._proofs = StoredStateDicts(bucket, self._read_proof)
        self._proof: Proof | None = None

    def fetch(self, version: Version, timeout: float) -> FetchedVersion:
        """See `ReadsVersions`."""
        weights = self._weights.fetch(version.published, timeout)
        return FetchedVersion(weights.state_dict, self._proof)

    def proof(self, version: Version, timeout: float) -> Proof | None:
        """See `ReadsVersions`."""
        self._proofs.fetch(version.published, timeout)
        return self._proof

    def close(self) -> None:
        """See `ReadsVersions`."""
        self._weights.close()
        self._proofs.close()

    def _read_all(
        self, bucket: ObjectBucket, stored: Stored, *, deadline: float
    ) -> Mapping[str, torch.Tensor]:
        self._read_proof(bucket, stored, deadline=deadline)
        return self._read(bucket, stored, deadline=deadline)

    def _read_proof(
        self, bucket: ObjectBucket, stored: Stored, *, deadline: float
    ) -> Mapping[str, torch.Tensor]:
        del deadline  # when the bucket gives up
        self._proof = _proof_of(bucket, stored)
        if self._proof is None and self._required:
            raise NoProofError(f"version {stored.manifest.step} was saved without a proof")
        return {}


class CountedReads:
    """Another `ReadsStoredWeights`, of which the metrics count the weights' bytes."""

    def __init__(self, read: ReadsStoredWeights, metrics: AgentMetrics) -> None:
        self._read = read
        self._metrics = metrics

    def __call__(
        self, bucket: ObjectBucket, stored: Stored, *, deadline: float
    ) -> Mapping[str, torch.Tensor]:
        """See `ReadsStoredWeights`."""
        tensors = self._read(bucket, stored, deadline=deadline)
        self._metrics.fetched("store", sum(tensor.nbytes for tensor in tensors.values()))
        return tensors


def _proof_of(bucket: ObjectBucket, stored: Stored) -> Proof | None:
    """The proof of a committed step; None: the step was saved without one.

    Raises:
        DamagedFileError: the proof cannot be understood, or there are several.
        DigestMismatchError: the proof is gone, differs from the manifest, or is of another step.
        StoreError: the bucket cannot be read.
    """
    step = stored.manifest.step
    found = [file for file in stored.manifest.files if Path(file.path).name == PROOF_NAME]
    if not found:
        return None
    path = Path(found[0].path)
    if len(found) > 1:
        raise DamagedFileError(path, f"is one of {len(found)} proofs, expected one")
    try:
        data = OpenedFiles.of(bucket, stored).read(found[0])
    except (ObjectMissingError, ObjectChangedError, DifferentBytesError) as error:
        raise DigestMismatchError(str(error)) from error
    proof = decode_proof(data, path)
    if proof.weight_version != step:
        raise DigestMismatchError(
            f"the proof of version {step} is of version {proof.weight_version}"
        )
    return proof
