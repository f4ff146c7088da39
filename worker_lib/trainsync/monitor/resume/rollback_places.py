"""Where a roll-back is asked for and carried out: on a run's volume, or in its bucket."""

from collections.abc import Callable, Set
from typing import Final, Protocol

from trainsync.api.protocol import SaveKind
from trainsync.storage.errors import DamagedFileError, FileCheckError, StepGoneError, StepHeldError
from trainsync.storage.layout import RunDirectory
from trainsync.storage.objects import commits, inspecting
from trainsync.storage.objects.bucket import ObjectBucket
from trainsync.storage.objects.live import rolled_back
from trainsync.storage.objects.live.term import Tenure
from trainsync.storage.saves import claims, manifest, rollback
from trainsync.storage.saves.rollback import Rollback

_KIND: Final = SaveKind.CHECKPOINT
_NAMED: Final = 8


class RollbackPlace(Protocol):
    """All methods raise `OSError` and `StorageError`, and what the monitor's gate raises."""

    def read(self) -> Rollback | None:
        """The run's newest request. Raises `DamagedFileError`, too."""
        ...

    def write(self, record: Rollback) -> None:
        """Replace the record."""
        ...

    def forget(self) -> None:
        """Remove the record."""
        ...

    def attempt(self) -> int | None:
        """The attempt in force."""
        ...

    def why_not(self, step: int) -> str | None:
        """Why the run cannot go back to ``step``; None when it can."""
        ...

    def check_readers(self, step: int) -> None:
        """See that no reader holds what would be put aside. Raises `StepHeldError`."""
        ...

    def put_aside(self, record: Rollback) -> tuple[int, ...]:
        """Put the steps after the record's aside; those that lie there. It can be done again.

        Raises:
            StepHeldError: a reader holds one of them; nothing was changed.
        """
        ...


class VolumeRollbacks:
    """See `RollbackPlace`.

    Args:
        gate: asked before each change.
        leased: steps that readers hold.
    """

    def __init__(
        self,
        run: RunDirectory,
        run_uid: str,
        gate: Callable[[], None],
        leased: Callable[[], Set[int]],
    ) -> None:
        self._run = run
        self._run_uid = run_uid
        self._gate = gate
        self._leased = leased

    def read(self) -> Rollback | None:
        """See `RollbackPlace`."""
        return rollback.read(self._run, self._run_uid)

    def write(self, record: Rollback) -> None:
        """See `RollbackPlace`."""
        rollback.write(self._run, record, self._gate)

    def forget(self) -> None:
        """See `RollbackPlace`."""
        self._gate()
        rollback.forget(self._run)

    def attempt(self) -> int | None:
        """See `RollbackPlace`."""
        granted = claims.read_claims(self._run, self._run_uid)
        return granted[-1].attempt if granted else None

    def why_not(self, step: int) -> str | None:
        """See `RollbackPlace`."""
        try:
            committed = manifest.read_manifest(self._run, _KIND, step)
            manifest.check_manifest(self._run, committed.manifest, with_digest=False)
        except FileNotFoundError:
            return _not_committed(step, manifest.committed_steps(self._run, _KIND))
        except (DamagedFileError, FileCheckError) as error:
            return f"checkpoint {step} is damaged: {error}"
        return None

    def check_readers(self, step: int) -> None:
        """See `RollbackPlace`."""
        held = sorted(self._leased() & set(rollback.later_steps(self._run, step)))
        if held:
            raise StepHeldError(
                f"the run goes back to step {step} once the readers of {named(held)} are done"
            )

    def put_aside(self, record: Rollback) -> tuple[int, ...]:
        """See `RollbackPlace`."""
        return rollback.put_aside(self._run, record, self._gate, self._leased)


class StoreRollbacks:
    """See `RollbackPlace`: nobody holds steps in a store.

    Args:
        may: asked before each change.
    """

    def __init__(
        self, bucket: ObjectBucket, run_uid: str, tenure: Tenure, may: Callable[[], None]
    ) -> None:
        self._bucket = bucket
        self._run_uid = run_uid
        self._tenure = tenure
        self._may = may

    def read(self) -> Rollback | None:
        """See `RollbackPlace`."""
        return rolled_back.read(self._bucket, self._run_uid)

    def write(self, record: Rollback) -> None:
        """See `RollbackPlace`."""
        rolled_back.write(self._bucket, record, self._may)

    def forget(self) -> None:
        """See `RollbackPlace`."""
        self._may()
        rolled_back.forget(self._bucket)

    def attempt(self) -> int | None:
        """See `RollbackPlace`."""
        return self._tenure.term.attempt

    def why_not(self, step: int) -> str | None:
        """See `RollbackPlace`."""
        try:
            stored = commits.read_manifest(self._bucket, _KIND, step)
        except StepGoneError:
            return _not_committed(step, commits.committed_steps(self._bucket, _KIND))
        except DamagedFileError as error:
            return f"checkpoint {step} is damaged: {error}"
        found = inspecting.size_findings(self._bucket, stored)
        return f"checkpoint {step} is damaged: {found[0]}" if found else None

    def check_readers(self, step: int) -> None:
        """See `RollbackPlace`."""

    def put_aside(self, record: Rollback) -> tuple[int, ...]:
        """See `RollbackPlace`."""
        self._tenure.set_aside()
        return rolled_back.put_aside(self._bucket, record, self._may)


def named(steps: list[int] | tuple[int, ...]) -> str:
    """Steps in a sentence, the last of many."""
    shown = ", ".join(str(step) for step in steps[-_NAMED:])
    return f"steps {'…, ' if len(steps) > _NAMED else ''}{shown}"


def _not_committed(step: int, there: list[int]) -> str:
    text = f"checkpoint {step} is not committed"
    return f"{text}; {named(there)} are" if there else f"{text}, nor is any other"
