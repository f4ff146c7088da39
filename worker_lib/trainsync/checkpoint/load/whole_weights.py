"""The whole weights of a committed step, put together from its shards, for a process that serves.

No process group. Every file that is read is checked against the manifest first, to the last bit;
then shards are mapped, and one tensor after the other is copied out of them.
"""

from collections.abc import Iterable
from pathlib import Path
from typing import Final

import torch

from trainsync.checkpoint.errors import (
    CheckpointError,
    CorruptCheckpointError,
    StateMismatchError,
)
from trainsync.checkpoint.load.deadline import in_time
from trainsync.checkpoint.load.reshard.files import MappedShards
from trainsync.checkpoint.load.reshard.read import ComponentRead
from trainsync.checkpoint.load.reshard.shard_files import Component, find_component, folders_with
from trainsync.checkpoint.megatron_shards import MegatronShards, is_megatron
from trainsync.checkpoint.merge.megatron import MegatronWeights
from trainsync.checkpoint.merge.names import tensor_names
from trainsync.storage.errors import FileCheckError
from trainsync.storage.inspect import digests
from trainsync.storage.saves.manifest import Manifest, check_file

_COMPONENT: Final = "model"
_THREADS: Final = 4  # of reading files for their digests: volumes across a network are slow to ask


def whole_weights(
    directory: Path, manifest: Manifest, *, deadline: float
) -> dict[str, torch.Tensor]:
    """Full CPU tensors that own their memory, under the names that the trainer's state has; of a
    Megatron model, under those of Hugging Face (it needs mbridge, the extra ``megatron``).

    The step must not be removed meanwhile: hold a lease (`trainsync.storage.leases.reading`).

    Args:
        directory: of the step.
        deadline: by `time.monotonic`; looked at while files are read and between tensors.

    Raises:
        CorruptCheckpointError: a file is missing or differs from the manifest.
        StateMismatchError, MergeError: the step holds no weights of one model.
        LoadTimeoutError: the deadline has passed.
        OSError: the volume cannot be read.
    """
    what = f"{manifest.kind.value} {manifest.step}"
    component = model_of(manifest)
    home = component.path(component.home(0, 1))
    try:
        reading = ComponentRead(MappedShards(directory.joinpath), component, 0, 1)
        if is_megatron(reading.state):
            return _of_megatron(directory, manifest, component, what, deadline)
        names = want_all(reading)
    except CheckpointError:
        # The plan was made from a header that was not checked: damage is not to look like a misfit.
        _check(directory, manifest, [home], what, deadline)
        raise
    _check(directory, manifest, reading.paths, what, deadline)
    tensors = {}
    for name in names:
        in_time(what, deadline)
        tensors[name] = reading.tensor((name,))
    return tensors


def model_of(manifest: Manifest) -> Component:
    """The shards of the one model whose weights a step has.

    Raises:
        StateMismatchError: it has none, or several.
        CorruptCheckpointError: there are shards of two numbers of ranks.
    """
    folder = _folder(manifest, f"{manifest.kind.value} {manifest.step}")
    component = find_component(manifest.files, _COMPONENT, folder)
    assert component is not None, "the folder was chosen for it"
    return component


def want_all(reading: ComponentRead) -> list[str]:
    """Plan to read every tensor in full; their names. Raises `CheckpointError`."""
    names = list(tensor_names(reading.state))
    for name in names:
        shape = reading.layout((name,), name).shape
        whole = tuple(((0, length),) if length else () for length in shape)
        reading.want((name,), name, whole, replicated=True)
    return names


def _of_megatron(
    directory: Path, manifest: Manifest, component: Component, what: str, deadline: float
) -> dict[str, torch.Tensor]:
    config = f"{component.subdir}/huggingface"
    _check(directory, manifest, [f"{config}/config.json"], what, deadline)
    weights = MegatronWeights(
        MegatronShards(MappedShards(directory.joinpath).open, component), directory / config, None
    )
    _check(directory, manifest, weights.paths, what, deadline)
    tensors = {}
    for entry in weights.entries:
        in_time(what, deadline)
        tensors[entry.name] = weights.tensor(entry).clone()  # what is mapped ends with the step
    return tensors


def _folder(manifest: Manifest, what: str) -> str:
    folders = folders_with(manifest.files, _COMPONENT)
    if len(folders) == 1:
        return folders.pop()
    found = ", ".join(sorted(folders) or sorted(entry.path for entry in manifest.files)[:5])
    raise StateMismatchError(
        f"{what} has shards of {len(folders)} models ({found}); expected one folder with "
        "model_world_size_W_rank_R.pt, as fsdp_save_state_dict writes it"
    )


def _check(
    directory: Path, manifest: Manifest, paths: Iterable[str], what: str, deadline: float
) -> None:
    """Compare files with the manifest: first their sizes, then all their bytes."""
    entries = {entry.path: entry for entry in manifest.files}
    readings = []
    try:
        for path in sorted(paths):
            if path not in entries:
                raise CorruptCheckpointError(f"{what}: the manifest does not list {path}")
            check_file(directory, entries[path], with_digest=False)
            readings.append(digests.ExpectedFile(directory, entries[path]))
    except FileCheckError as error:
        raise CorruptCheckpointError(f"{what}: {error}") from error
    problems = digests.read_all(
        readings, threads=_THREADS, on_bytes=lambda _: in_time(what, deadline)
    )
    for reading, (_, sentence) in problems.items():
        raise CorruptCheckpointError(f"{what}: {reading.entry.path} {sentence}")
