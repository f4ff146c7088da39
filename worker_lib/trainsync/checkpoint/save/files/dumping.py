"""A state as the bytes of a file that ``torch.load(weights_only=True)`` reads."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any, BinaryIO

import torch
from torch.utils import _config_module
from torch.utils.serialization import config as torch_config


def dump(state: Any, file: BinaryIO) -> None:
    """Write ``state`` into ``file``: the same bytes for the same state.

    Args:
        state: tensors must not change meanwhile (see `trainsync.checkpoint.save.staging`).
    """
    with without_crc():
        torch.save(state, file)


def without_crc() -> AbstractContextManager[None]:
    """The manifest's digest guards every byte; torch's own checksum of the same bytes would take a
    quarter of the time."""
    # Before torch's settings were each thread's own, one would switch it off for the whole process.
    if not hasattr(_config_module, "ContextVar"):
        return nullcontext()
    # `patch` is put into the module as it is imported, which mypy cannot see.
    patch: AbstractContextManager[None] = torch_config.patch(  # type: ignore[attr-defined]
        {"save.compute_crc32": False}
    )
    return patch
