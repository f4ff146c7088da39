"""Saves go straight into a store: shards from staged memory, then a receipt, each put once.

Nothing goes through a local disk, but for a `save_fn`, which writes into a local directory. An
upload that fails is begun anew from the staged copy, under another key, for as long as the part's
`RetryLimits` has it: so a save outlasts an outage of the store.
"""

import logging
import secrets
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import BinaryIO, Final, TypeVar

from trainsync.api.protocol import SaveKind
from trainsync.checkpoint.errors import (
    CheckpointError,
    SaveFailedError,
)
from trainsync.checkpoint.save.files.stream import buffered
from trainsync.checkpoint.save.places.base import Produce
from trainsync.checkpoint.save.places.resumed import ResumedFiles
from trainsync.checkpoint.save.places.unchanged import (
    LEAST,
    Compared,
    KnownFile,
    KnownFiles,
    base_of,
    compare,
    may_share,
)
from trainsync.checkpoint.save.places.uploading import DigestingUpload, OpenSaveCheck
from trainsync.failpoints import failpoint
from trainsync.storage import block_digests
from trainsync.storage.errors import DamagedFileError, StorageError, UnsafePathError
from trainsync.storage.layout import check_not_reserved
from trainsync.storage.objects import keys, parts
from trainsync.storage.objects.bucket import ObjectBucket
from trainsync.storage.objects.errors import StoreUnavailableError
from trainsync.storage.objects.live import names, records, references
from trainsync.storage.objects.live.records import StoredRecords
from trainsync.storage.objects.live.term import read_term
from trainsync.storage.objects.live.upload import Upload
from trainsync.storage.retry_limits import RetryLimits
from trainsync.storage.saves.based import Base, Blocks
from trainsync.storage.saves.receipts import (
    FileEntry,
    Participant,
    ParticipantFailure,
    Receipt,
)

logger = logging.getLogger(__name__)

_BLOCK: Final = 4 << 20
_FEW: Final = RetryLimits(tries=2)

T = TypeVar("T")


