"""When the trainer publishes weights and when explorers take them: pure functions of the run.

`PaceScheduler`, which knows the queued batches and the rollouts, asks `trainer_move` whenever the
trainer is between two steps, and `explorer_move` whenever an explorer is between two batches, and
asks again after anything has changed. A *batch* is what an explorer makes in one go
with one version; the version of a batch is the version with which it was begun. A version is the
training step after which it was published, so staleness is counted in training steps.

What the styles promise (`interval` I, `offset` O, `max_staleness` K):

fixed: the batch for step n is made with the version of the largest multiple of I that is not above
    n - 1 - O (before the first such multiple, with the first version); an explorer that joins late
    may have a newer one. So a batch is at most I - 1 + O steps old when it is trained on. The
    trainer replaces a version only when all explorers have it, which makes runs repeatable.
trainer_driven: the trainer publishes every I steps and does not wait; explorers take the newest
    version between two batches, and make at least one batch with each that they take.
explorer_driven: an explorer makes I batches with a version and then asks for a newer one; the
    trainer publishes when it is asked and has one. No explorer makes more batches with an old
    version.
fully_async: the trainer publishes every I steps; at any speeds a batch is at most K steps old when
    it is trained on, if the trainer always trains on the oldest queued batches. At most
    (K + 1) * `batches_per_step` batches are in the making or queued.

The save that carries a version may be *aborted*: the same step cannot be published again, and is
not waited for. The promises are then relaxed by as little as lets training reach the next version:

fixed: the batches of the aborted version are made with the multiple of I before it, and so are I
    steps older for each aborted version in a row.
trainer_driven: explorers keep their version until the next one.
explorer_driven: explorers go on with their version until there is another step to publish.
fully_async: the trainer publishes after the next step, for any I. Where not even that step could
    be trained within K, batches may be one step older than K for each aborted version in a row.
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from trainsync.api.spec import SyncStyle
from trainsync.weights.synchronizer.roster import LOST, REQUIRE_SYNC, STOPPED


@dataclass(frozen=True)
class SyncPolicy:
    """A style and its numbers.

    Args:
        interval: training steps; with ``explorer_driven`` batches of one explorer.
        offset: ``fixed`` only: how many steps explorers run ahead, from 0 to ``interval``.
        max_staleness: ``fully_async`` only, and needed there: at least ``interval`` - 1.
        batches_per_step: ``fully_async`` only: how many batches one training step uses up.
        timeout: seconds that the trainer waits for an explorer that lives.

    Raises:
        ValueError: numbers that do not fit together, or have no meaning for the style.
    """

    style: SyncStyle
    interval: int = 1
    offset: int = 0
    max_staleness: int | None = None
    batches_per_step: int = 1
    timeout: float = 600.0

    def __post_init__(self) -> None:
        """Check."""
        fixed, bounded = self.style == SyncStyle.FIXED, self.style == SyncStyle.FULLY_ASYNC
        if self.interval < 1 or self.batches_per_step < 1:
            raise ValueError("interval and batches_per_step must be at least 1")
        if not 0 <= self.offset <= (self.interval if fixed else 0):
            raise ValueError(
                f"offset is {self.offset}; it must be between 0 and interval with style fixed, "
                "and 0 with any other"
            )
        if not bounded and (self.max_staleness is not None or self.batches_per_step != 1):
            raise ValueError("max_staleness and batches_per_step are for style fully_async only")
        if bounded and (self.max_staleness is None or self.max_staleness < self.interval - 1):
            raise ValueError(
                f"max_staleness is {self.max_staleness}; style fully_async needs at least "
                f"interval - 1 = {self.interval - 1}"
            )
        if self.timeout <= 0:
            raise ValueError(f"timeout must be positive, got {self.timeout:g}")


@dataclass(frozen=True)
class ExplorerView:
    """One explorer.

    Attributes:
        version: that it serves, and rolls out with; -1 for none yet.
        status: as in `trainsync.weights.synchronizer.roster`.
        rollouts: batches begun with this version.
        rolling_out: a batch is in the making.
        next_step: ``fixed``: the training step that its next batch is for; for one that joins, the
            first step that has not begun.
        refused: the version that it could not take, and is not told to; -1 for none.
    """

    version: int = -1
    status: str = "running"
    rollouts: int = 0
    rolling_out: bool = False
    next_step: int = 1
    refused: int = -1

    @property
    def lives(self) -> bool:
        """Whether anything is to be expected of it."""
        return self.status not in (STOPPED, LOST)


@dataclass(frozen=True)
class RunView:
    """The run, at one instant.

    Attributes:
        step: the last training step that is complete.
        published: the newest version that explorers may take; None before the first.
        training: step ``step`` + 1 is under way; what it trains on is not queued any more.
        stopped: the trainer has ended.
        queued: versions of the batches that are made and not trained on (``fully_async``).
        aborted: versions that came to nothing: all that are newer than ``published``, and those
            that an explorer may still have to do without.
    """

    step: int
    published: int | None
    explorers: Mapping[str, ExplorerView] = field(default_factory=dict)
    training: bool = False
    stopped: bool = False
    queued: tuple[int, ...] = ()
    aborted: Collection[int] = ()

    @property
    def at_aborted(self) -> bool:
        """The weights of the last complete step cannot be had, and there are none newer yet."""
        return self.step in self.aborted and not self.training


@dataclass(frozen=True)
class TrainerMove:
    """The trainer's move before its next step; nothing set means: train.

    Attributes:
        upload: publish the weights of the last complete step, and ask again.
        wait_for: wait until something changes, for at most ``seconds``, and ask again.
        give_up: these had their time: quarantine them, and ask again.
    """

    upload: bool = False
    wait_for: frozenset[str] = frozenset()
    give_up: frozenset[str] = frozenset()
    seconds: float = 0.0


class ExplorerMove(StrEnum):
    """An explorer's move before its next batch."""

    ROLL_OUT = "roll_out"
    FETCH = "fetch"  # take the published version, and ask again
    WAIT = "wait"  # as require_sync, until something changes; the wait for a version is bounded
    STOP = "stop"


