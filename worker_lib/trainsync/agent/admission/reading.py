"""Versions with their proofs; on a volume one lease holds both while they are read."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch

from trainsync.agent.version import Version
from trainsync.storage.saves.manifest import Manifest
from trainsync.weights.errors import WeightsError
from trainsync.weights.proof.record import Proof, read_proof
from trainsync.weights.transports.volume.fetcher import ReadsWeights, VolumeSource


class NoProofError(WeightsError):
    """A version was saved without a proof, and one is required."""


@dataclass(frozen=True)
class FetchedVersion:
    """A version.

    Attributes:
        tensors: full CPU tensors.
        proof: None: the version was saved without one.
    """

    tensors: Mapping[str, torch.Tensor]
    proof: Proof | None


class ReadsVersions(Protocol):
    """Reads versions. One thread, and another one for `close`."""

    def fetch(self, version: Version, timeout: float) -> FetchedVersion:
        """A version, verified; its tensors are valid until the next call.

        Raises:
            NoProofError: the version has no proof, and one is required; no weights are read.
            Also errors of `WeightSource.fetch`.
        """
        ...

    def proof(self, version: Version, timeout: float) -> Proof | None:
        """The proof alone; raises as `fetch`."""
        ...

    def close(self) -> None:
        """Let go of everything."""
        ...


class CommittedVersions:
    """Reads the committed versions of a run's directory. One thread.

    Args:
        directory: of the run; written to, for leases.
        name: of this agent, in its leases.
        read: puts weights together.
        required: whether a version without a proof is refused.
    """

    def __init__(self, directory: Path, name: str, read: ReadsWeights, *, required: bool) -> None:
        self._read = read
        self._required = required
        self._weights = VolumeSource(directory, name, self._read_all)
        self._proofs = VolumeSource(directory, name, self._read_proof)
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
        self, directory: Path, manifest: Manifest, *, deadline: float
    ) -> Mapping[str, torch.Tensor]:
        self._read_proof(directory, manifest, deadline=deadline)
        return self._read(directory, manifest, deadline=deadline)

    def _read_proof(
        self, directory: Path, manifest: Manifest, *, deadline: float
    ) -> Mapping[str, torch.Tensor]:
        self._proof = read_proof(directory, manifest)
        if self._proof is None and self._required:
            raise NoProofError(f"version {manifest.step} was saved without a proof")
        return {}
