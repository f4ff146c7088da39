"""Saves go straight into a store: shards from staged memory, then a receipt, each put once.

Nothing goes through a local disk, but for a `save_fn`, which writes into a local directory. An
upload that fails is begun anew from the staged copy, under another key, for as long as the part's
`Patience` has it: so a save outlasts an outage of the store.
"""

import io
import secrets
import shutil
import tempfile
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Final, TypeVar

import torch

from trainsync.api.protocol import SaveKind
from trainsync.checkpoint.errors import (
    CheckpointError,
    SaveAbandonedError,
    SaveFailedError,
    UnsupportedPlaceError,
)
from trainsync.checkpoint.memory.kept import KeptFile
from trainsync.checkpoint.save import ending
from trainsync.checkpoint.save.files.stream import buffered
from trainsync.checkpoint.save.files.writer import without_crc
from trainsync.failpoints import failpoint
from trainsync.storage import block_digests, digest
from trainsync.storage.errors import DamagedFileError, UnsafePathError
from trainsync.storage.layout import check_not_reserved
from trainsync.storage.objects import keys
from trainsync.storage.objects.bucket import Bucket
from trainsync.storage.objects.errors import StoreUnavailableError
from trainsync.storage.objects.live import names, records
from trainsync.storage.objects.live.records import StoredRecords
from trainsync.storage.objects.live.term import read_term
from trainsync.storage.objects.live.upload import Upload
from trainsync.storage.patience import Patience
from trainsync.storage.saves.receipts import (
    FileEntry,
    Participant,
    ParticipantFailure,
    Receipt,
)

if TYPE_CHECKING:
    from typing_extensions import Buffer

_BLOCK: Final = 4 << 20
_FEW: Final = Patience(tries=2)

T = TypeVar("T")


class _DigestingUpload(io.RawIOBase):
    """Hands what is written to ``upload``; counts and digests it."""

    def __init__(self, upload: Upload) -> None:
        self._upload = upload
        self._hasher = digest.new_hasher()
        self._blocks = block_digests.BlockHasher()
        self.size = 0
        self.error: Exception | None = None
        """The error of a write; torch hides it behind an error of its own."""

    def writable(self) -> bool:
        return True

    def write(self, data: "Buffer", /) -> int:
        view = memoryview(data).cast("B")
        try:
            for start in range(0, len(view), _BLOCK):
                if ending.over.is_set():
                    raise SaveAbandonedError("the process exited before the part was written")
                block = view[start : start + _BLOCK]
                self._hasher.update(block)
                self._blocks.update(block)
                self._upload.write(block)
                self.size += len(block)
        except Exception as error:
            self.error = error
            raise
        return len(view)

    def digest(self) -> str:
        return digest.format_digest(self._hasher)

    def blocks(self) -> block_digests.BlockDigests | None:
        return self._blocks.finish()