def trainer_move(policy: SyncPolicy, run: RunView, waited: float = 0.0) -> TrainerMove:
    """The trainer's move between two steps, or while it waits for batches.

    Args:
        waited: seconds that it has waited already for explorers that hold it up.
    """
    new = run.published is None or (run.published < run.step and _publish_now(policy, run))
    upload = new and run.step not in run.aborted
    held_up_by: frozenset[str] = frozenset()
    if upload and policy.style == SyncStyle.FIXED:
        held_up_by = _without(run, run.published)
    elif not upload and policy.style == SyncStyle.FULLY_ASYNC:
        held_up_by = _urgent(policy, run)
    if not held_up_by:
        return TrainerMove(upload=upload)
    if waited >= policy.timeout:
        return TrainerMove(give_up=held_up_by)
    return TrainerMove(wait_for=held_up_by, seconds=policy.timeout - waited)


def explorer_move(policy: SyncPolicy, run: RunView, name: str) -> ExplorerMove:
    """The move of explorer ``name`` between two batches, or while it waits."""
    explorer = run.explorers[name]
    if run.stopped:
        return ExplorerMove.STOP
    refused = explorer.refused == run.published
    if run.published is None or (refused and explorer.version < 0):
        return ExplorerMove.WAIT
    if explorer.version < 0:
        return ExplorerMove.FETCH
    may_roll_out, wants_newer = _wishes(policy, run, name)
    newer = run.published > explorer.version and not refused
    if newer and (wants_newer or not may_roll_out):
        return ExplorerMove.FETCH
    return ExplorerMove.ROLL_OUT if may_roll_out else ExplorerMove.WAIT


