"""A merge of a step that lies where files cannot be mapped, as in object storage.

What the merge reads is copied beside the output first, and goes again when the merge has ended.
"""

import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from rich.filesize import decimal

from trainsync.api.protocol import SaveKind
from trainsync.checkpoint.errors import CorruptCheckpointError
from trainsync.checkpoint.merge.merge import MAX_SHARD_BYTES, MergeResult, check_dtype, merge_to_hf
from trainsync.checkpoint.merge.output import check_output, check_room
from trainsync.checkpoint.merge.step_files import StepFiles
from trainsync.storage import atomic
from trainsync.storage.copying.copy import copy_step
from trainsync.storage.copying.places import Block, Reading, Source
from trainsync.storage.copying.volume import VolumeDestination
from trainsync.storage.errors import FileCheckError
from trainsync.storage.layout import RunDirectory
from trainsync.storage.saves.manifest import Manifest
from trainsync.storage.saves.receipts import FileEntry

FILES_AT_ONCE: Final = 4


def merge_copied_to_hf(
    source: Source,
    step: int,
    output: Path,
    *,
    kind: SaveKind = SaveKind.CHECKPOINT,
    dtype: str | None = None,
    subdir: str | None = None,
    base: Path | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    threads: int = FILES_AT_ONCE,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> MergeResult:
    """`merge_to_hf` of a step of ``source``.

    The model's shards and small files alone are copied, in blocks, each compared with its digest.
    The file system of ``output`` must have room for them and for the merged weights.

    Args:
        threads: files that are copied at once.
        on_progress: told bytes done and bytes in all, which grow once when the copy is there.

    Raises:
        MergeError, CorruptCheckpointError, StorageError, OSError: as of `merge_to_hf`; besides,
            there is no room, or ``source`` refuses or cannot be reached.
    """
    check_dtype(dtype)
    output = output.absolute()
    place = atomic.temporary_name(output.with_name(f"{output.name}.shards"))
    check_output(place, output)
    output.parent.mkdir(parents=True, exist_ok=True)
    copied = 0

    def choose(manifest: Manifest) -> tuple[FileEntry, ...]:
        nonlocal copied
        files = StepFiles.of(manifest, subdir)
        copied = sum(entry.bytes for entry in files.all)
        # With another dtype the weights' size is known only when the shards are there.
        weights = sum(entry.bytes for entry in files.shards) if dtype is None else 0
        what = f"a copy of the shards ({decimal(copied)}) and the merged weights"
        check_room(output.parent, copied + weights, what)
        return files.all

    done = 0
    telling = threading.Lock()

    def tell(more: int) -> None:
        nonlocal done
        with telling:
            done += more
            on_progress(done, copied)

    try:
        place.mkdir()
        destination = VolumeDestination(RunDirectory(place))
        try:
            copy_step(
                _Chosen(source, choose), destination, step, [kind], threads=threads, on_bytes=tell
            )
        except FileCheckError as error:
            raise CorruptCheckpointError(f"{source.name}: {error}") from error
        return merge_to_hf(
            place,
            step,
            output,
            kind=kind,
            dtype=dtype,
            subdir=subdir,
            base=base,
            max_shard_bytes=max_shard_bytes,
            on_progress=lambda now, total: on_progress(copied + now, copied + total),
        )
    finally:  # also on Ctrl-C
        shutil.rmtree(place, ignore_errors=True)


class _Chosen:
    """A source whose saves have some of their files alone."""

    def __init__(self, source: Source, choose: Callable[[Manifest], tuple[FileEntry, ...]]) -> None:
        self._source = source
        self._choose = choose
        self.name = source.name

    def kinds(self, step: int) -> list[SaveKind]:
        return self._source.kinds(step)

    @contextmanager
    def reading(self, kind: SaveKind, step: int) -> Iterator[Reading]:
        with self._source.reading(kind, step) as whole:
            files = self._choose(whole.manifest)
            yield _ChosenReading(replace(whole.manifest, files=files), whole)


@dataclass(frozen=True)
class _ChosenReading:
    manifest: Manifest
    whole: Reading

    def blocks(self, entry: FileEntry) -> Iterator[Block]:
        return self.whole.blocks(entry)
