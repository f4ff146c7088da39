"""Loads an optimizer's state from a checkpoint: plans, reads, and only then changes it."""

import copy
from collections.abc import Iterator, Mapping
from typing import Any, Final

import torch

from trainsync.checkpoint.errors import CorruptCheckpointError, StateMismatchError
from trainsync.checkpoint.load.reshard.files import Pair
from trainsync.checkpoint.load.reshard.model import held_by, like
from trainsync.checkpoint.load.reshard.read import ComponentRead, Key
from trainsync.checkpoint.load.reshard.shard_files import layout_of, local_of
from trainsync.checkpoint.state_names import OPTIMIZER_CLASS, bare_names
from trainsync.dist.sharded import is_dtensor

_Groups = list[dict[str, Any]]
_DECOUPLED: Final = "decoupled_weight_decay"  # tells AdamW from Adam, which are alike otherwise
_NO_KIND: Final = frozenset({"params", "param_names", "initial_lr"})


class OptimizerLoad:
    """One rank's optimizer, and the shards of ``optimizer.state_dict()`` that it goes on from.

    Moments that have their parameter's shape lie as the parameter does; scalars are the same on
    all ranks. Parameters are matched by name where both sides have names (an optimizer made from
    ``named_parameters()``), else by their order in the groups.

    Raises:
        StateMismatchError: groups, parameters or shapes differ, or it is the state of FSDP1.
    """

    def __init__(self, reading: ComponentRead, optimizer: torch.optim.Optimizer, rank: int) -> None:
        self._reading = reading
        self._optimizer = optimizer
        self._read: dict[Key, torch.Tensor] = {}
        states, groups = _parts(reading)
        self._groups: _Groups = reading.real(groups)
        live = optimizer.state_dict()["param_groups"]
        check_same_kind(reading.state.get(OPTIMIZER_CLASS), self._groups, optimizer)
        self._ids = match_groups(self._groups, live)
        self._parameters = dict(
            zip(
                [number for group in live for number in group["params"]],
                [p for group in optimizer.param_groups for p in group["params"]],
                strict=True,
            )
        )
        self._states = {
            saved: {
                key: value if isinstance(value, torch.Tensor) else reading.real(value)
                for key, value in state.items()
            }
            for saved, state in states.items()
        }
        for saved, state in self._states.items():
            if saved not in self._ids:
                raise StateMismatchError(
                    f"the checkpoint has optimizer state of parameter {saved!r}, which is in none "
                    "of its groups"
                )
            for key, value in state.items():
                if isinstance(value, torch.Tensor):
                    self._want(saved, key, value, rank)

    @property
    def paths(self) -> set[str]:
        """The files that are read."""
        return self._reading.paths

    def bring(self) -> Iterator[Pair]:
        """See `ComponentRead.bring`."""
        return self._reading.bring()

    def read(self) -> None:
        """Read the whole state; the optimizer stays as it is."""
        self._read = self._reading.read()

    def apply(self) -> None:
        """Give the optimizer the state that was read."""
        states = {
            self._ids[saved]: {key: self._value(saved, key, value) for key, value in state.items()}
            for saved, state in self._states.items()
        }
        self._optimizer.load_state_dict({"state": states, "param_groups": self._live_groups()})
        self._keep_dtypes(states)
        self._read = {}

    # -- inside -----------------------------------------------------------------------------

    def _want(self, saved: Any, key: str, value: torch.Tensor, rank: int) -> None:
        parameter = self._parameters[self._ids[saved]]
        name = f"{key} of parameter {saved}"
        path = ("state", saved, key)
        if _is_scalar(key, value):
            whole = tuple(((0, length),) for length in value.shape)
            replicated = not self._reading.same_ranks
            self._reading.want(path, name, whole, replicated=replicated)
        elif value.shape == parameter.shape:
            replicated = not self._reading.keeps(parameter)
            held = held_by(name, parameter, rank)
            self._reading.want(path, name, held, replicated=replicated)
        elif self._lies_as(name, value, parameter, rank):
            layout = self._reading.layout(path, name)
            coordinate = layout.coordinate(rank)
            assert coordinate is not None  # as many ranks, and a mesh of the same ranks
            self._reading.want(path, name, layout.held(coordinate))
        else:
            raise StateMismatchError(self._misfit(name, value, parameter))

    def _lies_as(self, name: str, value: torch.Tensor, parameter: torch.Tensor, rank: int) -> bool:
        """Whether a state of another shape than its parameter can be taken as it is."""
        if not (self._reading.same_ranks and is_dtensor(value)):
            return False
        saved, live = layout_of(name, value, rank), layout_of(name, parameter, rank)
        return (saved.mesh, saved.ranks) == (live.mesh, live.ranks)

    def _misfit(self, name: str, value: torch.Tensor, parameter: torch.Tensor) -> str:
        what = f"{name} has shape {tuple(value.shape)} in the checkpoint"
        if is_dtensor(parameter) and not is_dtensor(value):
            return (
                f"{what} and is a plain tensor, such as the flat shards of FSDP1; expected a "
                f"DTensor of shape {tuple(parameter.shape)} (FSDP2's fully_shard)"
            )
        return (
            f"{what}, its parameter in the optimizer {tuple(parameter.shape)}; expected the same "
            "shape (others can only be loaded by as many ranks as saved)"
        )

    def _value(self, saved: Any, key: str, value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return copy.deepcopy(value)
        local = self._read["state", saved, key]
        parameter = self._parameters[self._ids[saved]]
        if not _is_scalar(key, value) and value.shape == parameter.shape:
            return like(parameter, local)
        if is_dtensor(value) and is_dtensor(parameter):
            spec = copy.copy(value._spec)
            spec.mesh = parameter.device_mesh
            return type(parameter)(local, spec, requires_grad=False)
        return local

    def _keep_dtypes(self, states: Mapping[int, Mapping[str, Any]]) -> None:
        """Undo that torch casts state to its parameter's dtype, such as fp32 sums to bf16."""
        if type(self._optimizer).load_state_dict is not torch.optim.Optimizer.load_state_dict:
            return  # it casts by itself
        for number, state in states.items():
            live = self._optimizer.state[self._parameters[number]]
            for key, value in state.items():
                if isinstance(value, torch.Tensor) and live[key].dtype != value.dtype:
                    live[key] = value.to(live[key].device)

    def _live_groups(self) -> _Groups:
        """The saved groups' settings, with the numbers and names of the live parameters."""
        groups = []
        for saved, live in zip(
            self._groups, self._optimizer.state_dict()["param_groups"], strict=True
        ):
            settings = {
                key: local_of(value).clone()
                if isinstance(value, torch.Tensor)
                else copy.deepcopy(value)
                for key, value in saved.items()
                if key not in ("params", "param_names")
            }
            names = {"param_names": live["param_names"]} if "param_names" in live else {}
            groups.append(settings | names | {"params": live["params"]})
        return groups


def _is_scalar(key: str, value: torch.Tensor) -> bool:
    """Whether a state is of the parameter as a whole; torch, too, knows ``step`` by its name."""
    return not is_dtensor(value) and (value.dim() == 0 or key == "step")


def check_same_kind(saved_class: object, saved: _Groups, optimizer: torch.optim.Optimizer) -> None:
    """Refuse the state of an optimizer of another kind, which torch would take without an error.

    Args:
        saved_class: name of its class; None where it was not saved. Then the settings of groups
            tell: each kind has its own, but those that a newer torch added are no difference.

    Raises:
        StateMismatchError: it is of another.
    """
    kind = type(optimizer).__name__
    if saved_class is not None and saved_class != kind:
        raise StateMismatchError(
            f"the checkpoint has the state of {saved_class}, this optimizer is {kind}; expected "
            "the same, or to load without optimizer="
        )
    for number, (was, now) in enumerate(zip(saved, optimizer.param_groups, strict=False)):
        # A setting that a schedule or a user adds may be on one side alone.
        lacking, beyond = set(was) - set(now) - _NO_KIND, set(now) - set(was) - _NO_KIND
        decoupled = [group.get(_DECOUPLED) for group in (was, now)]
        if (lacking and beyond) or (None not in decoupled and decoupled[0] != decoupled[1]):
            differ = sorted(lacking) or [_DECOUPLED]
            raise StateMismatchError(
                f"the checkpoint's optimizer is of another kind than this {kind}: its parameter "
                f"group {number} has {', '.join(differ)}"
                + (f", this one {', '.join(sorted(beyond))}" if beyond else " otherwise")
                + "; expected the same, or to load without optimizer="
            )


def match_groups(saved: _Groups, live: _Groups) -> dict[Any, int]:
    """Number in the live optimizer of each parameter of the saved groups.

    Raises:
        StateMismatchError: the groups differ in number, length or names.
    """
    if len(saved) != len(live):
        raise StateMismatchError(
            f"the checkpoint's optimizer has {len(saved)} parameter groups, this one {len(live)}"
        )
    ids: dict[Any, int] = {}
    for number, (was, now) in enumerate(zip(saved, live, strict=True)):
        if len(was["params"]) != len(now["params"]):
            raise StateMismatchError(
                f"parameter group {number} has {len(was['params'])} parameters in the "
                f"checkpoint, {len(now['params'])} in this optimizer"
            )
        if "param_names" in was and "param_names" in now:
            bare_was, bare_now = bare_names(was["param_names"]), bare_names(now["param_names"])
            by_name = dict(zip(bare_now.values(), now["params"], strict=True))
            unknown = [name for name, bare in bare_was.items() if bare not in by_name]
            if unknown:
                raise StateMismatchError(
                    f"parameter group {number} of this optimizer lacks {', '.join(unknown[:5])}, "
                    "which the checkpoint has"
                )
            named = zip(was["params"], bare_was.values(), strict=True)
            ids.update({key: by_name[name] for key, name in named})
        else:
            ids.update(zip(was["params"], now["params"], strict=True))
    return ids


def _parts(reading: ComponentRead) -> tuple[Mapping[Any, Mapping[str, Any]], _Groups]:
    state = reading.state
    try:
        states, groups = state["state"], state["param_groups"]
        keys = [key for group in groups for key in group["params"]]
    except (KeyError, TypeError) as error:
        raise CorruptCheckpointError(
            f"component {reading.component.name} is not what optimizer.state_dict() returns: it "
            f"has {', '.join(map(str, list(state)[:5]))}; expected state and param_groups"
        ) from error
    if any(not isinstance(key, int) for key in keys):
        raise StateMismatchError(
            "the optimizer's state is keyed by parameter names; expected what "
            "optimizer.state_dict() returns, keyed by numbers"
        )
    return states, groups