class StorePart:
    """See `PartPlace`.

    Args:
        known: what saves of this process have; None: every file is written.
        resumed: what the checkpoint has that the attempt resumed from.
    """

    def __init__(
        self,
        bucket: ObjectBucket,
        owner: tuple[int, str],
        kind: SaveKind,
        step: int,
        participant: Participant,
        retry_limits: RetryLimits | None = None,
        known: KnownFiles | None = None,
        resumed: ResumedFiles | None = None,
    ) -> None:
        self._retry_limits = _FEW if retry_limits is None else retry_limits
        self._bucket = bucket if retry_limits is None else bucket.retrying(retry_limits)
        self._records = StoredRecords(self._bucket, *owner, kind, step)
        # A failure is not waited for: the monitor hears of it, too.
        self._at_once = StoredRecords(bucket, *owner, kind, step)
        self._still_open = OpenSaveCheck(lambda: self._at_once.outcome() is not None)
        self._owner = owner
        self._step = step
        self._participant = participant
        self._writer = secrets.token_hex(8)
        self._number = 0
        self._work: Path | None = None
        self._known = known
        self._resumed = resumed
        self._state: KnownFile | None = None  # this part's file of a state
        self._kept: dict[str, str] = {}
        self._based: dict[str, Base] = {}
        names.receipt(self._records.folder, participant)

    @property
    def records(self) -> StoredRecords:
        """See `PartPlace`."""
        return self._records

    @property
    def writer(self) -> str:
        """See `PartPlace`: random, of this part alone."""
        return self._writer

    @property
    def kept(self) -> dict[str, str]:
        """See `PartPlace`: the keys of their objects."""
        return self._kept

    @property
    def based(self) -> dict[str, Base]:
        """See `PartPlace`."""
        return self._based

    def claim(self) -> tuple[str, ...]:
        """See `PartPlace`. The first receipt decides: a second one is refused by the store."""
        return ()

    def withdraw(self) -> None:
        """See `PartPlace`. A receipt is never taken back: its objects do not change."""

    def write_state(self, path: str, produce: Produce, size: int) -> list[FileEntry]:
        """See `PartPlace`."""
        older = None
        if self._known is not None and size >= LEAST:
            older = self._find_older(self._known, path)
        compared = None if older is None else compare(produce, older)
        if older is not None and compared is not None:
            if not compared.changed and self._hold(older, self._objects_of(older)):
                return self._keep(older)
            # Another release's digests may be of other blocks than those that are put beside this.
            is_alike = compared.blocks.block == block_digests.BLOCK
            base = base_of(older, compared) if compared.changed and is_alike else None
            if base is not None and self._hold(older, {base.key: older.entries[0].bytes}):
                write = partial(self._write_based, path, produce, compared, base)
                entries = self._again(write, is_first=True)
                if entries is not None:
                    return entries
                self._begin_anew()
        return self._again(partial(self._write, path, produce, size, older), is_first=True)

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
        if self._known is not None and self._state is not None:
            self._known.add(self._participant, self._state)

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
        tries, number = self._retry_limits.begin(), self._number
        while True:
            try:
                return write()
            except StoreUnavailableError as error:
                if not tries.again(error):
                    raise
            self._see_wanted()
            self._number = number
            if is_first:
                self._begin_anew()

    def _begin_anew(self) -> None:
        """Nothing that the part has put counts."""
        self._number = 0
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

    def _find_older(self, known: KnownFiles, path: str) -> KnownFile | None:
        try:
            return known.newest(
                self._participant, path, self._step, self._is_committed, self._find_resumed
            )
        except StorageError as error:
            logger.warning("%s is written in full: %s", path, error)
            return None

    @staticmethod
    def _objects_of(file: KnownFile) -> dict[str, int]:
        """The sizes of all that the file and what lies beside it are in."""
        (own, beside), (entry, blocks) = file.places, file.entries
        return {**parts.sizes(own, entry.bytes, file.base), beside: blocks.bytes}

    def _hold(self, older: KnownFile, objects: Mapping[str, int]) -> bool:
        """Have ``objects`` of an older step stay until this save has ended; False where they may be
        gone. They have these sizes."""
        folder = self._records.folder
        try:
            if not references.pin(
                self._bucket, folder, older.step, self._participant, older.manifest
            ):
                return False  # retention has removed it meanwhile
            # A rule of the bucket or a person may have removed an object.
            return all(self._bucket.size(key) == size for key, size in objects.items())
        except StorageError as error:
            logger.warning("%s is written in full: %s", older.entries[0].path, error)
            return False

    def _keep(self, file: KnownFile) -> list[FileEntry]:
        """Have the file of an older step."""
        self._kept = {entry.path: key for entry, key in zip(file.entries, file.places, strict=True)}
        if file.base is not None:
            self._based = {file.entries[0].path: file.base}
        self._number += len(file.entries)
        self._state = replace(file, step=self._step, manifest=None)
        return list(file.entries)

    def _write_based(
        self,
        path: str,
        produce: Produce,
        compared: Compared,
        base: Base,
    ) -> list[FileEntry] | None:
        """Put the blocks of a file that ``base`` lacks, and beside it the digests of all.

        None where it has other bytes than were compared, as of an object that pickles itself in
        another way each time: what was put is of no use.
        """
        own = base.blocks(compared.size)
        key = self._key(self._number, path)
        entry, blocks = self._put_file(path, produce, own.own_bytes, own=own)
        if blocks != compared.blocks:
            logger.warning("%s is written in full: pickled twice, its bytes differ", path)
            self._bucket.delete([key])
            return None
        self._based = {path: base}
        return self._put_beside(entry, compared.blocks, base)

    def _find_resumed(self, path: str) -> KnownFile | None:
        return None if self._resumed is None else self._resumed.find(self._bucket, path)

    def _is_committed(self, step: int) -> bool | None:
        records = StoredRecords(self._bucket, *self._owner, SaveKind.CHECKPOINT, step)
        outcome = records.outcome()
        return None if outcome is None else outcome.error is None

    def _write(
        self,
        path: str,
        produce: Produce,
        size: int,
        older: KnownFile | None = None,
    ) -> list[FileEntry]:
        """Put a file, and beside a file of several blocks their digests.

        Args:
            older: the same file of an older step.
        """
        check_not_reserved(path)
        if path.endswith(block_digests.SUFFIX):
            raise UnsafePathError(
                f"{path!r} is refused: files whose names end in {block_digests.SUFFIX} hold the "
                "digests of others; choose another name"
            )
        entry, blocks = self._put_file(path, produce, size)
        if blocks is None:
            return [entry]
        return self._put_beside(entry, blocks, shares=may_share(blocks, older))

    def _put_beside(
        self,
        entry: FileEntry,
        blocks: block_digests.BlockDigests,
        base: Base | None = None,
        *,
        shares: bool = True,
    ) -> list[FileEntry]:
        """Put the digests of a file's blocks; both files."""
        data = blocks.encode()
        path = block_digests.beside(entry.path)
        beside, _ = self._put_file(path, partial(_put, data), len(data))
        places = tuple(self._key(number, of.path) for number, of in enumerate((entry, beside)))
        if self._number == len(places):  # the part's first file, so its state
            self._state = KnownFile(
                self._step, (entry, beside), places, blocks, base=base, shares=shares
            )
        return [entry, beside]

    def _put_file(
        self,
        path: str,
        produce: Produce,
        size: int,
        own: Blocks | None = None,
    ) -> tuple[FileEntry, block_digests.BlockDigests | None]:
        upload = Upload(self._bucket, self._key(self._number, path), size, self._still_open.check)
        file = DigestingUpload(upload, own)
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

    def _key(self, number: int, path: str) -> str:
        folder = names.folder(self._step, *self._owner, self._writer)
        return keys.shard(folder, number, path)


def _put(data: bytes, file: BinaryIO) -> None:
    file.write(data)


class StorePlace:
    """See `SavePlace`.

    Args:
        incremental: what has not changed of checkpoints' states is not written again.
    """

    def __init__(
        self, bucket: ObjectBucket, attempt: int, incarnation: str, *, incremental: bool = False
    ) -> None:
        self._bucket = bucket
        self._owner = (attempt, incarnation)
        self._known = KnownFiles() if incremental else None
        self._resumed = ResumedFiles(attempt, incarnation)

    @property
    def writer(self) -> str | None:
        """See `SavePlace`."""
        return None

    def save(self, kind: SaveKind, step: int) -> StoredRecords:
        """See `SavePlace`."""
        return StoredRecords(self._bucket, *self._owner, kind, step)

    def part(
        self,
        kind: SaveKind,
        step: int,
        participant: Participant,
        retry_limits: RetryLimits | None = None,
    ) -> StorePart:
        """See `SavePlace`."""
        # State dicts are superseded, so no other save names their objects.
        known = self._known if kind is SaveKind.CHECKPOINT else None
        return StorePart(
            self._bucket, self._owner, kind, step, participant, retry_limits, known, self._resumed
        )

    def registered(self, kind: SaveKind) -> Iterator[int]:
        """See `SavePlace`."""
        return records.registered(self._bucket, *self._owner, kind)
