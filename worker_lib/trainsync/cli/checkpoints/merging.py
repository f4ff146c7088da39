"""A merge as commands ask for it: of a directory or a store, into a directory or a store."""

import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainsync.api.protocol import SaveKind
from trainsync.checkpoint.errors import CheckpointError
from trainsync.cli.checkpoints.places import DirectoryPlace, StorePlace
from trainsync.cli.extras import import_extra
from trainsync.cli.output.console import USAGE, fail
from trainsync.cli.output.progress import bytes_bar
from trainsync.storage.copying.store import StoreSource
from trainsync.storage.inspect.saves import committed_pairs
from trainsync.storage.objects import commits

Chosen = DirectoryPlace | StorePlace


@dataclass(frozen=True)
class MergeOptions:
    """What is said of a merge, besides the step; None of all: as saved."""

    dtype: str | None = None
    subdir: str | None = None
    base: Path | None = None

    @property
    def given(self) -> bool:
        """Whether any is."""
        return self != MergeOptions()


def chosen_kind(place: Chosen, step: int, kind: SaveKind | None) -> SaveKind:
    """The save of ``step`` to merge: the checkpoint, or else its state dict. Ends the command when
    there is none.

    Raises:
        OSError, StorageError: the place cannot be read.
    """
    if isinstance(place, StorePlace):
        pairs = commits.committed_pairs(place.bucket, step)
    else:
        pairs = committed_pairs(place.run, step)
    there = [k for _, k in pairs if kind in (None, k)]
    if not there:
        what = f"step {step}" if kind is None else f"{kind.value} {step}"
        fail(f"{what} is not committed in {place.name}", USAGE)
    return there[0]  # a checkpoint comes first


def merge_step(
    place: Chosen, step: int, kind: SaveKind, output: Path, options: MergeOptions
) -> Any:
    """`merge_to_hf`'s result; ends the command when it cannot be done.

    Raises:
        OSError, StorageError: the place or the output cannot be read or written.
    """
    module = "copied" if isinstance(place, StorePlace) else "merge"
    merging = import_extra(f"trainsync.checkpoint.merge.{module}", "merge", "worker")
    done = 0
    with bytes_bar("checking and merging", None) as tell:

        def on_progress(now: int, total: int) -> None:
            nonlocal done
            tell(now - done, total)
            done = now

        merge: Callable[..., Any]
        source: StoreSource | Path
        if isinstance(place, StorePlace):
            merge, source = merging.merge_copied_to_hf, StoreSource(place.bucket)
        else:
            merge, source = merging.merge_to_hf, place.run.root
        try:
            return merge(
                source,
                step,
                output,
                kind=kind,
                dtype=options.dtype,
                subdir=options.subdir,
                base=options.base,
                on_progress=on_progress,
            )
        except CheckpointError as error:
            fail(f"{kind.value} {step} was not merged: {error}")


def work_directory() -> "tempfile.TemporaryDirectory[str]":
    """A directory for a merged model on its way to elsewhere: in TMPDIR, and gone at the end."""
    return tempfile.TemporaryDirectory(prefix="trainsync-merge-", ignore_cleanup_errors=True)
