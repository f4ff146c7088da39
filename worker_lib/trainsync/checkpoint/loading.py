"""Load shards of a committed checkpoint: checked against the manifest, without running code."""

from typing import Any

import torch
import torch.distributed.tensor  # registers DTensor for weights_only loading

from trainsync.checkpoint.errors import CorruptCheckpointError, WorldSizeMismatchError
from trainsync.checkpoint.naming import parse_shard_file_name, shard_file_name
from trainsync.checkpoint.resume import Resume
from trainsync.storage.errors import StorageError
from trainsync.storage.manifest import check_file


def load_shard(resume: Resume, path: str, map_location: str | torch.device = "cpu") -> Any:
    """One file of the checkpoint, after its size and digest were checked.

    Args:
        path: relative to the step's directory, for instance
            ``actor/model_world_size_2_rank_0.pt``.

    Raises:
        CorruptCheckpointError: missing, or not what the manifest says.
    """
    entry = resume.entry(path)
    try:
        check_file(resume.path, entry, with_digest=True)
    except StorageError as error:
        raise CorruptCheckpointError(f"step {resume.step}: {error}") from error
    return torch.load(resume.path / path, map_location=map_location, weights_only=True)


def load_rank_shard(
    resume: Resume,
    name: str,
    *,
    rank: int,
    world_size: int,
    subdir: str = "actor",
    map_location: str | torch.device = "cpu",
) -> Any:
    """What ``save_async(name, …)`` saved on ``rank``; DTensors need the process group to exist.

    Raises:
        WorldSizeMismatchError: another number of ranks saved it.
        CorruptCheckpointError: see `load_shard`.
    """
    path = f"{subdir}/{shard_file_name(name, rank, world_size)}"
    sizes = _world_sizes(resume, name, subdir)
    if sizes and world_size not in sizes:
        raise WorldSizeMismatchError(
            f"{name} of step {resume.step} was saved by {max(sizes)} ranks and cannot be loaded "
            f"by {world_size}; expected the same number of ranks"
        )
    return load_shard(resume, path, map_location)


def _world_sizes(resume: Resume, name: str, subdir: str) -> set[int]:
    sizes = set()
    for entry in resume.manifest.files:
        folder, _, file_name = entry.path.rpartition("/")
        parsed = parse_shard_file_name(file_name)
        if folder == subdir and parsed is not None and parsed[0] == name:
            sizes.add(parsed[2])
    return sizes
