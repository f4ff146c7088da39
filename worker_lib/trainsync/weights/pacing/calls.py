"""The Synchronizer's calls for the pace of training; `scheduler` and `policy` decide."""

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from trainsync.api.protocol import RolloutSeconds
from trainsync.weights.errors import WeightsTimeoutError
from trainsync.weights.pacing.catch_up import CatchUps
from trainsync.weights.pacing.messages import Batch, TrainerPlan, Turn
from trainsync.weights.pacing.policy import ExplorerMove
from trainsync.weights.pacing.rollout_clock import RolloutClock
from trainsync.weights.pacing.scheduler import PaceScheduler
from trainsync.weights.synchronizer.followed_state import FollowedState
from trainsync.weights.synchronizer.roster import STOPPED, LossReason

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class ExplorerOrder:
    """An explorer's next move; ``turn`` is set when that is to make a batch.

    Attributes:
        published: the newest version that can be fetched; -1 before the first.
        serves: the version that the explorer is known to serve.
        restarts: of the trainers, so far: versions that were taken before may be no more.
    """

    move: ExplorerMove
    turn: Turn | None = None
    published: int = -1
    serves: int = -1
    restarts: int = 0


@dataclass(frozen=True)
class TrainerTask:
    """The trainer's next task: publish the last complete step, or train on ``batches``."""

    publish: bool = False
    batches: tuple[Batch, ...] = ()


