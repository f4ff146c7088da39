"""Versions of a store with their proofs: anchors and deltas, folded as explorers do."""

import time
from pathlib import Path

from trainsync.agent.admission.reading import FetchedVersion, NoProofError
from trainsync.agent.fellows.objects import FellowsObjects
from trainsync.agent.metrics import AgentMetrics
from trainsync.agent.version import Version
from trainsync.storage.errors import DamagedFileError
from trainsync.storage.objects.bucket import ObjectBucket
from trainsync.weights.errors import DigestMismatchError
from trainsync.weights.proof.record import Proof, decode_proof
from trainsync.weights.transports.anchors.source import StoreSource


class StoredVersions:
    """Reads the versions that `sync.method: store` publishes. See `ReadsVersions`.

    The reader holds the version that was read last, from which deltas lead to the next one, and
    the memory for that version.

    Args:
        bucket: with the right to read alone.
        required: whether a version without a proof is refused.
        fellows: gives objects; None: the bucket does.

    Raises:
        DeltaError: numba is not there.
    """

    def __init__(
        self,
        bucket: ObjectBucket,
        metrics: AgentMetrics,
        *,
        required: bool,
        fellows: FellowsObjects | None = None,
    ) -> None:
        self._source = StoreSource(bucket, read=fellows)
        self._fellows = fellows
        self._metrics = metrics
        self._required = required

    def fetch(self, version: Version, timeout: float) -> FetchedVersion:
        """See `ReadsVersions`."""
        started = time.monotonic()
        proof = self.proof(version, timeout)
        left = max(0.0, started + timeout - time.monotonic())
        if self._fellows is not None:
            self._fellows.begin(version.step, version.published.meta.bytes)
        weights = self._source.fetch(version.published, left)
        if self._fellows is None:  # else fellows count
            self._metrics.fetched("store", weights.bytes)
        self._source.copied(weights)  # for the next delta, while this version is staged
        return FetchedVersion(weights.state_dict, proof)

    def proof(self, version: Version, timeout: float) -> Proof | None:
        """See `ReadsVersions`."""
        data = self._source.proof(version.published, timeout)
        if data is None:
            if self._required:
                raise NoProofError(f"version {version.step} was published without a proof")
            return None
        try:
            proof = decode_proof(data, Path(f"{version.step}.proof"))
        except DamagedFileError as error:
            raise DigestMismatchError(str(error)) from error
        if proof.weight_version != version.step:
            raise DigestMismatchError(
                f"the proof of version {version.step} is of version {proof.weight_version}"
            )
        return proof

    def close(self) -> None:
        """See `ReadsVersions`."""
        self._source.close()
