"""Going back to an older checkpoint: the request on disk, and the later steps out of the way.

One record, the newest request's. It is written before anything is changed for it, so that a monitor
killed in between ends what was begun; it outlives the work, so that the same request does nothing a
second time.
"""

import os
import secrets
from collections.abc import Callable, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar, Final, Literal

from pydantic import ConfigDict, Field, TypeAdapter

from trainsync.api.protocol import SaveKind
from trainsync.api.status import RollbackState
from trainsync.failpoints import failpoint
from trainsync.storage import atomic, leases, records
from trainsync.storage.errors import StepHeldError
from trainsync.storage.layout import RunDirectory, step_name
from trainsync.storage.saves import pointers, superseding
from trainsync.storage.saves.receipts import Count

_LOCK_SECONDS: Final = 2.0


@dataclass(frozen=True, kw_only=True)
class Rollback:
    """The run ``run_uid`` was asked to go back to the checkpoint of ``step``.

    Accepted, it holds for the first attempt after ``after_attempt`` (None: for the first of all),
    which goes on from ``step``; done, that attempt is ``attempt``, and the steps ``aside`` lie in
    ``folder`` below `RunDirectory.rolled_back`.
    """

    __pydantic_config__: ClassVar[ConfigDict] = records.RECORD_CONFIG

    run_uid: str
    step: Count
    request: str | None = None
    state: RollbackState
    message: str
    after_attempt: Count | None = None
    attempt: Count | None = None
    folder: Annotated[str, Field(pattern=r"^to-[0-9]+-[0-9a-f]{8}$")] | None = None
    aside: tuple[Count, ...] = ()
    version: Literal[1] = 1

    def begins_with(self, attempt: int | None) -> bool:
        """Whether ``attempt`` is one that goes back for this request, and has not yet."""
        if self.state is not RollbackState.ACCEPTED or attempt is None:
            return False
        return self.after_attempt is None or attempt > self.after_attempt


_RECORD = TypeAdapter(Rollback)


def new_folder(step: int) -> str:
    """A name for what lies aside of a rollback to ``step``, which no other one has."""
    return f"to-{step}-{secrets.token_hex(4)}"


def encode(rollback: Rollback) -> bytes:
    """The bytes of the record."""
    return records.encode(_RECORD, rollback)


def decode(data: bytes, where: Path) -> Rollback:
    """Inverse of `encode`; ``where`` is for messages. Raises `DamagedFileError`."""
    return records.decode(_RECORD, data, where)


def write(run: RunDirectory, rollback: Rollback, gate: Callable[[], None]) -> None:
    """Replace the record, atomically, if ``gate``, asked right before, raises nothing. Raises
    `OSError`."""
    atomic.make_directory(run.rollback.parent)
    atomic.write_bytes(run.rollback, encode(rollback), gate)


def read(run: RunDirectory, run_uid: str) -> Rollback | None:
    """The newest request of the run ``run_uid``; None: nothing was asked.

    Raises `DamagedFileError`, `OSError`.
    """
    try:
        found = records.read(_RECORD, run.rollback)
    except FileNotFoundError:
        return None
    return found if found.run_uid == run_uid else None


def forget(run: RunDirectory) -> None:
    """The request is withdrawn. Raises `OSError`."""
    run.rollback.unlink(missing_ok=True)


def later_steps(run: RunDirectory, step: int) -> list[int]:
    """Steps after ``step`` that have a directory, committed or not, newest first."""
    return [there for there in reversed(run.steps()) if there > step]


def put_aside(
    run: RunDirectory,
    rollback: Rollback,
    gate: Callable[[], None],
    leased: Callable[[], Set[int]],
) -> tuple[int, ...]:
    """Move the steps after the rollback's aside; those that lie there, in order.

    Pointers go back first, so that they name something at every moment. It can be done again.

    Args:
        gate: called before each change; its exception prevents that.
        leased: steps that readers hold.

    Raises:
        StepHeldError: a reader holds one of them; nothing was changed.
        LockTimeoutError, OSError: do it again.
    """
    assert rollback.folder is not None, "an accepted rollback has a folder"
    place = run.rolled_back / rollback.folder
    with leases.lock(run, _LOCK_SECONDS, f"rollback of process {os.getpid()}"):
        later = later_steps(run, rollback.step)
        held = sorted(leased() & set(later))
        if held:
            raise StepHeldError(
                f"the run goes back to step {rollback.step} once the readers of"
                f" {_named(held)} are done"
            )
        gate()
        if superseding.finish(run):  # else it comes into its place after the others have gone
            later = later_steps(run, rollback.step)
        for kind in SaveKind:
            pointers.put_back(run, kind, rollback.step, gate)
        if later:
            atomic.make_directory(place)
        for step in later:
            failpoint("commit.rolling_back")
            gate()
            run.step(step).rename(place / step_name(step))
            atomic.fsync_directory(place)
            atomic.fsync_directory(run.root)
    return tuple(steps_in(place))


def steps_in(place: Path) -> list[int]:
    """Steps that lie in a folder of `RunDirectory.rolled_back`, in order."""
    return RunDirectory(place).steps()


def is_aside(run: RunDirectory, step: int) -> bool:
    """Whether any rollback has put ``step`` aside."""
    return any(run.rolled_back.glob(f"*/{step_name(step)}"))


def _named(steps: list[int]) -> str:
    return ("step " if len(steps) == 1 else "steps ") + ", ".join(str(step) for step in steps)
