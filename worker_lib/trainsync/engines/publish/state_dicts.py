"""The parts of a state dict's save and upload that are the same for FSDP and Megatron engines."""

import logging
import weakref
from collections.abc import Mapping
from typing import NamedTuple

import torch
import torch.distributed

from trainsync.checkpoint.coordinator import CheckpointCoordinator
from trainsync.weights.transports.object_store.upload import Uploaded, Uploader


class UploadKind(NamedTuple):
    """One uploader serves one kind of upload, so that each kind keeps its own base for deltas."""

    delta: bool
    dtype: torch.dtype | None
    ranks: tuple[int, ...]


_UPLOADERS: "weakref.WeakKeyDictionary[torch.nn.Module, dict[UploadKind, Uploader]]" = (
    weakref.WeakKeyDictionary()
)


def uploader_of(module: torch.nn.Module, kind: UploadKind) -> Uploader:
    """This rank's uploader of ``module``, made at the first call for this kind of upload."""
    uploaders = _UPLOADERS.setdefault(module, {})
    uploader = uploaders.get(kind)
    if uploader is None:
        ranks = kind.ranks
        rank = ranks.index(torch.distributed.get_rank()) if len(ranks) > 1 else 0
        uploader = Uploader(rank, len(ranks), delta=kind.delta, dtype=kind.dtype)
        uploaders[kind] = uploader
    return uploader


def log_uploaded(logger: logging.Logger, uploaded: Uploaded) -> None:
    """Log one rank's upload of its part of a version."""
    logger.info(
        "version %d: %d bytes uploaded in %.3f s%s",
        uploaded.version,
        uploaded.bytes,
        uploaded.seconds,
        ", published" if uploaded.published else "",
    )


def log_saved(
    logger: logging.Logger,
    coordinator: CheckpointCoordinator,
    step: int,
    how: str = "staged",
    coordinates: Mapping[str, int] | None = None,
) -> None:
    """Log how long training waited for one rank's part of a state dict, and how it was saved."""
    place = ", ".join(f"{name} {rank}" for name, rank in (coordinates or {}).items())
    logger.info(
        "step %d: state dict of rank %d%s %s in %.3f s",
        step,
        coordinator.rank,
        f" ({place})" if place else "",
        how,
        coordinator.stats.last_blocked_seconds,
    )
