"""The archive of a state, most of which is the same at every save of a component.

``torch.save`` makes a zip file with a record for the pickle and one for each storage, and spends
several Python calls on each: for a small model that takes longer than to write the bytes. But as
long as no record changes its size, and without check sums, an archive differs from the one before
in the pickle and the tensors' bytes alone. So what lies between these is kept, and written around
the new ones: bit for bit what ``torch.save`` would write.
"""

import logging
import pickle
import struct
import zipfile
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Final

import torch
from torch.utils import _config_module
from torch.utils.serialization import config as torch_config

from trainsync.checkpoint.save.files.state_pickle import PickleTemplate, StatePickles
from trainsync.checkpoint.save.staging.staging import Staged

logger = logging.getLogger(__name__)

_PICKLE: Final = "data.pkl"
_STORAGES: Final = "data/"  # and the number that the pickle gives to the storage
_LOCAL_HEADER: Final = struct.Struct("<26xHH")  # sizes of the name and of what else precedes a file

_Record = tuple[int | None, int | None]
"""The number of the distinct tensor in it (None: the pickle), and its size."""


def write(state: Any, file: BinaryIO, pickles: StatePickles | None = None) -> None:
    """Write ``state`` so that ``torch.load(weights_only=True)`` reads it.

    Args:
        state: with ``pickles`` a `Staged`, too.
    """
    with _without_crc():
        torch.save(state, file, pickle_module=pickles or pickle)


class StateArchives:
    """Writes what is staged of one component, again and again; one save after the other."""

    def __init__(self) -> None:
        self._pickles = StatePickles()
        self._pickle_bytes: int | None = None  # of the last pickle; None: of another template
        self._layout: _Layout | None = None  # of archives with a pickle of that size
        self._may_learn = True

    def write(self, state: Any, file: BinaryIO) -> bool:
        """Write ``state``, a `Staged` or what ``torch.save`` takes.

        Returns:
            whether `learn` may read the file, so that the next one is written faster.
        """
        known = self._known(state)
        if known is None:
            self._pickle_bytes, self._layout, self._may_learn = None, None, True
            write(state, file, self._pickles)
            if (known := self._known(state)) is not None:
                self._pickle_bytes = len(known.filled(state.skeleton.holes))
            return False
        pickled = known.filled(state.skeleton.holes)
        is_as_long = len(pickled) == self._pickle_bytes
        if is_as_long and self._layout is not None:
            self._layout.write(state, pickled, file)
            return False
        self._pickle_bytes, self._layout = len(pickled), None
        write(state, file, self._pickles)
        # Of pickles that are never as long as the one before no file is read.
        return is_as_long and self._may_learn

    def learn(self, path: Path, state: Staged) -> None:
        """Keep from the file of ``state``, the last that `write` took, what the next will share.

        Whatever stands against that costs their speed, and nothing else.
        """
        template = self._pickles.template
        assert template is not None, "only after `write` said so"
        records: dict[str, _Record] = {_PICKLE: (None, self._pickle_bytes)}
        for name, place in enumerate(template.order):
            if isinstance(place, int):  # else the ranks of a mesh, which stay with the template
                records[f"{_STORAGES}{name}"] = place, state.places[place][1]
        try:
            self._layout = _read_layout(path, records)
        except (OSError, zipfile.BadZipFile, ValueError, struct.error) as error:
            logger.warning("%s cannot be read, further saves are slower: %s", path, error)
        self._may_learn = self._layout is not None

    def _known(self, state: Any) -> PickleTemplate | None:
        return self._pickles.known(state) if isinstance(state, Staged) else None


@dataclass(frozen=True)
class _Layout:
    """An archive without its pickle and its tensors.

    Attributes:
        pieces: in the order of the file: bytes that stay, or the number of a distinct tensor.
            None stands for the pickle.
    """

    pieces: list[bytes | int | None]

    def write(self, state: Staged, pickled: bytes, file: BinaryIO) -> None:
        memory = state.memory.numpy().data
        for piece in self.pieces:
            if piece is None:
                file.write(pickled)
            elif isinstance(piece, int):
                start, size = state.places[piece]
                file.write(memory[start : start + size])
            else:
                file.write(piece)


def _read_layout(path: Path, wanted: Mapping[str, _Record]) -> _Layout | None:
    """Of the archive at ``path``; None where it has check sums.

    Args:
        wanted: the records that change.

    Raises:
        ValueError: it is of another state.
    """
    pieces: list[bytes | int | None] = []
    with path.open("rb") as file, zipfile.ZipFile(file) as archive:
        records = sorted(archive.infolist(), key=lambda record: record.header_offset)
        if any(record.CRC or record.compress_type != zipfile.ZIP_STORED for record in records):
            return None
        at = 0
        for record in records:
            name = record.filename.partition("/")[2]
            if name not in wanted:
                continue
            piece, size = wanted[name]
            if record.file_size != size:
                raise ValueError(f"{name} has {record.file_size} bytes, expected {size}")
            file.seek(record.header_offset)
            start = record.header_offset + _LOCAL_HEADER.size
            start += sum(_LOCAL_HEADER.unpack(file.read(_LOCAL_HEADER.size)))
            file.seek(at)
            pieces += (file.read(start - at), piece)
            at = start + record.file_size
        file.seek(at)
        pieces.append(file.read())
    if len(pieces) != 2 * len(wanted) + 1:
        raise ValueError(f"it has {len(pieces) // 2} of {len(wanted)} records")
    return _Layout(pieces)


def _without_crc() -> AbstractContextManager[None]:
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