class StorePart:
    """See `PartPlace`."""

    def __init__(
        self,
        bucket: Bucket,
        owner: tuple[int, str],
        kind: SaveKind,
        step: int,
        participant: Participant,
        patience: Patience | None = None,
    ) -> None:
        self._patience = _FEW if patience is None else patience
        self._bucket = bucket if patience is None else bucket.patient(patience)
        self._records = StoredRecords(self._bucket, *owner, kind, step)
        # A failure is not waited for: the monitor hears of it, too.
        self._at_once = StoredRecords(bucket, *owner, kind, step)
        self._owner = owner
        self._step = step
        self._participant = participant
        self._writer = secrets.token_hex(8)
        self._number = 0
        self._work: Path | None = None
        names.receipt(self._records.folder, participant)

    @property
    def records(self) -> StoredRecords:
        """See `PartPlace`."""
        return self._records

    @property
    def writer(self) -> str:
        """See `PartPlace`: random, of this part alone."""
        return self._writer

    def claim(self) -> tuple[str, ...]:
        """See `PartPlace`. The first receipt decides: a second one is refused by the store."""
        return ()

    def withdraw(self) -> None:
        """See `PartPlace`. A receipt is never taken back: its objects do not change."""

    def write_state(
        self, path: str, state: Any, size: int, kept: KeptFile | None
    ) -> list[FileEntry]:
        """See `PartPlace`."""
        assert kept is None, "a run in a store keeps no shards in memory"

        def save(file: BinaryIO) -> None:
            with without_crc():
                torch.save(state, file)

        return self._again(lambda: self._write(path, save, size), is_first=True)

    def write_small(self, files: Mapping[str, bytes]) -> list[FileEntry]:
        """See `PartPlace`."""
        return [
            entry
            for path, data in files.items()
            for entry in self._again(partial(self._write, path, partial(_put, data), len(data)))
        ]

    def produce(self, save_fn: Callable[[Path], object]) -> None:
        """See `PartPlace`; the directory is on this machine, and goes with the part."""
        self.clear()
        self._work = Path(tempfile.mkdtemp(prefix="trainsync-part-"))
        save_fn(self._work)

    def adopt(self, place: Callable[[str], str]) -> list[FileEntry]:
        """See `PartPlace`."""
        assert self._work is not None, "produce comes first"
        found = sorted(
            path for path in self._work.rglob("*") if path.is_symlink() or not path.is_dir()
        )
        if not found:
            raise CheckpointError(f"{self._participant}: save_fn wrote no file into {self._work}")
        entries = []
        for path in found:
            relative = str(path.relative_to(self._work))
            if path.is_symlink() or not path.is_file():
                raise CheckpointError(f"save_fn wrote {relative}, which is not a regular file")

            def copy(file: BinaryIO, path: Path = path) -> None:
                with path.open("rb") as source:
                    shutil.copyfileobj(source, file, _BLOCK)

            write = partial(self._write, place(relative), copy, path.stat().st_size)
            entries += self._again(write)
        return entries

    def clear(self) -> None:
        """See `PartPlace`."""
        if self._work is not None:
            shutil.rmtree(self._work, ignore_errors=True)
            self._work = None

    def write_receipt(self, receipt: Receipt) -> None:
        """See `PartPlace`. Raises `SecondWriterError`: another process has put one."""
        self._records.write_receipt(receipt)
        failpoint("live.receipt")

    def write_failure(self, failure: ParticipantFailure) -> None:
        """See `PartPlace`."""
        self._at_once.write_failure(failure)

    def _again(self, write: Callable[[], T], *, is_first: bool = False) -> T:
        """``write``, and again from the beginning where the store was away.

        Args:
            is_first: nothing of the part was put before. Then it gets another folder: what is late
                of the first upload must not meet the second, whose bytes may be others.

        Raises:
            FileNotFoundError: the save has ended meanwhile.
            SaveFailedError: another incarnation is in force by now: there is nothing to report.
        """
        tries, number = self._patience.begin(), self._number
        while True:
            try:
                return write()
            except StoreUnavailableError as error:
                if not tries.again(error):
                    raise
            self._see_wanted()
            self._number = number
            if is_first:
                self._writer = secrets.token_hex(8)

    def _see_wanted(self) -> None:
        if self._records.outcome() is not None:
            raise FileNotFoundError(f"{self._records.folder}: the save has ended")
        try:
            term = read_term(self._bucket)
        except DamagedFileError:  # a newer release's, say: the monitor decides
            return
        attempt, incarnation = self._owner
        if term is None or term.attempt is None or term.attempt < attempt:
            return
        if term.attempt > attempt or incarnation not in term.clusters.values():
            raise SaveFailedError(
                f"{self._participant} of step {self._step} will not be committed: incarnation "
                f"{incarnation} of attempt {attempt} is not in force, the run is at attempt "
                f"{term.attempt}"
            )

    def _write(
        self, path: str, produce: Callable[[BinaryIO], object], size: int
    ) -> list[FileEntry]:
        """Put a file, and beside a file of several blocks their digests."""
        check_not_reserved(path)
        if path.endswith(block_digests.SUFFIX):
            raise UnsafePathError(
                f"{path!r} is refused: files whose names end in {block_digests.SUFFIX} hold the "
                "digests of others; choose another name"
            )
        entry, blocks = self._put_file(path, produce, size)
        if blocks is None:
            return [entry]
        data = blocks.encode()
        beside, _ = self._put_file(block_digests.beside(path), partial(_put, data), len(data))
        return [entry, beside]

    def _put_file(
        self, path: str, produce: Callable[[BinaryIO], object], size: int
    ) -> tuple[FileEntry, block_digests.BlockDigests | None]:
        folder = names.folder(self._step, *self._owner, self._writer)
        key = keys.shard(folder, self._number, path)
        upload = Upload(self._bucket, key, size)
        file = _DigestingUpload(upload)
        try:
            try:
                with buffered(file) as gathering:
                    produce(gathering)
            except RuntimeError as error:
                if file.error is not None:  # torch hides it behind "unexpected pos"
                    raise file.error from error
                raise
            upload.finish()
        except BaseException:
            upload.abandon()
            raise
        self._number += 1
        failpoint("live.shard")
        return FileEntry(path, file.size, file.digest()), file.blocks()


def _put(data: bytes, file: BinaryIO) -> None:
    file.write(data)


class StorePlace:
    """See `Place`."""

    def __init__(self, bucket: Bucket, attempt: int, incarnation: str) -> None:
        self._bucket = bucket
        self._owner = (attempt, incarnation)

    def save(self, kind: SaveKind, step: int) -> StoredRecords:
        """See `Place`."""
        return StoredRecords(self._bucket, *self._owner, kind, step)

    def part(
        self,
        kind: SaveKind,
        step: int,
        participant: Participant,
        patience: Patience | None = None,
    ) -> StorePart:
        """See `Place`."""
        if kind is SaveKind.STATE_DICT:
            raise UnsupportedPlaceError(
                f"a state dict of step {step} cannot be saved into {self._bucket.name}: a run "
                "whose checkpoints are in a store saves checkpoints alone; expected a run on a "
                "volume, or weights that are published by another method than checkpoint"
            )
        return StorePart(self._bucket, self._owner, kind, step, participant, patience)

    def newest_registered(self, kind: SaveKind) -> int | None:
        """See `Place`."""
        return records.newest_registered(self._bucket, *self._owner, kind)
