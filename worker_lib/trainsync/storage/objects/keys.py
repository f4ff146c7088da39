"""Where everything is below a store's prefix; docs/dev/contracts.md has the picture."""

import re
from collections.abc import Iterable
from typing import Final

from trainsync.api.protocol import SaveKind
from trainsync.storage.errors import UnsafePathError
from trainsync.storage.layout import (
    POINTERS,
    parse_step,
    relative_parts,
    set_aside_name,
    step_name,
)

MANIFESTS: Final = "manifests"
OBJECTS: Final = "objects"
PROBES: Final = "probe"
RUN: Final = "run"
ROLLED_BACK: Final = "rolled_back"
_PLAIN: Final = re.compile(r"^[A-Za-z0-9._/+=@,-]{1,400}$")
_SUFFIX: Final = ".json"
_ASIDE: Final = "aside"


def pointer(kind: SaveKind) -> str:
    """Key of the object that holds the newest committed step of ``kind``."""
    return POINTERS[kind]


def manifests(kind: SaveKind) -> str:
    """The folder whose objects are the committed saves of ``kind``, and nothing else."""
    return f"{MANIFESTS}/{kind.value}"


def manifest(kind: SaveKind, step: int) -> str:
    """Key of the object that makes a save committed."""
    return f"{manifests(kind)}/{step_name(step)}{_SUFFIX}"


def parse_manifest(kind: SaveKind, key: str) -> int | None:
    """The step of a key in `manifests`; None: it is not ours."""
    name = key.removeprefix(f"{manifests(kind)}/")
    return parse_step(name.removesuffix(_SUFFIX)) if name.endswith(_SUFFIX) else None


def rolled_back(folder: str, kind: SaveKind, step: int) -> str:
    """Key of a manifest that a roll-back has set aside in ``folder``; its objects stay."""
    return f"{ROLLED_BACK}/{folder}/{kind.value}/{step_name(step)}{_SUFFIX}"


def parse_rolled_back(key: str) -> tuple[SaveKind, int] | None:
    """Kind and step of a manifest below `ROLLED_BACK`; None: it is none."""
    parts = key.split("/")
    step = parse_step(parts[-1].removesuffix(_SUFFIX)) if key.endswith(_SUFFIX) else None
    if len(parts) != 4 or parts[0] != ROLLED_BACK or parts[2] not in set(SaveKind) or step is None:
        return None
    return SaveKind(parts[2]), step


def step_objects(step: int) -> str:
    """The folder of all shards of a step, with a folder for each writer."""
    return f"{OBJECTS}/{step_name(step)}"


def writer_objects(step: int, attempt: int, incarnation: str, writer: str) -> str:
    """The folder that one writer alone puts shards of one step into."""
    return f"{step_objects(step)}/{attempt}-{incarnation}-{writer}"


def shard(folder: str, number: int, path: str) -> str:
    """Key of a file of a save: readable where the path is plain, else by its number."""
    return f"{folder}/{path}" if _PLAIN.match(path) else f"{folder}/file-{number}"


def is_of_step(key: str, step: int) -> bool:
    """Whether an object was put for ``step``: a save may name objects of older steps, too."""
    return key.startswith(f"{step_objects(step)}/")


def step_of(key: str) -> int:
    """The step that the shard ``key`` was put for. Raises `UnsafePathError`: it is no shard's."""
    step = parse_step(folder_of(key).split("/")[1])
    assert step is not None, "folder_of has looked"
    return step


def set_aside(shards: Iterable[str], kind: SaveKind, step: int) -> str:
    """Key of the manifest of a damaged save of ``step``, of which ``shards`` are keys: it goes with
    those of that step."""
    own = [key for key in shards if is_of_step(key, step)]
    folder = folder_of(min(own)) if own else f"{step_objects(step)}/{_ASIDE}"
    return f"{folder}/{set_aside_name(kind)}"


def folder_of(key: str) -> str:
    """The folder of the writer that put the shard ``key``.

    Raises:
        UnsafePathError: it is not the key of a shard.
    """
    parts = relative_parts(key)
    if len(parts) < 4 or parts[0] != OBJECTS or parse_step(parts[1]) is None:
        raise UnsafePathError(
            f"{key!r} is not the key of a shard: expected {OBJECTS}/STEP/WRITER/…"
        )
    return "/".join(parts[:3])
