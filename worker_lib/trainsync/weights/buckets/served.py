"""The set of tensors that an explorer serves, and the one that the next version is written to."""

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Final

import torch

from trainsync.weights.buckets.layout import StreamSchema, TensorMeta
from trainsync.weights.errors import InconsistentUploadError, WeightsUnavailableError


@dataclass(frozen=True)
class ServedVersion:
    """One whole, verified version.

    Attributes:
        attempt: of the trainer that sent it.
        version: the trainer's global step.
        digest: of the bytes in the order in which they came.
        tensors: full tensors, not to be written to: on the CPU, or on the receiver's device. A
            reader on another stream than the default one lets that stream end before letting go.
        keepable: whether they may be kept under `WeightSets.reading` for as long as a version is
            served; no, where they lie in the trainer's memory.
    """

    attempt: int
    version: int
    digest: str
    tensors: Mapping[str, torch.Tensor]
    keepable: bool = False


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

    A set that has a reader is never written to: then the next version gets new memory, and the old
    set goes with its last reader. Where a version was `copied`, its set is the spare one at
    once: so there is only one, beside what the engine has.

    Attributes:
        keeps_base: what is served is needed to make the next version from what changed.
    """

    def __init__(self) -> None:
        self.keeps_base = False
        self._lock = threading.Lock()
        self._copied: ServedVersion | None = None
        self._served: ServedVersion | None = None
        self._current: StagingSet | None = None
        self._spare: StagingSet | None = None

    @property
    def served(self) -> ServedVersion | None:
        """The version that is served now. Its tensors are only to be read under `reading`."""
        return self._served

    @property
    def held(self) -> str | None:
        """Digest of what is served, if its bytes are here still."""
        with self._lock:
            return None if self._current is None or self._served is None else self._served.digest

    def copied(self, version: int, digest: str) -> None:
        """The engine has a copy of this version: its memory may take the next one."""
        with self._lock:
            served = self._served
            if served is not None and (served.version, served.digest) == (version, digest):
                self._copied = served

    @contextmanager
    def reading(self) -> Iterator[ServedVersion | None]:
        """The served version, unchanged until the block ends; None when its bytes are not here."""
        with self._lock:
            current = self._current
            served = None if current is None else self._served
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
            current = self._current
            if (
                current is not None
                and current.ours
                and current.readers == 0
                and self._copied is self._served
                and not self.keeps_base
            ):
                self._current, self._spare = None, current
            spare = self._spare
            if (
                spare is not None
                and spare.readers == 0
                and spare.schema == schema
                and spare.data.device == device
            ):
                return spare
            self._spare = None
        del spare, current  # free the old ones first
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
        """Never use the spare set again: a collective that was aborted may still write to it."""
        with self._lock:
            self._spare = None

    def spare_of(self, digest: str) -> StagingSet | None:
        """The spare set, if it holds these bytes and has no reader."""
        with self._lock:
            spare = self._spare
            if spare is None or spare.readers or spare.holds != digest:
                return None
            return spare

    def flip(self, staged: StagingSet, served: ServedVersion) -> StagingSet | None:
        """Serve ``staged``, which is whole, as ``served``; the set served so far becomes spare.

        Unless it is memory of the trainer, or of a GPU, where it is scarce and quickly allocated.
        Nor is a spare set kept beside such memory. The former set is returned, since freeing so
        much memory takes a while, and others wait for the flip.
        """
        with self._lock:
            former = self._current
            keep = former is not None and all(
                one.ours and one.data.device.type == "cpu" for one in (former, staged)
            )
            self._spare = former if keep else None
            self._current = staged
            self._served, self._copied = served, None
            staged.holds = served.digest
        return former


def _dtype(meta: TensorMeta) -> torch.dtype:
    dtype = getattr(torch, meta.dtype, None)
    if not isinstance(dtype, torch.dtype) or dtype.itemsize != meta.itemsize:
        raise InconsistentUploadError(f"{meta.name}: unknown dtype {meta.dtype!r}")
    return dtype
