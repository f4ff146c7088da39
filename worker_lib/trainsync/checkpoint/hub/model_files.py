"""Whether a directory holds a whole Hugging Face model, by its files' own words."""

import json
import os
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from trainsync.checkpoint.hub.errors import ModelFilesError

INDEX: Final = "model.safetensors.index.json"
ONE_FILE: Final = "model.safetensors"
_WEIGHTS: Final = ".safetensors"
_CONFIG: Final = "config.json"
_LONGEST_HEADER: Final = 100 << 20  # as safetensors has it
_LENGTH: Final = 8  # bytes of the header's length
_VISIBLE: Final = frozenset({".gitattributes"})


@dataclass(frozen=True)
class ModelFile:
    """A file of the model, by its path below the directory."""

    path: str
    bytes: int


def model_files(folder: Path) -> list[ModelFile]:
    """All files of a model, by path, when it is whole.

    Every safetensors file must have the bytes that its header speaks of, an index must agree with
    the files, and every JSON file must be one. Tensors are not read.

    Raises:
        ModelFilesError: says which file is wrong, and how.
        OSError: it cannot be read.
    """
    if not folder.is_dir():
        raise ModelFilesError(f"{folder} is not a directory")
    found = sorted(_walk(folder), key=lambda file: file.path)
    names = {file.path for file in found}
    if _CONFIG not in names:
        raise ModelFilesError(
            f"{folder} has no {_CONFIG}; expected what `trainsync checkpoints merge` makes"
        )
    for file in found:
        if file.path.endswith(".json"):
            _read_json(folder / file.path)
    _check_weights(folder, {name for name in names if name.endswith(_WEIGHTS)}, names)
    return found


def _walk(folder: Path) -> list[ModelFile]:
    found = []
    for place, folders, names in os.walk(folder):
        for name in (*folders, *names):
            path = Path(place, name)
            mode = path.lstat().st_mode
            if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
                raise ModelFilesError(f"{path} is neither a file nor a directory; remove it")
            if name.startswith(".") and name not in _VISIBLE:
                raise ModelFilesError(f"{path} is hidden, and of no model; remove it")
        for name in names:
            path = Path(place, name)
            found.append(ModelFile(path.relative_to(folder).as_posix(), path.stat().st_size))
    return found


def _check_weights(folder: Path, files: set[str], names: set[str]) -> None:
    if not files:
        raise ModelFilesError(f"{folder} has no weights; expected {ONE_FILE}, or {INDEX} and files")
    if INDEX not in names:
        if files != {ONE_FILE}:
            raise ModelFilesError(
                f"{folder} has {', '.join(sorted(files)[:3])} and no {INDEX}; a file is missing, "
                f"or one other than {ONE_FILE} is there"
            )
        _tensors(folder / ONE_FILE)
        return
    listed = _weight_map(folder)
    wanted: dict[str, set[str]] = {}
    for tensor, file in listed.items():
        wanted.setdefault(file, set()).add(tensor)
    for missing in sorted(wanted.keys() - files):
        raise ModelFilesError(f"{folder / missing} is missing, and {INDEX} names it")
    for other in sorted(files - wanted.keys()):
        raise ModelFilesError(f"{folder / other} is there, and {INDEX} does not name it")
    for file, tensors in wanted.items():
        if _tensors(folder / file) != tensors:
            raise ModelFilesError(f"{folder / file} has other tensors than {INDEX} says")


def _weight_map(folder: Path) -> Mapping[str, str]:
    listed = _read_json(folder / INDEX).get("weight_map")
    if not (
        isinstance(listed, dict) and listed and all(isinstance(v, str) for v in listed.values())
    ):
        raise ModelFilesError(f"{folder / INDEX} has no weight_map of names and files")
    return listed


def _tensors(path: Path) -> set[str]:
    """Names of the tensors in a safetensors file that has all of their bytes."""
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(_LENGTH), "little")
        if size < _LENGTH or length > min(size - _LENGTH, _LONGEST_HEADER):
            raise ModelFilesError(f"{path} is cut short, or no safetensors file")
        header = _parse(file.read(length), path)
    header.pop("__metadata__", None)
    if not header:
        raise ModelFilesError(f"{path} has no tensors")
    end = 0
    try:
        spans = sorted((*map(int, entry["data_offsets"]),) for entry in header.values())
        for start, stop in spans:
            if start != end or stop < start:
                raise ModelFilesError(f"{path} has a header with a gap between tensors")
            end = stop
    except (KeyError, TypeError, ValueError) as error:
        raise ModelFilesError(f"{path} has a header that is not safetensors'") from error
    if size != _LENGTH + length + end:
        raise ModelFilesError(
            f"{path} has {size} bytes, and its header speaks of {_LENGTH + length + end}"
        )
    return set(header)


def _read_json(path: Path) -> dict[str, Any]:
    return _parse(path.read_bytes(), path)


def _parse(data: bytes, path: Path) -> dict[str, Any]:
    try:
        content = json.loads(data)
    except ValueError as error:
        raise ModelFilesError(f"{path} is not JSON: {error}") from error
    if not isinstance(content, dict):
        raise ModelFilesError(f"{path} is not a JSON object")
    return content
