"""Shards in a store: opened by their index alone; a rank reads the ranges that it needs.

No file of this machine is made. What is wanted goes into its target, beside which `ranges.AT_ONCE`
ranges are in memory at most, and of tensors that are not contiguous twice `files.AT_ONCE` bytes.
"""

from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, BinaryIO, Final, cast

import torch

from trainsync.checkpoint.load.ranged_file import RangedFile
from trainsync.checkpoint.load.ranges import FileRange, Ranges
from trainsync.checkpoint.load.reshard.files import AT_ONCE, Pair, in_pieces, is_plain, span
from trainsync.checkpoint.load.reshard.shard_files import local_of, read_archive
from trainsync.checkpoint.load.resume import Resume
from trainsync.checkpoint.load.stored import StoredFiles
from trainsync.checkpoint.save.staging.pytree import map_tensors
from trainsync.dist.sharded import is_dtensor

_OPENED_AT_ONCE: Final = 8  # an index is small, and a store far
_AHEAD: Final = 32 << 20  # of a file that is read from its begin to its end


class StoredShards:
    """See `ShardFiles`: the files of a checkpoint in a store, each byte compared with the manifest.

    Tensors of an opened file are on the meta device: one that is used without `copy` or `real`
    raises.
    """

    def __init__(self, resume: Resume, files: StoredFiles) -> None:
        self._ranges = Ranges(resume, files)

    def forget(self) -> None:
        """Give back the memory of what parts of files are checked by."""
        self._ranges.forget()

    def find(self, paths: Iterable[str]) -> None:
        """Have in memory what parts of the files are checked by. Raises as `open`."""
        self._ranges.prepare(paths)

    def is_mapped(self, path: str) -> bool:
        """See `ShardFiles`."""
        del path
        return False

    @property
    def fetched(self) -> int:
        """How many bytes came from the store so far."""
        return self._ranges.fetched

    def open(self, path: str) -> Any:
        """See `ShardFiles`.

        Raises:
            CorruptCheckpointError: the file is gone, differs, or cannot be understood.
            StoreError: the store cannot be read.
        """
        state = self._read(path, self._ranges.block(path), "meta")
        if not all(_is_as_stored(local_of(tensor)) for tensor in _tensors(state)):
            return self.load(path)
        # The ranks of a mesh are a tensor of the file, too.
        meshes = {id(t._spec.mesh): t._spec.mesh for t in _tensors(state) if is_dtensor(t)}
        ranks = self.real(path, [mesh._rank_map for mesh in meshes.values()])
        for mesh, real in zip(meshes.values(), ranks, strict=True):
            mesh._rank_map = real
        return state

    def open_all(self, paths: Iterable[str]) -> dict[str, Any]:
        """As `open`, several files at once; by path."""
        paths = list(dict.fromkeys(paths))
        self.find(paths)
        with ThreadPoolExecutor(_OPENED_AT_ONCE, thread_name_prefix="trainsync-fetch") as pool:
            return dict(zip(paths, pool.map(self.open, paths), strict=True))

    def load(self, path: str, map_location: str | torch.device = "cpu") -> Any:
        """See `ShardFiles`. Raises as `open`."""
        return self._read(path, _AHEAD, map_location)

    def copy(self, pairs: Iterable[Pair]) -> None:
        """See `ShardFiles`. Raises as `open`."""
        parts: list[FileRange] = []
        between: list[tuple[Pair, torch.Tensor]] = []
        size = 0
        for path, target, source in in_pieces(pairs):
            if not source.is_meta:
                target.copy_(source)
            elif not source.numel():
                continue
            elif _takes_bytes(target) and source.is_contiguous():
                parts.append(FileRange(path, _start(source), _bytes_of(target)))
            else:
                # Rows with gaps between them, or a target elsewhere: the bytes from the first
                # element to the last are read, and copied from there.
                held = torch.empty(span(source), dtype=torch.uint8, device="cpu")
                parts.append(FileRange(path, _start(source), _bytes_of(held)))
                between.append(((path, target, source), held))
                size += held.nbytes
            if size >= AT_ONCE:
                self._fill(parts, between)
                parts, between, size = [], [], 0
        self._fill(parts, between)

    def real(self, path: str, value: Any) -> Any:
        """See `ShardFiles`. Raises as `open`."""
        pairs: list[Pair] = []

        def make(tensor: torch.Tensor, _: object) -> torch.Tensor:
            local = local_of(tensor)
            if not local.is_meta:
                return tensor
            made = torch.empty(local.shape, dtype=local.dtype, device="cpu")
            pairs.append((path, made, local))
            if is_dtensor(tensor):
                return type(tensor)(made, tensor._spec, requires_grad=False)
            return made

        found = map_tensors(value, make)
        self.copy(pairs)
        return found

    # -- inside -----------------------------------------------------------------------------

    def _read(self, path: str, ahead: int, map_location: str | torch.device) -> Any:
        file = RangedFile(self._ranges, path, ahead)
        try:
            # torch's own default may be to map files, which needs one.
            return read_archive(cast(BinaryIO, file), path, map_location=map_location, mmap=False)
        finally:
            if file.error is not None:
                raise file.error from None  # torch has made another one of it, or none

    def _fill(self, parts: list[FileRange], between: list[tuple[Pair, torch.Tensor]]) -> None:
        self._ranges.read(parts)
        for (_, target, source), held in between:
            target.copy_(held.view(source.dtype).as_strided(source.shape, source.stride(), 0))


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        for part in value.values():
            yield from _tensors(part)
    elif isinstance(value, list | tuple):
        for part in value:
            yield from _tensors(part)


def _is_as_stored(tensor: torch.Tensor) -> bool:
    """Whether its elements are bytes of its file: not with an older torch, which tells no place, in
    its format without an index, or where a conjugate is taken when it is read."""
    return _offset(tensor) is not None and not tensor.is_conj() and not tensor.is_neg()


def _takes_bytes(tensor: torch.Tensor) -> bool:
    return tensor.device.type == "cpu" and is_plain(tensor) and not tensor.requires_grad


def _offset(tensor: torch.Tensor) -> int | None:
    """Where the storage of a tensor on the meta device lies in its file, as `torch.load` noted."""
    offset: int | None = getattr(tensor.untyped_storage(), "_checkpoint_offset", None)
    return offset


def _start(tensor: torch.Tensor) -> int:
    offset = _offset(tensor)
    assert offset is not None, "open has looked, and found one of each tensor"
    return offset + int(tensor.storage_offset()) * tensor.element_size()


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    return tensor.reshape(-1).view(torch.uint8).numpy().data