class PacingCalls:
    """The calls that `trainsync.weights.pacing.loops` makes, through the Synchronizer's actor.

    Each may be repeated, also on a new actor.

    Args:
        followed: the Synchronizer's state.
    """

    def __init__(self, followed: FollowedState) -> None:
        self._followed = followed
        self._state = followed.state
        self._revision = followed.revision
        self._scheduler = PaceScheduler(self._state.versions.aborted)
        self._catch_ups = CatchUps()
        self._clock = RolloutClock()
        self._scheduler.rewind(*self._state.rewound)

    async def rewind(self) -> None:
        """The state was rewound: so is the schedule."""
        number, step = self._state.rewound
        for version in self._scheduler.in_flight(self._published_version()):
            if version < step:  # its save went with the trainers
                self._state.versions.note_aborted(version, f"restart {number} of the trainers")
        self._scheduler.rewind(number, step)
        self._clock.go_on()
        self._see(time.monotonic())
        await self._revision.advance()

    def rollouts(self) -> RolloutSeconds | None:
        """What explorers did so far, for the report."""
        self._see(time.monotonic())
        return self._clock.report()

    async def next_trainer_task(
        self,
        plan: TrainerPlan,
        step: int,
        sent: int | None,
        timeout: float,  # noqa: ASYNC109 - the caller is in another process
        lost: Sequence[tuple[str, int]] = (),
        restarts: int | None = None,
    ) -> TrainerTask | None:
        """The trainer's task after ``step``, which is complete; None: ask again.

        Explorers that hold it up for the policy's timeout are given up.

        Args:
            sent: the last version that it published, and that may be on its way.
            lost: keys of batches that it was given, and whose payload is lost.
            restarts: see `WeightsState.check_trainer`; so do the trainer's other calls.

        Raises:
            SupersededTrainerError.
            WeightsTimeoutError: there is nothing to train on, and no explorer left to wait for.
            WeightsUnavailableError: the first version was aborted, or too many in a row.
        """
        scheduler, explorers = self._scheduler, self._state.explorers
        self._state.check_trainer(restarts)
        scheduler.note_trainer(plan, step, sent)
        scheduler.discard(lost)
        await self._revision.wake()
        deadline = time.monotonic() + timeout
        while True:
            self._state.check_trainer(restarts)  # again after each wait
            now, seen = time.monotonic(), self._revision.wakes
            order = scheduler.order(explorers, self._published_version(), now)
            self._see(now)
            for name in sorted(order.give_up):
                cause = f"the trainer waited {plan.policy.timeout:g} s for it"
                logger.warning("explorer %s is given up: %s", name, cause)
                self._state.give_up(name, cause, now, LossReason.NOT_READY)
            if order.give_up:
                await self._revision.advance()
            elif order.publish or order.batches:
                return TrainerTask(order.publish, order.batches)
            elif self._catch_ups.due(self._state, step, sent):
                return TrainerTask(publish=True)
            elif now >= deadline:
                return None
            else:
                await self._next_change(seen, min(order.seconds, deadline - now))

    async def begin_step(
        self, step: int, keys: Sequence[tuple[str, int]], restarts: int | None = None
    ) -> None:
        """The trainer has these batches, and trains on them. Raises `SupersededTrainerError`."""
        self._state.check_trainer(restarts)
        self._clock.begun(keys)
        self._scheduler.begin_step(step, keys)
        await self._revision.wake()

    async def end_step(self, step: int, restarts: int | None = None) -> None:
        """Training step ``step`` is complete. Raises `SupersededTrainerError`."""
        self._state.check_trainer(restarts)
        self._scheduler.trained(step)
        await self._revision.wake()

    async def next_in_flight(
        self,
        settled: int,
        timeout: float,  # noqa: ASYNC109 - the caller is in another process
    ) -> int | None:
        """The oldest version that the trainer sent and that is neither published nor aborted.

        Args:
            settled: versions up to this one do not count; -1 for none.

        Returns None after ``timeout`` seconds without such a version.
        """

        def found() -> list[int]:
            return [v for v in self._scheduler.in_flight(self._published_version()) if v > settled]

        await self._revision.wait_for(lambda: bool(found()), timeout)
        return min(found(), default=None)

    async def note_aborted(self, version: int, cause: str, restarts: int | None = None) -> None:
        """The save that carries ``version`` was aborted: it is not waited for any more.

        Explorers lag behind it in the status. The note outlives this actor as an announcement
        does. A second note, or one of a version that is published, is no error.

        Raises:
            SupersededTrainerError.
        """
        self._state.check_trainer(restarts)
        if self._state.versions.note_aborted(version, cause):
            logger.warning("no explorer waits for version %d any more: %s", version, cause)
            await self._followed.keep(f"the abort of version {version}")

    async def finish_pace(
        self,
        plan: TrainerPlan,
        step: int,
        timeout: float,  # noqa: ASYNC109 - the caller is in another process
        restarts: int | None = None,
    ) -> tuple[bool, list[str]]:
        """End the batches, and wait until every explorer that takes part serves version ``step``.

        If that version is aborted, the last published one counts.

        Returns:
            whether they do within ``timeout`` seconds, and the explorers that do not serve version
                ``step``, those that are lost with them.

        Raises:
            SupersededTrainerError.
        """
        self._state.check_trainer(restarts)
        self._scheduler.note_trainer(plan, step, step, finishing=True)
        self._clock.end()
        await self._revision.wake()
        state = self._state

        def taken() -> bool:
            last = state.version if step in state.versions.aborted else step
            return not state.roster.behind(last)

        all_taken = await self._revision.wait_for(taken, timeout)
        self._state.check_trainer(restarts)
        behind = (name for name, known in state.explorers.items() if known.version < step)
        return all_taken, sorted(behind)

    async def join_pace(self, explorer: str, session: str) -> None:
        """An explorer takes turns from now on; training does not begin a step without it.

        Raises what `Roster.renew_lease` raises.
        """
        self._state.roster.renew_lease(explorer, session, time.monotonic())
        self._scheduler.join(explorer, session, self._state.explorers)
        await self._revision.advance()

    async def next_explorer_move(
        self,
        explorer: str,
        session: str,
        timeout: float,  # noqa: ASYNC109 - the caller is in another process
        again: bool = False,
    ) -> ExplorerOrder:
        """The explorer's next move; after ``timeout`` seconds it may be to wait, and ask again.

        Args:
            again: it tries the version that it could not take before once more.

        Raises what `Roster.renew_lease` raises.
        """
        deadline = time.monotonic() + timeout
        known = self._state.roster.renew_lease(explorer, session, time.monotonic())
        known.refused = -1 if again else known.refused
        said: str | None = None
        while True:
            now, seen = time.monotonic(), self._revision.wakes
            self._state.roster.check(explorer, session)
            move, turn = self._scheduler.turn(
                explorer,
                session,
                self._state.explorers,
                self._published_version(),
                stopped=self._state.trainer_status == STOPPED,
            )
            self._see(now)
            if turn is not None:
                self._clock.turned(explorer, now)
            if move != ExplorerMove.WAIT or now >= deadline:
                await self._revision.advance()
                restarts = self._state.rewound[0]
                return ExplorerOrder(move, turn, self._state.version, known.version, restarts)
            # The trainer may wait until an explorer asks for a version.
            status = self._state.explorers[explorer].status
            if said != status:
                said = status
                await self._revision.advance()
            else:
                await self._next_change(seen, deadline - now)

    async def deliver_batch(
        self,
        explorer: str,
        session: str,
        turn: Turn,
        refs: Sequence[Any],
        timeout: float,  # noqa: ASYNC109 - the caller is in another process
    ) -> bool:
        """Queue a batch; False when training has no use for it any more.

        Args:
            refs: one reference to it, in a list: Ray would replace a bare one by the object itself.
            timeout: seconds to wait for the trainer's first question.

        Raises:
            WeightsTimeoutError: it did not come in time.
            What `Roster.renew_lease` raises.
        """
        (ref,) = refs
        if not await self._revision.wait_for(lambda: self._scheduler.open, timeout):
            raise WeightsTimeoutError(f"no trainer asked for batches within {timeout:g} s")
        now = time.monotonic()
        self._state.roster.renew_lease(explorer, session, now)
        taken = self._scheduler.deliver(
            explorer, session, turn, ref, self._state.explorers, self._published_version(), now
        )
        self._clock.delivered((explorer, turn.number), now, taken=taken)
        self._see(now)
        await self._revision.wake()
        return taken

    def _see(self, now: float) -> None:
        scheduler = self._scheduler
        self._clock.see(scheduler.explorers, [batch.key for batch in scheduler.queue], now)

    async def _next_change(self, seen: int, seconds: float) -> None:
        await self._revision.wait_for(lambda: self._revision.wakes != seen, seconds)

    def _published_version(self) -> int | None:
        return None if self._state.versions.published is None else self._state.version
