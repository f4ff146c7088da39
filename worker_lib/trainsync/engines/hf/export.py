"""The whole model as a Hugging Face directory: gathered by all ranks, written by one thread."""

import copy
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from trainsync.checkpoint.errors import CheckpointError
from trainsync.engines.fsdp.state import full_on_rank_0, settle, unwrapped
from trainsync.engines.lora import adapters
from trainsync.engines.publish.sent_tensors import full_tensor
from trainsync.storage import atomic

ADAPTER_FOLDER = "lora_adapter"


def gather_full_state(module: torch.nn.Module, rank: int) -> dict[str, torch.Tensor]:
    """Every weight in full, on the CPU, in memory of its own; on rank 0 only, else empty.

    A collective: every rank calls it. One tensor at a time is gathered, so the other ranks hold
    at most one in full (FSDP1: one wrapped layer).

    Raises:
        MemoryError, RuntimeError: rank 0 has no room for them; it still gathers along to the end.
    """
    with full_on_rank_0(module):
        state = module.state_dict()
    settle(state)
    full: dict[str, torch.Tensor] = {}
    problem: Exception | None = None
    with torch.no_grad():
        for name, tensor in state.items():
            whole = full_tensor(tensor)
            if rank != 0 or problem is not None:
                continue
            try:
                # A mesh of one rank, and a buffer, give the live tensor itself.
                full[name] = whole.to("cpu", copy=True).contiguous()
            except Exception as error:  # noqa: BLE001 - raised below
                problem = error  # keep gathering: the other ranks wait for this one
                full.clear()
    if problem is not None:
        raise problem
    return full


def skeleton(module: torch.nn.Module) -> Any:
    """The module's model without memory for its weights; transformers saves through it.

    Made in the caller's thread: building a model changes torch's defaults for a moment.

    Raises:
        CheckpointError: it is not a model of transformers.
    """
    from torch.distributed.fsdp import FSDPModule
    from transformers import PreTrainedModel

    model = base_model(module)
    for kind in type(model).__mro__:
        # FSDP2 puts its own class before the model's.
        if issubclass(kind, PreTrainedModel) and not issubclass(kind, FSDPModule):
            with torch.device("meta"):
                made: Any = kind
                return made._from_config(copy.deepcopy(model.config))
    raise CheckpointError(
        f"hf_model is to be saved, but the model is a {type(model).__name__}; expected a "
        "PreTrainedModel of transformers"
    )


def base_model(module: torch.nn.Module) -> Any:
    """The model below FSDP1's and PEFT's wrappers."""
    model: Any = unwrapped(module)
    return model.get_base_model() if adapters.peft_config(model) is not None else model


def exporter(
    skeleton: Any,
    state: Mapping[str, torch.Tensor],
    adapter_config: Mapping[str, Any] | None,
    folder: str,
) -> Callable[[Path], None]:
    """A function that writes ``<folder>/model*.safetensors`` into the directory passed to it.

    Configurations are left to the save's attachments. With an adapter, the base model's weights
    go there and the adapter's into ``lora_adapter/``, as verl's merger lays them out.

    Args:
        skeleton: see `skeleton`; used by one export at a time.
        state: see `gather_full_state`; must not change before the export ends.
        adapter_config: of PEFT; None without an adapter.
        folder: relative to the directory.
    """

    def export(directory: Path) -> None:
        weights = dict(state)
        target = directory / folder
        atomic.make_directory(target)  # with a mode that lets the monitor remove it
        if adapter_config is not None:
            weights, adapter = adapters.split(weights)
            _write_adapter(target / ADAPTER_FOLDER, adapter, adapter_config)
        drop_tied(weights, skeleton)
        skeleton.save_pretrained(target, state_dict=weights)
        for path in target.iterdir():
            if path.is_file() and ".safetensors" not in path.name:
                path.unlink()

    return export


def adapter_config(module: torch.nn.Module) -> dict[str, Any] | None:
    """The PEFT adapter's configuration as plain JSON values; None without an adapter."""
    config = adapters.peft_config(unwrapped(module))
    return None if config is None else {**config.to_dict(), "inference_mode": True}


def drop_tied(weights: dict[str, torch.Tensor], skeleton: Any) -> None:
    """Keep one name of each tied weight: a gather copies the weight once for each name."""
    skeleton.tie_weights()
    kept: set[int] = set()
    for name, parameter in skeleton.named_parameters(remove_duplicate=False):
        if name not in weights:
            continue
        if id(parameter) in kept:
            del weights[name]
        kept.add(id(parameter))


def _write_adapter(
    directory: Path, adapter: Mapping[str, torch.Tensor], config: Mapping[str, Any]
) -> None:
    from safetensors.torch import save_file

    directory.mkdir()
    save_file(dict(adapter), directory / "adapter_model.safetensors", metadata={"format": "pt"})
    text = json.dumps(config, indent=4, default=_jsonable)
    (directory / "adapter_config.json").write_text(text, encoding="utf-8")


def _jsonable(value: Any) -> Any:
    if isinstance(value, set | frozenset):
        return sorted(value)
    return getattr(value, "value", None) or str(value)
