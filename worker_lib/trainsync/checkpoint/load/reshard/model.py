"""Loads a model's weights from a checkpoint: plans, reads, and only then changes the model."""

from collections.abc import Iterator, Mapping

import torch

from trainsync.checkpoint.errors import StateMismatchError
from trainsync.checkpoint.load.reshard.files import Pair
from trainsync.checkpoint.load.reshard.read import ComponentRead, Key
from trainsync.checkpoint.load.reshard.shard_files import layout_of, local_of
from trainsync.checkpoint.state_names import bare_names, model_state
from trainsync.dist.sharded import is_dtensor

_SHOWN = 5


class ModelLoad:
    """One rank's model (FSDP2, or not sharded) and the shards that it is made from.

    Raises:
        StateMismatchError: names, shapes or dtypes differ, or the model is sharded by FSDP1.
    """

    def __init__(self, reading: ComponentRead, model: torch.nn.Module, rank: int) -> None:
        self._reading = reading
        self._model = model
        self._live = model_state(model)
        self._beside: dict[str, object] = {}  # values that are no tensors, by their live name
        self._saved = self._matched()
        parameters = {name for name, _ in model.named_parameters(remove_duplicate=False)}
        for name, value in self._live.items():
            if not isinstance(value, torch.Tensor):
                continue
            saved = reading.state[self._saved[name]]
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
            key = (self._saved[name],)
            reading.want(key, name, held_by(name, value, rank), replicated=replicated)

    @property
    def paths(self) -> set[str]:
        """The files that are read."""
        return self._reading.paths

    def bring(self) -> Iterator[Pair]:
        """See `ComponentRead.bring`."""
        return self._reading.bring()

    def read(self) -> None:
        """Check that all tensors are there and fit; the model stays as it is.

        No second copy of the model is made, but of what is read from a store.
        """
        self._reading.check()
        for name, value in self._live.items():
            if not isinstance(value, torch.Tensor):
                self._beside[name] = self._reading.real(self._reading.state[self._saved[name]])

    def apply(self) -> None:
        """Change the model: its tensors are filled from the files."""
        targets: dict[Key, torch.Tensor] = {
            (self._saved[name],): local_of(value)
            for name, value in self._live.items()
            if isinstance(value, torch.Tensor)
        }
        with torch.no_grad():
            self._reading.fill(targets)
        # For the hooks of modules that load a state; the tensors are in place, and torch copies
        # none onto itself.
        self._model.load_state_dict(
            {
                name: value if isinstance(value, torch.Tensor) else self._beside[name]
                for name, value in self._live.items()
            }
        )

    def _matched(self) -> dict[str, str]:
        """Name in the checkpoint of each name of the model, with any wrapper around either."""
        live, saved = bare_names(self._live), bare_names(self._reading.state)
        problems = [
            f"{what} {', '.join(names[:_SHOWN])}"
            + (f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else "")
            for what, names in (
                ("the checkpoint lacks", _beyond(live, saved)),
                ("the model lacks", _beyond(saved, live)),
            )
            if names
        ]
        if problems:
            raise StateMismatchError(
                f"the model and the checkpoint have different names: {'; '.join(problems)}"
            )
        by_bare = {bare: name for name, bare in saved.items()}
        return {name: by_bare[bare] for name, bare in live.items()}


def _beyond(one: Mapping[str, str], other: Mapping[str, str]) -> list[str]:
    """Names of the one state that the other does not have."""
    there = set(other.values())
    return sorted(name for name, bare in one.items() if bare not in there)


def held_by(name: str, tensor: torch.Tensor, rank: int) -> tuple[tuple[tuple[int, int], ...], ...]:
    """The part of a live tensor on this rank, see `trainsync.checkpoint.load.reshard.plan`."""
    layout = layout_of(name, tensor, rank)
    coordinate = layout.coordinate(rank)
    assert coordinate is not None  # layout_of takes the rank's own mesh
    return layout.held(coordinate)


def like(live: torch.Tensor, local: torch.Tensor) -> torch.Tensor:
    """``local`` as this rank's part of a tensor that lies as ``live`` does, of its own dtype."""
    if not is_dtensor(live):
        return local
    spec = live._spec
    meta = spec.tensor_meta
    assert meta is not None
    if meta.dtype != local.dtype:
        spec = spec.shallow_copy_with_tensor_meta(meta._replace(dtype=local.dtype))
    # from_local would move it to the mesh's device; a model that is offloaded is elsewhere.
    return type(live)(local, spec, requires_grad=False)
