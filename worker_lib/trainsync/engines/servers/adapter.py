"""A LoRA adapter as a server reads it: PEFT's folder, written from a version's tensors."""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Self

import torch

from trainsync.checkpoint.merge import safetensors
from trainsync.weights.errors import SchemaMismatchError, SharedMemoryError

CHECK_ADAPTER: Final = "trainsync_check_adapter"
FORGET_ADAPTERS: Final = "trainsync_forget_adapters"
"""Methods of vLLM's workers: one loads a folder without serving it, the other lets each adapter be
read anew by the next step that needs it."""

CONFIG: Final = "adapter_config.json"
_WEIGHTS: Final = "adapter_model.safetensors"
# PEFT's model names the adapter ("default"), its files do not.
_FACTOR: Final = re.compile(r"(?P<layer>.+)\.lora_(?P<half>[AB])(?P<adapter>\.[^.]+)?\.weight")
_MOST_NAMES: Final = 3


class AdapterConfigError(ValueError):
    """A file is not PEFT's configuration of a LoRA adapter."""


@dataclass(frozen=True)
class Adapter:
    """An adapter of a server.

    Attributes:
        name: by which requests ask for it.
        config: PEFT's, the same for every version.
        rank: of all its layers; None: ``config`` has several.
    """

    name: str
    config: Mapping[str, Any]
    rank: int | None

    @classmethod
    def read(cls, name: str, file: Path) -> Self:
        """The adapter whose configuration PEFT has saved in ``file``.

        Raises:
            AdapterConfigError: it cannot be read, or is not of LoRA.
        """
        try:
            text = file.read_text()
        except (OSError, ValueError) as error:
            raise AdapterConfigError(f"{file} cannot be read: {error}") from error
        return cls.parse(name, text, str(file))

    @classmethod
    def parse(cls, name: str, text: str, source: str) -> Self:
        """The adapter with this content of PEFT's file.

        Args:
            source: of the text, for messages.

        Raises:
            AdapterConfigError: it is no JSON, or is not of LoRA.
        """
        try:
            config = json.loads(text)
        except ValueError as error:
            raise AdapterConfigError(f"{source} cannot be read: {error}") from error
        rank = config.get("r") if isinstance(config, dict) else None
        if not isinstance(rank, int) or rank < 1 or config.get("peft_type") != "LORA":
            raise AdapterConfigError(
                f"{source} is no {CONFIG} of LoRA, which has peft_type LORA and a rank r"
            )
        return cls(name, config, None if config.get("rank_pattern") else rank)

    def file(self) -> str:
        """The content of its configuration file."""
        return json.dumps(dict(self.config))

    def tensors(self, version: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """A version's tensors under the names of PEFT's file.

        Raises:
            SchemaMismatchError: they are not those of one adapter of this rank, whole.
        """
        factors = {name: _FACTOR.fullmatch(name) for name in version}
        others = [name for name, factor in factors.items() if factor is None]
        if others or not version:
            shown = ", ".join(others[:_MOST_NAMES])
            raise SchemaMismatchError(
                f"{len(others)} of {len(version)} tensors are none of a LoRA adapter ({shown}); "
                "expected a version that was saved with lora='adapter'"
            )
        found: dict[str, torch.Tensor] = {}
        ranks: dict[str, dict[str, int]] = {}  # by layer and factor
        adapters = set()
        for name, factor in factors.items():
            assert factor is not None, "others are refused above"
            tensor = version[name]
            layer, half = factor["layer"], factor["half"]
            rank = tensor.shape[0 if half == "A" else -1] if tensor.dim() == 2 else None
            if rank is None or rank != (self.rank or rank):
                wanted = "" if self.rank is None else f" of rank {self.rank}, as configured"
                raise SchemaMismatchError(
                    f"{name} is {list(tensor.shape)}, expected a matrix{wanted}"
                )
            found[f"{layer}.lora_{half}.weight"] = tensor
            ranks.setdefault(layer, {})[half] = rank
            adapters.add(factor["adapter"])
        if len(adapters) > 1:
            raise SchemaMismatchError("the version has several adapters, expected one")
        for layer, of_halves in ranks.items():
            if len(of_halves) == 1:
                raise SchemaMismatchError(f"{layer} has lora_{next(iter(of_halves))} alone")
            if len(set(of_halves.values())) > 1:
                both = sorted(of_halves.values())
                raise SchemaMismatchError(f"{layer} has factors of ranks {both}")
        return found

    def lay(self, folder: Path, version: Mapping[str, torch.Tensor]) -> None:
        """Write a version into an empty folder.

        Raises:
            SchemaMismatchError: see `tensors`.
            MergeError: a dtype that safetensors does not have.
            SharedMemoryError: there is no room, or it cannot be written.
        """
        tensors = self.tensors(version)
        entries = [
            safetensors.TensorEntry(name, tensor.dtype, tuple(tensor.shape))
            for name, tensor in tensors.items()
        ]
        (file,) = safetensors.partition(entries, 1 + sum(entry.bytes for entry in entries))
        try:
            (folder / CONFIG).write_text(self.file())
            safetensors.write(
                folder / _WEIGHTS, file, (tensors[entry.name] for entry in file), lambda _: None
            )
        except OSError as error:
            raise SharedMemoryError(f"{folder} cannot be written: {error.strerror}") from error
