"""A state taken apart: how its tensors are arranged, and the parts without tensors between them."""

from collections import Counter, OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch.distributed.tensor._dtensor_spec import DTensorSpec

# Parts without tensors are made of these alone, or the skeleton is not `StateSkeleton.is_builtin`.
_LEAVES: Final = frozenset(
    {
        type(None),
        bool,
        int,
        float,
        complex,
        str,
        bytes,
        bytearray,
        torch.dtype,
        torch.device,
        torch.layout,
        torch.Size,
    }
)
_CONTAINERS: Final = frozenset({dict, OrderedDict, list, tuple})


@dataclass(frozen=True, slots=True)
class Slot:
    """Stands for a tensor, the ``number``-th of the distinct ones; ``spec``: of a shard."""

    number: int
    spec: DTensorSpec | None


@dataclass(frozen=True, slots=True)
class Hole:
    """Stands for a part without tensors."""

    number: int


_HOLE: Final = Hole(-1)


class StateSkeleton:
    """What is left of ``state`` when tensors and what has none are taken out.

    Attributes:
        signature: equal for states that differ in the contents of holes and tensors alone.
        holes: the largest parts without tensors, in their order.
        is_builtin: whether all parts are of builtin types, which are pickled one by one, and the
            signature tells all else.

    Args:
        state: of dicts, OrderedDicts with attributes, lists and tuples, nested at will.
        slot: called for every occurrence of a tensor.
    """

    def __init__(self, state: Any, slot: Callable[[torch.Tensor], Slot]) -> None:
        self.signature: list[object] = []
        self.holes: list[Any] = []
        self.is_builtin = True
        self._slot = slot
        self._slots = 0
        self._tree = self._part(state)

    def build(self, tensor: Callable[[Slot], torch.Tensor], hole: Callable[[int], Any]) -> Any:
        """The state again, with these in the places of slots and holes."""

        def build(value: Any) -> Any:
            kind = type(value)
            if kind is Slot:
                return tensor(value)
            if kind is Hole:
                return hole(value.number)
            if kind is list or kind is tuple:
                return kind([build(item) for item in value])
            built = kind((key, build(item)) for key, item in value.items())
            if kind is OrderedDict:
                for name, item in vars(value).items():
                    setattr(built, name, build(item))
            return built

        return build(self._tree)

    def _part(self, value: Any) -> Any:
        kind = type(value)
        if isinstance(value, torch.Tensor):
            self._slots += 1
            slot = self._slot(value)
            self.signature.append(slot.number)
            if slot.spec is not None:
                fields = vars(slot.spec)
                self.signature += [fields[name] for name in fields if name != "_hash"]
                self.signature += map(type, slot.spec.placements)
            return slot
        if kind not in _CONTAINERS or _is_builtin(value):
            return self._hole(value)
        signed, holes, slots = len(self.signature), len(self.holes), self._slots
        self.signature += (kind, len(value))
        tree: Any
        if kind is dict or kind is OrderedDict:
            tree = kind((self._key(key), self._part(item)) for key, item in value.items())
            if kind is OrderedDict:
                self.signature.append(len(vars(value)))
                for name, item in vars(value).items():
                    setattr(tree, self._key(name), self._part(item))
        else:
            tree = kind([self._part(item) for item in value])
        if self._slots > slots:
            return tree
        del self.signature[signed:], self.holes[holes:]
        return self._hole(value)

    def _key(self, key: Any) -> Any:
        # Others may be equal and yet differ.
        self.is_builtin = self.is_builtin and (type(key) is str or type(key) is int)
        self.signature.append(key)
        return key

    def _hole(self, value: Any) -> Hole:
        self.is_builtin = self.is_builtin and (
            _is_builtin(value) or type(value) in (dict, OrderedDict, list, tuple)
        )
        self.signature.append(_HOLE)
        self.holes.append(value)
        return Hole(len(self.holes) - 1)


def _is_builtin(value: Any) -> bool:
    """Whether it is a leaf, or made of leaves alone."""
    kind = type(value)
    if kind in (list, tuple, set):
        return _LEAVES.issuperset(map(type, value))
    if kind is Counter:
        return _LEAVES.issuperset(map(type, value)) and _LEAVES.issuperset(
            map(type, value.values())
        )
    return kind in _LEAVES
