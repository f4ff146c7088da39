"""Which files of a step a merge reads: shards of weights, and the small files of a model."""

from dataclasses import dataclass
from typing import Self

from trainsync.checkpoint.errors import MergeError
from trainsync.checkpoint.load.reshard.shard_files import Component, find_component, folders_with
from trainsync.checkpoint.merge.lora import TRAIN_META
from trainsync.storage import block_digests
from trainsync.storage.saves.manifest import Manifest
from trainsync.storage.saves.receipts import FileEntry

_NOT_COPIED = (
    *(".safetensors", ".bin", ".safetensors.index.json", ".bin.index.json"),  # made anew
    block_digests.SUFFIX,  # of files of a run in a store
)


@dataclass(frozen=True)
class StepFiles:
    """The files of one model in a step.

    Attributes:
        component: the shards of its weights.
        folder: with its small files.
        shards: as the manifest lists them.
        small: name in a model's directory → file.
        adapter: rank and alpha of a LoRA adapter; None without one.
    """

    component: Component
    folder: str
    shards: tuple[FileEntry, ...]
    small: dict[str, FileEntry]
    adapter: FileEntry | None

    @classmethod
    def of(cls, manifest: Manifest, subdir: str | None) -> Self:
        """The model in ``subdir`` of a step, or the only one.

        Raises:
            MergeError: there is none that could be merged.
            CorruptCheckpointError: there are shards of two numbers of ranks.
        """
        subdir = _only_folder(manifest) if subdir is None else subdir
        what = f"{manifest.kind.value} {manifest.step}"
        component = find_component(manifest.files, "model", subdir)
        if component is None:
            raise MergeError(f"{what} has no component model in {subdir}/")
        files = {entry.path: entry for entry in manifest.files}
        folder = f"{subdir}/huggingface/"
        small = {
            path.removeprefix(folder): entry
            for path, entry in files.items()
            if path.startswith(folder) and not path.endswith(_NOT_COPIED)
        }
        if "config.json" not in small:
            raise MergeError(
                f"{what} has no {folder}config.json; expected the model's configuration: give "
                "attachments=trainsync.huggingface_files(...) to save, or save through "
                "FSDPCheckpointManager"
            )
        shards = tuple(files[component.path(rank)] for rank in sorted(component.ranks))
        return cls(component, folder, shards, small, files.get(f"{subdir}/{TRAIN_META}"))

    @property
    def all(self) -> tuple[FileEntry, ...]:
        """Every file that a merge may read."""
        adapter = () if self.adapter is None else (self.adapter,)
        return (*self.shards, *self.small.values(), *adapter)


def _only_folder(manifest: Manifest) -> str:
    """The one folder that has shards of a model; the actor's, where a critic is saved beside it."""
    folders = folders_with(manifest.files, "model")
    if len(folders) == 1:
        return folders.pop()
    if folders == {"actor", "critic"}:
        return "actor"
    what = f"{manifest.kind.value} {manifest.step}"
    if folders:
        raise MergeError(
            f"{what} has shards of models in {', '.join(sorted(folders))}; say which with subdir"
        )
    raise MergeError(
        f"{what} has no shards of a model; expected model_world_size_W_rank_R.pt among "
        + ", ".join(sorted(entry.path for entry in manifest.files)[:5])
    )
