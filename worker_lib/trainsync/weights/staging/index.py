"""The index of a staged version, and the reference by which a server is told of the version."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Final, Literal

from pydantic import Field, TypeAdapter
from pydantic.dataclasses import dataclass

from trainsync.storage.digest import PATTERN, manifest_digest
from trainsync.storage.errors import DamagedFileError
from trainsync.storage.records import RECORD_CONFIG, decode, encode, read_regular
from trainsync.weights.buckets.layout import StreamSchema, TensorMeta
from trainsync.weights.errors import DigestMismatchError, SharedMemoryError
from trainsync.weights.transports.shared_memory.segment import SegmentGoneError
from trainsync.weights.transports.shared_memory.segment_store import segment_path

_SUFFIX: Final = ".json"
_DIGEST: Final = re.compile(r"sha256:[0-9a-f]{64}")

Count = Annotated[int, Field(ge=0)]
Row = tuple[str, str, Count, tuple[Count, ...]]
"""(name, dtype, bytes of an element, shape), as in `TensorMeta`."""


@dataclass(frozen=True, config=RECORD_CONFIG)
class StagedIndex:
    """The contents of a segment.

    Attributes:
        weight_version: the trainer's global step.
        segment: name of the segment, see `segment_path`.
        bytes: of the stream (`StreamSchema`), with padding.
        digest: xxh3-128 of the tensors' bytes in order, without padding.
        tensors: in order.
    """

    weight_version: Count
    segment: str
    bytes: Count
    digest: Annotated[str, Field(pattern=PATTERN)]
    tensors: tuple[Row, ...]
    version: Literal[1] = 1

    @property
    def schema(self) -> StreamSchema:
        """Where each tensor lies in the segment."""
        return StreamSchema(tuple(TensorMeta(*row) for row in self.tensors))


_INDEX: Final = TypeAdapter(StagedIndex)


@dataclass(frozen=True)
class StagedReference:
    """How a server is told of a staged version: plain data, a few bytes.

    Attributes:
        index: name of the index's file below the memory file system, ``<folder>/<number>.json``.
        digest: ``sha256:<hex>`` of that file.
        hosts: of an engine on several hosts, how each other one is told: in the order of their
            ranks, from 1 on. Each has a memory file system of its own.
        draft: whether some of its tensors are of a draft model.
    """

    index: str
    digest: str
    hosts: tuple["StagedReference", ...] = ()
    draft: bool = False

    def as_dict(self) -> dict[str, Any]:
        """For a request's body."""
        told: dict[str, Any] = {"index": self.index, "digest": self.digest}
        if self.hosts:
            told["hosts"] = [host.as_dict() for host in self.hosts]
        if self.draft:
            told["draft"] = True
        return told

    @staticmethod
    def told(body: Mapping[str, Any]) -> "StagedReference":
        """Of `as_dict`."""
        hosts = tuple(StagedReference.told(host) for host in body.get("hosts", ()))
        return StagedReference(body["index"], body["digest"], hosts, body.get("draft", False))

    def on_host(self, rank: int) -> "StagedReference | None":
        """The reference for the host of that rank; None: nothing is staged there."""
        if rank == 0:
            return StagedReference(self.index, self.digest)
        return self.hosts[rank - 1] if rank <= len(self.hosts) else None


def encode_index(index: StagedIndex) -> bytes:
    """The bytes of the index's file."""
    return encode(_INDEX, index)


def index_name(segment: str) -> str:
    """Name of the index of a segment."""
    return segment + _SUFFIX


def read_index(memory: Path, reference: StagedReference) -> StagedIndex:
    """The index that ``reference`` names.

    Args:
        memory: the memory file system.

    Raises:
        SegmentGoneError: there is none (any more).
        DigestMismatchError: it is not the one that was referred to.
        SharedMemoryError: no area gives such names, or it cannot be read.
    """
    name, suffix, rest = reference.index.partition(_SUFFIX)
    if not suffix or rest or not _DIGEST.fullmatch(reference.digest):
        raise SharedMemoryError(
            f"{reference.index!r} with {reference.digest!r} is no reference to staged weights"
        )
    path = memory / index_name(str(segment_path(memory, name).relative_to(memory)))
    try:
        data = read_regular(path)
    except FileNotFoundError as error:
        raise SegmentGoneError(f"{path}: no weights are staged there") from error
    except (OSError, DamagedFileError) as error:
        raise SharedMemoryError(f"{path} cannot be read: {error}") from error
    if manifest_digest(data) != reference.digest:
        raise DigestMismatchError(
            f"{path} has digest {manifest_digest(data)}, expected {reference.digest}"
        )
    try:
        index = decode(_INDEX, data, path)
    except DamagedFileError as error:
        raise SharedMemoryError(f"{path} is no index: {error}") from error
    schema = index.schema
    names = {tensor.name for tensor in schema.tensors}
    if index.segment != name or index.bytes != schema.total or len(names) != len(schema.tensors):
        raise SharedMemoryError(f"{path} contradicts itself: it is no index of {name}")
    return index