def admits(policy: SyncPolicy, run: RunView, version: int) -> bool:
    """Whether a batch that is not on the books, of an explorer that was lost, may be queued.

    If not, it is to be thrown away: it, or one that is queued, would be too old when its turn came.
    """
    if policy.style != SyncStyle.FULLY_ASYNC:
        return True
    return _first_late(policy, run, [*_outstanding(run), version], _next(run)) is None


def version_for(policy: SyncPolicy, step: int) -> int:
    """Style ``fixed``: the version with which the batch for training step ``step`` is made.

    Negative while there is none such yet: then it is the first version.
    """
    return (step - 1 - policy.offset) // policy.interval * policy.interval


def _publish_now(policy: SyncPolicy, run: RunView) -> bool:
    if policy.style == SyncStyle.FULLY_ASYNC and max(run.aborted, default=-1) > (
        -1 if run.published is None else run.published
    ):
        return True  # what was aborted is made up for
    if policy.style != SyncStyle.EXPLORER_DRIVEN:
        return run.step % policy.interval == 0
    return any(
        e.lives and e.status == REQUIRE_SYNC and e.version == run.published
        for e in run.explorers.values()
    )


def _wishes(policy: SyncPolicy, run: RunView, name: str) -> tuple[bool, bool]:
    """Whether it may roll out with what it has, and whether it would rather have a newer one."""
    explorer = run.explorers[name]
    match policy.style:
        case SyncStyle.FIXED:
            return explorer.version >= _due(policy, run, explorer.next_step), False
        case SyncStyle.TRAINER_DRIVEN:
            return True, explorer.rollouts > 0
        case SyncStyle.EXPLORER_DRIVEN:
            had_its_share = explorer.rollouts >= policy.interval
            nothing_newer = explorer.version >= run.step or run.step in run.aborted
            return not had_its_share or nothing_newer, had_its_share
        case SyncStyle.FULLY_ASYNC:
            batches = [*_outstanding(run), explorer.version]
            return _first_late(policy, run, batches, _next(run)) is None, explorer.rollouts > 0


def _due(policy: SyncPolicy, run: RunView, step: int) -> int:
    """`version_for`, of the versions that came to be."""
    version = version_for(policy, step)
    while version in run.aborted:
        version -= policy.interval
    return version


def _without(run: RunView, version: int | None) -> frozenset[str]:
    """Explorers that live and serve an older version, or none."""
    if version is None:
        return frozenset()
    return frozenset(n for n, e in run.explorers.items() if e.lives and e.version < version)


def _urgent(policy: SyncPolicy, run: RunView) -> frozenset[str]:
    """The explorers whose batch would come too late if the trainer took its next step now."""
    queued = sorted(run.queued)
    if len(queued) < policy.batches_per_step:
        return frozenset()  # it waits for batches anyway
    making = _making(run)
    left = [*queued[policy.batches_per_step :], *making.values()]
    late = _first_late(policy, run, left, run.step + 1)
    return frozenset(n for n, version in making.items() if late is not None and version <= late)


def _making(run: RunView) -> dict[str, int]:
    return {n: e.version for n, e in run.explorers.items() if e.lives and e.rolling_out}


def _outstanding(run: RunView) -> list[int]:
    return [*run.queued, *_making(run).values()]


def _next(run: RunView) -> int:
    """Steps that are complete, or cannot use a new batch any more."""
    return run.step + run.training


def _first_late(policy: SyncPolicy, run: RunView, versions: Iterable[int], step: int) -> int | None:
    """The oldest version that could not be trained on in time after ``step``, oldest first.

    A batch of version v is to be used up by step v + K + 1, and every step uses up a fixed number.
    """
    bound = 0 if policy.max_staleness is None else policy.max_staleness
    if run.at_aborted and run.published is not None and step == run.step:
        bound = max(bound, run.step - run.published)  # else the next step could not be trained
    for count, version in enumerate(sorted(versions), start=1):
        if count > policy.batches_per_step * (version + bound + 1 - step):
            return version
    return None
