"""Weights by a safetensors file in shared memory, beside the staged version: a second copy."""

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from trainsync.engines.servers.calls import ServerCalls
from trainsync.engines.servers.checkpoint_folder import lay_checkpoint
from trainsync.engines.servers.sglang_routes.answers import succeed
from trainsync.engines.servers.sglang_routes.base import LaidVersion
from trainsync.weights.staging.index import StagedIndex

_UPDATE = "/update_weights_from_disk"


class DiskRoute:
    """See `Route`.

    Args:
        memory: the memory file system, which the server sees at the same path.
    """

    def __init__(self, calls: ServerCalls, memory: Path) -> None:
        self._calls = calls
        self._memory = memory

    def lay(
        self,
        index: StagedIndex,
        tensors: Mapping[str, torch.Tensor],
        info: Mapping[str, Any],
        deadline: float,
    ) -> LaidVersion:
        """See `Route`. The whole version is written."""
        return _Folder(self._calls, lay_checkpoint(self._memory, index, tensors))

    def close(self) -> None:
        """See `Route`."""


class _Folder:
    def __init__(self, calls: ServerCalls, folder: Path) -> None:
        self._calls = calls
        self._folder = folder

    def load(self, tag: str, deadline: float) -> None:
        body = {
            "model_path": str(self._folder),
            "load_format": "safetensors",
            "weight_version": tag,
            "flush_cache": True,
        }
        succeed(self._calls, _UPDATE, deadline, body)

    def close(self) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)
