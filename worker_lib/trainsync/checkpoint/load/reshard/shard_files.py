"""The shard files of one component of a committed step, and how their tensors lie on the ranks."""

import ctypes
import logging
import mmap
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Final

import torch

from trainsync.checkpoint.errors import CorruptCheckpointError, StateMismatchError, lacks_memory
from trainsync.checkpoint.load.reshard.plan import Layout, Split, plain
from trainsync.checkpoint.shard_names import parse_shard_file_name, shard_file_name
from trainsync.dist.sharded import is_dtensor
from trainsync.storage.saves.receipts import FileEntry


@dataclass(frozen=True)
class Component:
    """The files of ``save_async(name, …)`` on all ranks: one for each rank that saved."""

    name: str
    subdir: str
    world_size: int
    ranks: frozenset[int]

    def path(self, rank: int) -> str:
        """Path of a rank's file, relative to the step's directory."""
        return f"{self.subdir}/{shard_file_name(self.name, rank, self.world_size)}"

    def is_saved_by(self, rank: int, world_size: int) -> bool:
        """Whether the rank of this number saved a file, as one of as many ranks."""
        return self.world_size == world_size and rank in self.ranks

    @property
    def one_for_all(self) -> bool:
        """Whether rank 0 alone saved it: all ranks then load rank 0's."""
        return self.ranks == {0}

    def home(self, rank: int, world_size: int) -> int:
        """The saved rank that stands for ``rank`` of those that load: itself, if they are as many.

        Raises:
            CorruptCheckpointError: the file of a rank is missing.
        """
        if self.one_for_all:
            return 0
        missing = [n for n in range(self.world_size) if n not in self.ranks]
        if missing:
            raise CorruptCheckpointError(
                f"the checkpoint has no {self.path(missing[0])}, though it has "
                f"{self.path(min(self.ranks))}; expected one file for each of the "
                f"{self.world_size} ranks that saved it"
            )
        return rank % self.world_size


def find_component(files: Iterable[FileEntry], name: str, subdir: str) -> Component | None:
    """The component of that name in ``subdir`` of a step; None when it was not saved.

    Raises:
        CorruptCheckpointError: there are files of two numbers of ranks.
    """
    found: dict[int, set[int]] = {}
    for entry in files:
        folder, _, file_name = entry.path.rpartition("/")
        parsed = parse_shard_file_name(file_name)
        if folder == subdir and parsed is not None and parsed[0] == name:
            found.setdefault(parsed[2], set()).add(parsed[1])
    if len(found) > 1:
        raise CorruptCheckpointError(
            f"{subdir}/{name} was saved by {' and by '.join(map(str, sorted(found)))} ranks; "
            "expected one number of ranks"
        )
    for world_size, ranks in found.items():
        return Component(name, subdir, world_size, frozenset(ranks))
    return None


def folders_with(files: Iterable[FileEntry], name: str) -> set[str]:
    """Folders of a step that hold shards of a component of that name."""
    folders = set()
    for entry in files:
        folder, _, file_name = entry.path.rpartition("/")
        parsed = parse_shard_file_name(file_name)
        if parsed is not None and parsed[0] == name:
            folders.add(folder)
    return folders


def open_shard(path: Path, *, mapped: bool = True) -> Any:
    """The state in a shard file. Needs no process group. The caller checks the file's digest.

    Args:
        mapped: tensors are mapped from the file, and only what is used of them is read; they must
            not outlive it.

    Raises:
        CorruptCheckpointError: it cannot be understood.
        MemoryError: there is no room for it, which is no damage.
    """
    return read_archive(path, str(path), map_location="cpu", mmap=mapped)


def read_archive(file: Path | BinaryIO, name: str, **how: Any) -> Any:
    """As `open_shard`, also of a file that is none of this machine's.

    Args:
        name: for messages.
        how: see `torch.load`.
    """
    allow_dtensors()
    with _quiet_meshes():
        try:
            return torch.load(file, weights_only=True, **how)
        except Exception as error:  # unpickling rubbish raises anything
            if lacks_memory(error):
                raise MemoryError(f"{name}: {error}") from error
            raise CorruptCheckpointError(f"{name} cannot be read: {error}") from error


