"""A model that takes its weights from a checkpoint: planned, read, and only then changed."""

import sys
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from trainsync.checkpoint.errors import StateMismatchError
from trainsync.checkpoint.load.reshard.read import Key, Reading
from trainsync.checkpoint.load.reshard.shard_files import layout_of

_SHOWN = 5


class ModelLoad:
    """One rank's model (FSDP2, or not sharded) and the shards that it is made from.

    Raises:
        StateMismatchError: names, shapes or dtypes differ, or the model is sharded by FSDP1.
    """

    def __init__(self, reading: Reading, model: torch.nn.Module, rank: int) -> None:
        self._reading = reading
        self._model = model
        self._live: dict[str, Any] = model_state(model)
        self._read: dict[Key, torch.Tensor] = {}
        self._check_names()
        parameters = {name for name, _ in model.named_parameters(remove_duplicate=False)}
        for name, value in self._live.items():
            if not isinstance(value, torch.Tensor):
                continue
            saved = reading.state[name]
            if not isinstance(saved, torch.Tensor):
                raise StateMismatchError(
                    f"{name} of the model is a tensor, in the checkpoint a {type(saved).__name__}"
                )
            if value.is_meta:
                raise StateMismatchError(
                    f"{name} of the model is on the meta device, which holds no values; expected "
                    "the model to have memory (to_empty) before it is loaded"
                )
            if (saved.shape, saved.dtype) != (value.shape, value.dtype):
                raise StateMismatchError(
                    f"{name} of the model is {value.dtype} of shape {tuple(value.shape)}, in the "
                    f"checkpoint {saved.dtype} of shape {tuple(saved.shape)}; expected the same"
                )
            # Buffers, such as running means, may differ: every rank has its own.
            replicated = name in parameters and not reading.keeps(value)
            reading.want((name,), name, held_by(name, value, rank), replicated=replicated)

    @property
    def paths(self) -> set[str]:
        """Files that are read."""
        return self._reading.paths

    def read(self) -> None:
        """Read everything; the model stays as it is."""
        self._read = self._reading.read()

    def apply(self) -> None:
        """Change the model."""
        state = {
            name: like(value, self._read[(name,)])
            if isinstance(value, torch.Tensor)
            else self._reading.state[name]
            for name, value in self._live.items()
        }
        self._model.load_state_dict(state)
        self._read = {}

    def _check_names(self) -> None:
        saved, live = set(self._reading.state), set(self._live)
        problems = [
            f"{what} {', '.join(sorted(names)[:_SHOWN])}"
            + (f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else "")
            for what, names in (
                ("the checkpoint lacks", live - saved),
                ("the model lacks", saved - live),
            )
            if names
        ]
        if problems:
            raise StateMismatchError(
                f"the model and the checkpoint have different names: {'; '.join(problems)}"
            )


def model_state(model: torch.nn.Module) -> dict[str, Any]:
    """The model's state, whose tensors alias the model's.

    Raises:
        StateMismatchError: FSDP1 shards it, whose state cannot be had without collectives.
    """
    # Not imported here: that takes seconds, and a model of that class has done it.
    fsdp = getattr(sys.modules.get("torch.distributed.fsdp"), "FullyShardedDataParallel", None)
    if fsdp is not None and any(isinstance(module, fsdp) for module in model.modules()):
        raise StateMismatchError(
            "the model is wrapped in FullyShardedDataParallel (FSDP1), whose shards are flat "
            "pieces without names; expected fully_shard (FSDP2), DistributedDataParallel or a "
            "plain module. With verl, load through its checkpoint manager"
        )
    return dict(model.state_dict())


def held_by(name: str, tensor: torch.Tensor, rank: int) -> tuple[tuple[tuple[int, int], ...], ...]:
    """What this rank holds of a live tensor, see `trainsync.checkpoint.load.reshard.plan`."""
    layout = layout_of(name, tensor, rank)
    coordinate = layout.coordinate(rank)
    assert coordinate is not None  # layout_of takes the rank's own mesh
    return layout.held(coordinate)


def like(live: torch.Tensor, local: torch.Tensor) -> torch.Tensor:
    """``local`` as this rank's part of a tensor that lies as ``live`` does, of its own dtype."""
    if not isinstance(live, DTensor):
        return local
    spec = live._spec
    meta = spec.tensor_meta
    assert meta is not None
    if meta.dtype != local.dtype:
        spec = spec.shallow_copy_with_tensor_meta(meta._replace(dtype=local.dtype))
    # from_local would move it to the mesh's device; a model that is offloaded is elsewhere.
    return DTensor(local, spec, requires_grad=False)
