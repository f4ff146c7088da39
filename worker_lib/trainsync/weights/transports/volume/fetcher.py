"""The method ``checkpoint`` on the explorer's side: committed state dicts on the run's volume."""

import re
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final, Protocol

import torch

from trainsync.api.protocol import SaveKind
from trainsync.storage.errors import DamagedFileError, LeaseError, LockTimeoutError
from trainsync.storage.layout import RunDirectory
from trainsync.storage.leases import LOCK_SECONDS, reading
from trainsync.storage.saves.manifest import Manifest
from trainsync.weights.buckets.layout import TensorMeta
from trainsync.weights.counts import TransferKind
from trainsync.weights.errors import (
    DigestMismatchError,
    WeightsReplacedError,
    WeightsUnavailableError,
)
from trainsync.weights.transports.base import Weights, WeightSource, check_fit, meta_of
from trainsync.weights.versions import Published, VersionMeta

_LONGEST_HOLDER: Final = 64
_NOT_IN_HOLDER = re.compile(r"[^A-Za-z0-9._-]")


class ReadsWeights(Protocol):
    """Puts the weights of a committed step together; given in, since it is another layer's work."""

    def __call__(
        self, directory: Path, manifest: Manifest, *, deadline: float
    ) -> Mapping[str, torch.Tensor]:
        """Full CPU tensors that own their memory, every file verified.

        Raises:
            DigestMismatchError: what is there is not what was committed.
            InconsistentUploadError: it is, and is not the weights of one model.
            WeightsUnavailableError: it could not be read by ``deadline`` (`time.monotonic`).
            OSError: the volume failed.
        """
        ...


class VolumeSource(WeightSource):
    """Reads what was announced while a lease holds it, and whole, before any of it is loaded.

    Args:
        directory: of the run, on a volume that this process may write to: leases are files.
        explorer: names the lease, for people.
        expected: what the model takes; other weights are refused. None: anything.
    """

    def __init__(
        self,
        directory: Path,
        explorer: str,
        read: ReadsWeights,
        *,
        expected: Sequence[TensorMeta] | None = None,
    ) -> None:
        self._expected = expected
        self._run = RunDirectory(directory)
        # With a letter first: an explorer's id may begin with another character.
        self._holder = ("e-" + _NOT_IN_HOLDER.sub("-", explorer))[:_LONGEST_HOLDER]
        self._read = read

    def fetch(self, published: Published, timeout: float) -> Weights:
        """See `WeightSource`."""
        started = time.monotonic()
        meta, location = published.meta, published.location
        what = f"version {meta.version}"
        if location is None:
            raise WeightsUnavailableError(f"{what} was published by {meta.method}, not on a volume")
        try:
            with reading(
                self._run,
                SaveKind.STATE_DICT,
                location.step,
                self._holder,
                lock_seconds=min(timeout, LOCK_SECONDS),
            ) as lease:
                if lease.committed.digest != location.manifest_digest:
                    raise WeightsReplacedError(
                        f"{what}: {location.path} holds {lease.committed.digest} by now, expected "
                        f"{location.manifest_digest} of attempt {location.attempt}"
                    )
                tensors = self._read(
                    self._run.step(location.step),
                    lease.committed.manifest,
                    deadline=started + timeout,
                )
        except LeaseError as error:
            raise WeightsReplacedError(f"{what} is gone: {error}") from error
        except LockTimeoutError as error:
            raise WeightsUnavailableError(f"{what} could not be leased: {error}") from error
        except DamagedFileError as error:
            raise DigestMismatchError(f"{what} is refused: {error}") from error
        except OSError as error:
            raise WeightsUnavailableError(f"{what} could not be read: {error}") from error
        return as_fetched(meta, tensors, self._expected, started)


def as_fetched(
    meta: VersionMeta,
    tensors: Mapping[str, torch.Tensor],
    expected: Sequence[TensorMeta] | None,
    started: float,
) -> Weights:
    """What was read of a committed version, since ``started`` (`time.monotonic`).

    Raises:
        As `check_fit`.
    """
    offered = [meta_of(name, tensor) for name, tensor in tensors.items()]
    check_fit(meta.version, expected, offered)
    size = sum(tensor.nbytes for tensor in tensors.values())
    took = time.monotonic() - started
    return Weights(
        meta.version, meta.digest, dict(tensors), size, took, {TransferKind.VOLUME: size}
    )