def allow_dtensors() -> None:
    """Register what a DTensor consists of with ``torch.load(weights_only=True)``."""
    import torch.distributed.tensor
    from torch.distributed.tensor.placement_types import _StridedShard

    # torch before 2.15 leaves it out: FSDP2 over tensor parallelism.
    torch.serialization.add_safe_globals([_StridedShard])


def forget_pages(tensor: torch.Tensor) -> None:
    """Take what was read of a mapped tensor out of this process's memory; its file has it still.

    Without it a process that reads a large file bit by bit has all of it in memory in the end, as
    far as the ranks that count are concerned.

    Args:
        tensor: contiguous, of a file that `open_shard` mapped, and not written to: memory without a
            file behind it would be zeros afterwards, and what was written would be lost.
    """
    if _MADVISE is None or not tensor.is_contiguous():
        return
    page = mmap.PAGESIZE
    start = -(-tensor.data_ptr() // page) * page
    end = (tensor.data_ptr() + tensor.nbytes) // page * page
    if start < end:
        # Advice: the system may refuse it.
        _MADVISE(ctypes.c_void_p(start), ctypes.c_size_t(end - start), mmap.MADV_DONTNEED)


def large_pages(tensor: torch.Tensor) -> torch.Tensor:
    """``tensor``, whose memory was not touched yet: where it is large the system gives pages of
    2 MiB for it, which takes a quarter of the time of those of 4 KiB."""
    advice = getattr(mmap, "MADV_HUGEPAGE", None)
    start = -(-tensor.data_ptr() // _LARGE_PAGE) * _LARGE_PAGE
    end = (tensor.data_ptr() + tensor.nbytes) // _LARGE_PAGE * _LARGE_PAGE
    if _MADVISE is not None and advice is not None and start < end:
        _MADVISE(ctypes.c_void_p(start), ctypes.c_size_t(end - start), advice)
    return tensor


def _find_madvise() -> Any:
    """The function of Linux's C library; elsewhere the advice means other things."""
    return ctypes.CDLL(None).madvise if sys.platform == "linux" else None


_MADVISE: Final = _find_madvise()
_LARGE_PAGE: Final = 2 << 20


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """The rank's own part of a tensor that was read from a file."""
    local: torch.Tensor = tensor._local_tensor if is_dtensor(tensor) else tensor
    return local


def layout_of(name: str, tensor: torch.Tensor, rank: int) -> Layout:
    """The layout of ``tensor``, as ``rank`` holds it; for live tensors and for saved ones.

    Raises:
        StateMismatchError: its placement is none that a state can have here.
    """
    if not is_dtensor(tensor):
        return plain(tensor.shape, rank)
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.placement_types import _StridedShard

    spec = tensor._spec
    ascending = all(
        list(entry.mesh_dims) == sorted(entry.mesh_dims) for entry in spec.shard_order or ()
    )
    splits: list[Split | None] = []
    for placement in spec.placements:
        if isinstance(placement, _StridedShard):
            splits.append(Split(placement.dim, int(placement.split_factor)))
        elif type(placement) is Shard and ascending:
            splits.append(Split(placement.dim))
        elif type(placement) is Replicate:
            splits.append(None)
        else:
            raise StateMismatchError(
                f"{name} is placed as {spec.placements} on its mesh; expected Shard or Replicate"
            )
    mesh = _mesh_ranks(name, spec.mesh, rank)
    return Layout(
        tuple(tensor.shape), tuple(mesh.shape), tuple(mesh.flatten().tolist()), tuple(splits)
    )


def _mesh_ranks(name: str, mesh: Any, rank: int) -> torch.Tensor:
    # mesh.mesh would ask the process group, which there may not be, for the rank of this process.
    meshes: list[torch.Tensor] = list(mesh._layout.remap_to_tensor(mesh._rank_map))
    for ranks in meshes:
        if len(meshes) == 1 or bool((ranks == rank).any()):
            return ranks
    raise StateMismatchError(f"{name} of rank {rank} lies on a mesh that rank is not part of")


@contextmanager
def _quiet_meshes() -> Iterator[None]:
    """A mesh out of a file warns that its process groups do not exist here; they need not."""
    logger = logging.getLogger("torch.distributed.device_mesh")
    logger.addFilter(_not_about_groups)
    try:
        yield
    finally:
        logger.removeFilter(_not_about_groups)


def _not_about_groups(record: logging.LogRecord) -> bool:
    return "before the PGs were created" not in record.getMessage()
