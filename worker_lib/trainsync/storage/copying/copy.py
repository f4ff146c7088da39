"""Copies one step: each file once, with its digest taken on the way, then the commit.

It takes some 70 MB of memory for each file on its way, between two stores some 110 MB.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from trainsync.api.protocol import SaveKind
from trainsync.storage import digest
from trainsync.storage.copying.places import Block, Destination, Reading, Source, Writing
from trainsync.storage.errors import FileCheckError
from trainsync.storage.parallel import for_each
from trainsync.storage.saves.manifest import Manifest
from trainsync.storage.saves.receipts import FileEntry

_READINGS = 2
"""A file whose bytes are not as listed is read once more: they may have changed on the way."""


@dataclass(frozen=True)
class Copied:
    """A save that is committed at the destination now.

    ``was_there``: it was before, and nothing was copied. ``digest``: of its manifest there.
    """

    manifest: Manifest
    digest: str
    was_there: bool
    seconds: float


def copy_step(
    source: Source,
    destination: Destination,
    step: int,
    kinds: Sequence[SaveKind],
    *,
    threads: int,
    on_total: Callable[[int], None] = lambda _: None,
    on_bytes: Callable[[int], None] = lambda _: None,
) -> list[Copied]:
    """Copy the saves ``kinds`` of ``step``; those that are there already are left as they are.

    Until its manifest is written nothing counts. An interrupted copy is done again.

    Args:
        threads: files that are copied at once.
        on_total: told how many bytes each save has, before it is copied.
        on_bytes: told how many more bytes are done, from several threads.

    Raises:
        StepGoneError: there is no such save, or it was removed meanwhile.
        FileCheckError: a file is not as its manifest says; nothing was committed.
        PromotionConflictError: another save is committed there.
        StorageError, OSError: a place refuses, or cannot be reached.
    """
    copied = []
    with destination.open():
        for kind in kinds:
            started = time.monotonic()
            with source.reading(kind, step) as reading:
                manifest = reading.manifest
                on_total(manifest.bytes)
                there = destination.find(manifest)
                if there is None:
                    writing = destination.writing(manifest)
                    _copy_files(reading, writing, threads, on_bytes)
                    there, was_there = writing.commit(), False
                else:
                    on_bytes(manifest.bytes)
                    was_there = True
            copied.append(Copied(manifest, there, was_there, time.monotonic() - started))
    return copied


def _copy_files(
    reading: Reading, writing: Writing, threads: int, on_bytes: Callable[[int], None]
) -> None:
    # The largest first, so that no thread is left alone with one at the end.
    files = sorted(reading.manifest.files, key=lambda entry: -entry.bytes)

    def copy(entry: FileEntry, go_on: Callable[[], None]) -> None:
        if writing.has(entry):
            on_bytes(entry.bytes)
            return
        for left in reversed(range(_READINGS)):
            told = 0

            def tell(count: int) -> None:
                nonlocal told
                go_on()
                told += count
                on_bytes(count)

            try:
                writing.put(entry, checked(reading.blocks(entry), entry, tell))
            except FileCheckError:
                if not left:
                    raise
                on_bytes(-told)
            else:
                return

    for_each(files, copy, threads)


def checked(
    blocks: Iterator[Block], entry: FileEntry, on_block: Callable[[int], None] = lambda _: None
) -> Iterator[Block]:
    """``blocks``, compared with what ``entry`` says when the last one has gone by.

    Raises:
        FileCheckError: they are not the bytes of the file.
    """
    hasher = digest.new_hasher()
    count = 0
    for block in blocks:
        hasher.update(block)
        count += len(block)
        if count > entry.bytes:
            raise FileCheckError(f"{entry.path} has more than {entry.bytes} bytes")
        on_block(len(block))
        yield block
    if count != entry.bytes:
        raise FileCheckError(f"{entry.path} has {count} bytes, expected {entry.bytes}")
    if (found := digest.format_digest(hasher)) != entry.digest:
        raise FileCheckError(f"{entry.path} has digest {found}, expected {entry.digest}")
