"""The pickle of a state, most of which is the same at every save of a component.

``torch.save`` asks a Python function about every object that it pickles, and spends several Python
calls on each tensor: for a small model that takes longer than to write the file. But names, shapes
and placements of tensors seldom change from one save to the next. So they are pickled once, with
*holes* where parts without tensors were (counters, learning rates, random numbers), and the holes
are filled anew each time.
"""

import io
import pickle
import secrets
import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch

from trainsync.checkpoint.save.staging.skeleton import StateSkeleton
from trainsync.checkpoint.save.staging.staging import Staged

_TOKEN: Final = f"trainsync-hole-{secrets.token_hex(16)}-"
_PROTOCOL: Final = 2  # torch's own
_PUT, _LONG_PUT = b"q"[0], b"r"[0]


class StatePickles:
    """Pickles what is staged of one component, again and again; for ``torch.save(pickle_module=)``.

    Of a `Staged` it pickles the state, and anything else as torch does. What ``torch.load`` reads
    is the same as without, tied tensors included.

    Attributes:
        template: what the last state's pickle was made of.
    """

    def __init__(self) -> None:
        self.template: PickleTemplate | None = None
        pickles = self

        class Pickler(pickle.Pickler):
            """torch derives its own from this, which names storages (`persistent_id`)."""

            def __init__(self, file: io.BytesIO, protocol: int) -> None:
                super().__init__(file, protocol=protocol)
                self._file = file

            def dump(self, state: Any) -> None:
                if not (isinstance(state, Staged) and state.skeleton.is_builtin):
                    super().dump(state.state if isinstance(state, Staged) else state)
                    return
                skeleton, known = state.skeleton, pickles.known(state)
                if known is not None:
                    # Their names alone count here, so nothing is made that also knows the dtype.
                    for storage in known.in_order(state.storages):
                        self.persistent_id(storage)
                else:
                    naming = _NamingPickler(self.persistent_id)
                    naming.dump(skeleton.build(state.tensor, _token))
                    known = pickles.template = PickleTemplate(
                        skeleton.signature,
                        state.looks,
                        _cut(naming.pickled, len(skeleton.holes)),
                        _order(naming.named, state.storages),
                    )
                self._file.write(known.filled(skeleton.holes))

        self.Pickler: Final = Pickler

    def known(self, state: Staged) -> "PickleTemplate | None":
        """The template, if the pickle of ``state`` differs from the last in holes alone."""
        known = self.template
        fits = (
            known is not None
            and state.skeleton.is_builtin
            and known.fits(state.skeleton, state.looks)
        )
        return known if fits else None

    __name__ = __name__  # torch asks its pickle module for it


_Storage = torch.UntypedStorage | torch.TypedStorage


class _NamingPickler(pickle.Pickler):
    """Remembers what got a name from ``name``, torch's function.

    Attributes:
        named: in the order of their names, which are numbers.
        pickled: what was dumped.
    """

    def __init__(self, name: Callable[[object], Any]) -> None:
        self._file = io.BytesIO()
        super().__init__(self._file, protocol=_PROTOCOL)
        self._name = name
        self._seen: dict[str, _Storage] = {}

    def persistent_id(self, obj: object) -> Any:
        """See `pickle.Pickler`."""
        name = self._name(obj)
        if name is not None:
            assert isinstance(obj, _Storage), "only storages get names"
            self._seen.setdefault(name[2], obj)
        return name

    @property
    def named(self) -> list[_Storage]:
        return list(self._seen.values())

    @property
    def pickled(self) -> bytes:
        return self._file.getvalue()


@dataclass(frozen=True)
class PickleTemplate:
    """A pickle without its holes.

    ``order``: of the storages by their names in it: numbers of those of distinct tensors, and
    others themselves. A mesh has one, the ranks in it.
    """

    signature: list[object]
    looks: list[tuple[torch.dtype, torch.Size]]
    segments: list[bytes]
    order: list[int | _Storage]

    def in_order(self, storages: Sequence[_Storage]) -> Iterator[_Storage]:
        """Everything that has a name."""
        for place in self.order:
            yield storages[place] if isinstance(place, int) else place

    def filled(self, holes: Sequence[Any]) -> bytes:
        """The pickle of a state with these holes."""
        parts: list[bytes] = []
        for segment, hole in zip(self.segments, holes, strict=False):
            parts += (segment, _fragment(hole))
        return b"".join(parts) + self.segments[-1]

    def fits(self, skeleton: StateSkeleton, looks: list[tuple[torch.dtype, torch.Size]]) -> bool:
        """Whether the pickle of such a state differs in its holes alone."""
        return self.looks == looks and self.signature == skeleton.signature


def _order(named: Sequence[_Storage], own: Sequence[torch.UntypedStorage]) -> list[int | _Storage]:
    numbers = {storage._cdata: number for number, storage in enumerate(own)}
    return [numbers.get(_untyped(storage)._cdata, storage) for storage in named]


def _untyped(storage: _Storage) -> torch.UntypedStorage:
    return storage._untyped_storage if isinstance(storage, torch.TypedStorage) else storage


def _token(hole: int) -> str:
    return f"{_TOKEN}{hole:08}"


def _cut(pickled: bytes, holes: int) -> list[bytes]:
    """What lies between the tokens of so many holes."""
    segments, start = [], 0
    for i in range(holes):
        text = _token(i).encode()
        op = b"X" + struct.pack("<I", len(text)) + text  # BINUNICODE
        at = pickled.index(op, start)
        segments.append(pickled[start:at])
        start = at + len(op)
        # The pickler remembers every text, though nothing refers to this one.
        assert pickled[start] in (_PUT, _LONG_PUT), "a text is followed by its number"
        start += 2 if pickled[start] == _PUT else 5
    segments.append(pickled[start:])
    return segments


def _fragment(value: Any) -> bytes:
    """``value``'s opcodes. They number no objects, so they can stand in another pickle."""
    file = io.BytesIO()
    pickler = pickle.Pickler(file, protocol=_PROTOCOL)
    pickler.fast = True
    pickler.dump(value)
    return file.getvalue()[2:-1]  # without PROTO and STOP
