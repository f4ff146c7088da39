"""What an explorer serves, and the set of tensors beside it that the next version is written to."""

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Final

import torch

from trainsync.weights.buckets.layout import StreamSchema, TensorMeta
from trainsync.weights.errors import InconsistentUploadError, WeightsUnavailableError


@dataclass(frozen=True)
class Served:
    """One whole, verified version.

    Attributes:
        attempt: of the trainer that sent it.
        version: the trainer's global step.
        digest: of the bytes in the order in which they came.
        tensors: full tensors, not to be written to: on the CPU, or on the receiver's device. Who
            reads those on another stream than the default one lets it end before letting go.
    """

    attempt: int
    version: int
    digest: str
    tensors: Mapping[str, torch.Tensor]


@dataclass
class StagingSet:
    """Memory of one version: the stream as one array of bytes, and the tensors in it."""

    schema: StreamSchema
    data: torch.Tensor
    tensors: dict[str, torch.Tensor]
    ours: bool = True
    holds: str | None = None  # digest of the bytes; None while they are written to
    readers: int = field(default=0)


_CPU: Final = torch.device("cpu")


def allocate(schema: StreamSchema, device: torch.device = _CPU) -> StagingSet:
    """Memory for a version, touched once, so that it is there.

    Raises:
        InconsistentUploadError: a dtype is unknown here.
        RuntimeError: there is not enough memory.
    """
    return views_of(schema, torch.zeros(schema.total, dtype=torch.uint8, device=device))


def views_of(schema: StreamSchema, data: torch.Tensor, *, ours: bool = True) -> StagingSet:
    """The tensors of a stream, where they lie.

    Args:
        data: uint8 of the stream's size.
        ours: whether it may be written to again when it is no longer served.

    Raises:
        InconsistentUploadError: a dtype is unknown here.
    """
    tensors = {
        meta.name: data[offset : offset + meta.size].view(_dtype(meta)).view(meta.shape)
        for meta, offset in zip(schema.tensors, schema.offsets, strict=True)
    }
    return StagingSet(schema, data, tensors, ours)


class WeightSets:
    """The served set and a spare one, which change places at each flip. Any thread.

    A set that somebody still reads is never written to: then the next version gets new memory, and
    the old set goes with its last reader.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._served: Served | None = None
        self._current: StagingSet | None = None
        self._spare: StagingSet | None = None

    @property
    def served(self) -> Served | None:
        """What is served now. Its tensors are only to be read under `reading`."""
        return self._served

    @contextmanager
    def reading(self) -> Iterator[Served | None]:
        """What is served, unchanged until the block ends."""
        with self._lock:
            served, current = self._served, self._current
            if current is not None:
                current.readers += 1
        try:
            yield served
        finally:
            if current is not None:
                with self._lock:
                    current.readers -= 1

    def stage(self, schema: StreamSchema, device: torch.device = _CPU) -> StagingSet:
        """The set to write the next version to. Raises as `allocate` does."""
        with self._lock:
            spare = self._spare
            if (
                spare is not None
                and spare.readers == 0
                and spare.schema == schema
                and spare.data.device == device
            ):
                return spare
            self._spare = None
        del spare  # free the old one first
        fresh = allocate(schema, device)
        with self._lock:
            self._spare = fresh
        return fresh

    def copy_of_served(self) -> StagingSet:
        """The set to write the next version to, which holds what is served.

        Raises:
            WeightsUnavailableError: nothing is served. And as `allocate` does.
        """
        with self._lock:
            current = self._current
        if current is None:
            raise WeightsUnavailableError("nothing is served yet")
        staged = self.stage(current.schema)
        if staged.holds is None or staged.holds != current.holds:
            staged.data.copy_(current.data)
            staged.holds = current.holds
        return staged

    def forget_spare(self) -> None:
        """Something may write to the set beside the served one still: never use it again."""
        with self._lock:
            self._spare = None

    def spare_of(self, digest: str) -> StagingSet | None:
        """The set beside the served one, if it holds these bytes and nobody reads it."""
        with self._lock:
            spare = self._spare
            if spare is None or spare.readers or spare.holds != digest:
                return None
            return spare

    def flip(self, staged: StagingSet, served: Served) -> StagingSet | None:
        """Serve ``staged``, which is whole, as ``served``; the set served so far becomes spare.

        Unless it is somebody else's memory, or a GPU's, where it is dear and soon had again. Nor is
        a spare set kept beside such memory. It is returned, for it takes a while to give so much
        memory back, and others wait for the flip.
        """
        with self._lock:
            former = self._current
            keep = former is not None and all(
                one.ours and one.data.device.type == "cpu" for one in (former, staged)
            )
            self._spare = former if keep else None
            self._current = staged
            self._served = served
            staged.holds = served.digest
        return former


def _dtype(meta: TensorMeta) -> torch.dtype:
    dtype = getattr(torch, meta.dtype, None)
    if not isinstance(dtype, torch.dtype) or dtype.itemsize != meta.itemsize:
        raise InconsistentUploadError(f"{meta.name}: unknown dtype {meta.dtype!r}")
    return dtype
