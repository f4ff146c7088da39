"""Saves go into the run's directory on a volume, in staging, until the monitor promotes them."""

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from trainsync.api.protocol import SaveKind
from trainsync.checkpoint.save.files import writer as files
from trainsync.checkpoint.save.places.base import Produce
from trainsync.checkpoint.save.places.linking import Links
from trainsync.checkpoint.save.places.unchanged import LEAST
from trainsync.storage import atomic
from trainsync.storage.layout import RunDirectory, SaveDirectory
from trainsync.storage.retry_limits import RetryLimits
from trainsync.storage.saves import receipts, scan
from trainsync.storage.saves.based import Base
from trainsync.storage.saves.receipts import (
    FileEntry,
    Participant,
    ParticipantFailure,
    Receipt,
    Rescue,
    SaveOutcome,
    SaveRegistration,
)
from trainsync.storage.saves.writers import Writer


class VolumeRecords:
    """See `SaveRecords`."""

    def __init__(self, directory: SaveDirectory) -> None:
        self._directory = directory

    def outcome(self) -> SaveOutcome | None:
        """See `SaveRecords`."""
        return receipts.read_outcome(self._directory)

    def registration(self) -> SaveRegistration | None:
        """See `SaveRecords`."""
        try:
            return receipts.read_registration(self._directory)
        except FileNotFoundError:
            return None

    def writers(self) -> list[Participant]:
        """See `SaveRecords`."""
        return receipts.writers(self._directory)

    def has_failed(self) -> bool:
        """See `SaveRecords`."""
        return receipts.has_failed(self._directory)

    def rescues(self) -> list[Rescue]:
        """See `SaveRecords`."""
        return receipts.rescues(self._directory)

    def write_rescue(self, rescue: Rescue) -> None:
        """See `SaveRecords`."""
        receipts.write_rescue(self._directory, rescue)

    def has_rescue(self, participant: Participant) -> bool:
        """See `SaveRecords`."""
        return atomic.is_there(self._directory.rescue(participant.component, participant.rank))

    def want_copies(self) -> None:
        """See `SaveRecords`."""
        receipts.want_copies(self._directory)

    def are_copies_wanted(self) -> bool:
        """See `SaveRecords`."""
        return atomic.is_there(self._directory.copies_wanted)

    def is_there(self) -> bool:
        """See `SaveRecords`."""
        return atomic.is_there(self._directory.path)


class VolumePart:
    """See `PartPlace`."""

    def __init__(
        self,
        directory: SaveDirectory,
        kind: SaveKind,
        step: int,
        participant: Participant,
        claims: Writer,
        links: Links | None = None,
    ) -> None:
        directory.receipt(participant.component, participant.rank)  # refuses a bad name
        self._save = directory
        self._kind = kind
        self._step = step
        self._participant = participant
        self._claims = claims
        self._links = links
        self._kept: dict[str, str] = {}
        self._own = files.OwnFiles(directory, participant, self._files, claims.id)

    @property
    def writer(self) -> str:
        """See `PartPlace`."""
        return self._claims.id

    @property
    def records(self) -> VolumeRecords:
        """See `PartPlace`."""
        return VolumeRecords(self._save)

    @property
    def kept(self) -> dict[str, str]:
        """See `PartPlace`: where the file is below the run's directory that each one is."""
        return self._kept

    @property
    def based(self) -> dict[str, Base]:
        """See `PartPlace`: none, a volume links whole files."""
        return {}

    @property
    def _files(self) -> Path:
        """Where this writer's files of the save lie until they are promoted."""
        return self._save.files_of(self._claims.id)

    def claim(self) -> tuple[str, ...]:
        """See `PartPlace`."""
        return self._claims.claim(self._kind, self._step, self._participant)

    def withdraw(self) -> None:
        """See `PartPlace`."""
        receipts.withdraw_receipt(self._save, self._participant)

    def write_state(self, path: str, produce: Produce, size: int) -> list[FileEntry]:
        """See `PartPlace`."""
        self._make()
        self._kept = {}
        if self._links is not None and size >= LEAST:
            linked = self._links.link(self._save, self._files, path, produce)
            if linked is not None:
                entry, older = linked
                self._kept = {path: older}
                return [entry]
        return [files.write(self._files, path, produce)]

    def write_small(self, files_: Mapping[str, bytes]) -> list[FileEntry]:
        """See `PartPlace`."""
        return files.write_attachments(self._files, files_)

    def produce(self, save_fn: Callable[[Path], object]) -> None:
        """See `PartPlace`."""
        files.produce_own(self._own, save_fn)

    def adopt(self, place: Callable[[str], str]) -> list[FileEntry]:
        """See `PartPlace`."""
        self._make()
        return files.adopt_own(self._own, place)

    def clear(self) -> None:
        """See `PartPlace`."""
        files.clear_own(self._own)

    def write_receipt(self, receipt: Receipt) -> None:
        """See `PartPlace`."""
        receipts.write_receipt(self._save, receipt)

    def write_failure(self, failure: ParticipantFailure) -> None:
        """See `PartPlace`."""
        receipts.write_failure(self._save, failure)

    def _make(self) -> None:
        atomic.make_directory(self._save.path)  # durable, as the monitor's records lie there, too


class VolumePlace:
    """See `SavePlace`.

    Args:
        incremental: states of checkpoints that have not changed are not written again.
        continues: see `Writer`.
    """

    def __init__(
        self,
        run: RunDirectory,
        attempt: int,
        incarnation: str,
        *,
        incremental: bool = False,
        continues: str | None = None,
    ) -> None:
        self._run = run
        self._attempt = attempt
        self._incarnation = incarnation
        self._claims = Writer(run, attempt, incarnation, continues)
        self._links = Links(run) if incremental else None

    @property
    def writer(self) -> str | None:
        """See `SavePlace`."""
        return self._claims.id

    def save(self, kind: SaveKind, step: int) -> VolumeRecords:
        """See `SavePlace`."""
        return VolumeRecords(self._directory(kind, step))

    def part(
        self,
        kind: SaveKind,
        step: int,
        participant: Participant,
        retry_limits: RetryLimits | None = None,
    ) -> VolumePart:
        """See `SavePlace`. A volume that is away keeps the call, or refuses it at once."""
        del retry_limits
        # State dicts are superseded, directory and all, and are read by name meanwhile.
        links = self._links if kind is SaveKind.CHECKPOINT else None
        return VolumePart(self._directory(kind, step), kind, step, participant, self._claims, links)

    def registered(self, kind: SaveKind) -> Iterator[int]:
        """See `SavePlace`."""
        return scan.registered(self._run, self._attempt, self._incarnation, kind)

    def _directory(self, kind: SaveKind, step: int) -> SaveDirectory:
        return self._run.save(self._attempt, self._incarnation, kind, step)
