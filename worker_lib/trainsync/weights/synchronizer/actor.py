"""The Synchronizer: one async Ray actor through which new weights reach the explorers.

Its event loop does no I/O and touches no tensor: it holds references into Ray's object store and
answers questions about them. `trainsync.weights.synchronizer.state` has the decisions, and
`trainsync.weights.pacing.calls` the pace of training.
"""

# ruff: noqa: ASYNC109 - the callers, with their timeouts, are in other processes

import functools
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import replace
from typing import Any, Concatenate, ParamSpec, TypeVar

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from trainsync.api.protocol import WeightsReport
from trainsync.weights.counts import BroadcastTraffic, TransferKind
from trainsync.weights.errors import NothingPublishedError, WeightsTimeoutError
from trainsync.weights.pacing.calls import PacingCalls
from trainsync.weights.synchronizer.connection import ACTOR_NAME, find_actor
from trainsync.weights.synchronizer.failover_state import RestoredState, StateChanges
from trainsync.weights.synchronizer.followed_state import Contact, FollowedState
from trainsync.weights.synchronizer.report import SynchronizerStatus, snapshot, weights_report
from trainsync.weights.synchronizer.roster import REQUIRE_SYNC, STOPPED, LossReason, Serving
from trainsync.weights.synchronizer.state import LEASE_SECONDS
from trainsync.weights.transports.broadcast.link import TrainerEndpoint
from trainsync.weights.versions import Announcement, HeldPart, PartMeta, Published, VersionMeta

# Each of up to 4,096 explorers has a call waiting here, while it and the trainer's ranks make
# others. Ray lets 1,000 calls in unless it is told.
MAX_CALLS = 20_000

Parameters = ParamSpec("Parameters")
Answer = TypeVar("Answer")


def _of_pacing(
    method: Callable[Concatenate[PacingCalls, Parameters], Coroutine[Any, Any, Answer]],
) -> Callable[Concatenate["Synchronizer", Parameters], Coroutine[Any, Any, Answer]]:
    """The same method of the actor, which has its `PacingCalls` answer."""

    @functools.wraps(method)
    async def call(
        self: "Synchronizer", /, *args: Parameters.args, **kwargs: Parameters.kwargs
    ) -> Answer:
        return await method(self._pacing, *args, **kwargs)

    return call


class Synchronizer:
    """Versions of the weights, and which explorer has which. Use it through its actor handle.

    Args:
        floor: versions must be greater; see `WeightsState`.
        lease_seconds: how long an explorer may be silent before it is given up.
        kept: this actor is followed, and rebuilt when it dies.
        remembered: what an earlier actor held; then ``floor`` is not used.
    """

    def __init__(
        self,
        namespace: str,
        floor: int = -1,
        lease_seconds: float = LEASE_SECONDS,
        kept: bool = False,
        remembered: RestoredState | None = None,
    ) -> None:
        self._followed = FollowedState(namespace, floor, lease_seconds, kept, remembered)
        self._state = self._followed.state
        self._revision = self._followed.revision
        self._pacing = PacingCalls(self._followed)

    # -- making and finding the actor -------------------------------------------------------

    @staticmethod
    def create(namespace: str, floor: int = -1, lease_seconds: float = LEASE_SECONDS) -> Any:
        """The handle of the namespace's Synchronizer, which is made if there is none.

        It takes no CPU, runs on this process's node and ends with the job that made it. It is not
        rebuilt when it dies: see `SynchronizerFailover` for one that lives on.
        """
        actor = ray.remote(Synchronizer).options(**actor_options(namespace), get_if_exists=True)
        return actor.remote(namespace, floor, lease_seconds)

    get_actor = staticmethod(find_actor)

    # -- the trainer's side ---------------------------------------------------------------

    async def set_model_state_dict(
        self,
        refs: Sequence[Any],
        version: int,
        part: PartMeta,
        seconds: float = 0.0,
        again: bool = False,
        restarts: int | None = None,
    ) -> bool:
        """Take one trainer rank's part; True when the version is complete and published.

        A part whose call has returned outlives this actor, if the actor is kept, and if the process
        that keeps it has taken the part over within 2 s; a warning is logged where it has not.

        Args:
            refs: object references to the part's buckets, in a list: Ray would replace a bare
                reference by the object itself.
            seconds: that the upload of the part has taken so far.
            again: the answer to an earlier call was lost: the same part is no error.
            restarts: see `WeightsState.check_trainer`; so do the trainer's other calls.

        Raises:
            StaleVersionError, InconsistentUploadError, SupersededTrainerError.
        """
        self._state.check_trainer(restarts)
        payload, now = tuple(refs), time.monotonic()
        complete = self._state.upload(version, part, payload, now, again=again, seconds=seconds)
        held = HeldPart(version, part, payload)
        await self._followed.keep(f"version {version}, rank {part.rank}", held)
        return complete

    async def rewind(self, number: int, step: int) -> bool:
        """The trainers were restarted in place and go on from ``step``; see `WeightsState.rewind`.

        Explorers go on with what they serve, unless that is newer than ``step``. False when an
        actor that replaced this one might not know of it yet: call again.
        """
        if self._followed.rewind(number, step):
            await self._pacing.rewind()
        return await self._followed.keep(f"restart {number} of the trainers")

    async def make_room(self, version: int, restarts: int | None = None) -> bool:
        """Let go of the published version's bytes, since ``version`` is about to be uploaded.

        False while an explorer still needs them: see `WeightsState.make_room`.

        Raises:
            SupersededTrainerError.
        """
        self._state.check_trainer(restarts)
        if made := self._state.make_room(version):
            await self._followed.keep(f"room for version {version}")
        return made

    async def announce(self, announcement: Announcement, restarts: int | None = None) -> None:
        """Publish a version whose bytes do not travel through Ray's object store.

        An announcement that was answered outlives this actor, as a part does.

        Args:
            restarts: see `WeightsState.check_trainer`.

        Raises:
            StaleVersionError, SupersededTrainerError, InconsistentUploadError.
        """
        self._state.check_trainer(restarts)
        self._state.announce(announcement, time.monotonic())
        await self._followed.keep(f"version {announcement.published.meta.version}")

    async def note_missed(
        self,
        version: int,
        lost: Mapping[str, str],
        refused: Mapping[str, str],
        sent: BroadcastTraffic | None = None,
        restarts: int | None = None,
    ) -> None:
        """Note the fate of a version that was broadcast and reached no explorer.

        It is not announced; explorers lag behind it in the status.

        Args:
            lost: explorers that are given up, and why; they may rejoin.
            refused: explorers that could not take it, and why; they live.
            sent: what travelled nevertheless.

        Raises:
            SupersededTrainerError.
        """
        self._state.check_trainer(restarts)
        self._state.note_missed(version, time.monotonic(), lost, refused, sent)
        await self._revision.advance()

    async def setup_weight_sync_group(
        self, endpoint: TrainerEndpoint, restarts: int | None = None
    ) -> None:
        """The trainer broadcasts from ``endpoint``, to explorers that know its token.

        Args:
            restarts: see `WeightsState.check_trainer`.

        Raises:
            SupersededTrainerError: a newer attempt does so already, or restarted trainers do.
        """
        self._state.check_trainer(restarts)
        self._state.set_group(endpoint)
        await self._followed.keep("the group of the broadcast")

    async def get_weight_sync_group(self) -> TrainerEndpoint | None:
        """Where the trainer broadcasts from; None before it has said so."""
        return self._state.group

    async def ready_to_nccl_sync(
        self,
        module: str,
        version: int,
        timeout: float,
        explorer: str | None = None,
        session: str = "",
        restarts: int | None = None,
    ) -> tuple[str, ...]:
        """Say that one side is ready for a broadcast.

        Args:
            module: ``explorer``: it is connected to the group; the answer comes at once.
                ``trainer``: wait until every explorer that takes part and serves something older
                than ``version`` is ready. Those that are not after ``timeout`` seconds are given
                up, and not waited for the next time; they may rejoin.
            version: that the explorer serves, or that the trainer is about to send.

        Returns:
            The explorers that are ready and serve something older than ``version``.

        Raises:
            ValueError: ``module`` is neither.
            SupersededTrainerError: to a trainer.
            What `WeightsState.renew` raises, to an explorer.
        """
        if module == "explorer":
            if self._state.renew(explorer or "", session, time.monotonic(), ready=True):
                await self._revision.advance()
        elif module == "trainer":
            self._state.check_trainer(restarts)
            roster = self._state.roster
            await self._revision.wait_for(lambda: not roster.unready(version), timeout)
            self._state.check_trainer(restarts)
            for name in roster.unready(version):
                cause = f"it was not ready for version {version} within {timeout:g} s"
                self._state.give_up(name, cause, time.monotonic(), LossReason.NOT_READY)
            await self._revision.advance()
        else:
            raise ValueError(f"module must be 'trainer' or 'explorer', got {module!r}")
        return tuple(sorted(self._state.roster.ready(version)))

    async def set_trainer_status(self, status: str, restarts: int | None = None) -> None:
        """``running``, ``require_sync`` or ``stopped``; the last ends every wait.

        Raises:
            SupersededTrainerError.
        """
        self._state.check_trainer(restarts)
        self._state.set_trainer_status(status)
        await self._revision.advance()

    # -- the explorers' side ----------------------------------------------------------------

    async def register_explorer(
        self, explorer: str, session: str, rejoin: bool = False, serving: Serving | None = None
    ) -> int:
        """An explorer joins; returns the newest version.

        Args:
            session: random name of the process. A new one replaces the one before; it is lost, too,
                when it makes no call for the time of a lease.
            rejoin: the process was here before, and goes on with what it is ``serving``.

        Raises:
            ExplorerReplacedError: it rejoins, but another process lives under this id.
        """
        now = time.monotonic()
        if rejoin:
            self._state.rejoin(explorer, session, serving, now)
        else:
            self._state.register(explorer, session, now)
        self._followed.watch_leases()
        await self._revision.advance()
        return self._state.version

    async def renew(
        self, explorer: str, session: str, serving: Serving | None = None, ready: bool = False
    ) -> None:
        """Renew an explorer's lease; it serves this, and is ``ready`` for a broadcast or not.

        Raises what `WeightsState.renew` raises.
        """
        if self._state.renew(explorer, session, time.monotonic(), serving, ready=ready):
            await self._revision.advance()

    async def leave(self, explorer: str, session: str | None = None) -> None:
        """An explorer goes, or is taken off the list by another process."""
        self._state.leave(explorer, time.monotonic(), session)
        await self._revision.advance()

    async def quarantine(self, explorer: str, cause: str) -> None:
        """Give an explorer up, say because it did not take a version in time.

        Its next call raises that; it may rejoin, and is waited for again when it serves the
        published version. Raises `UnknownExplorerError`.
        """
        self._state.give_up(explorer, cause, time.monotonic())
        await self._revision.advance()

    async def set_explorer_status(self, explorer: str, session: str, status: str) -> None:
        """``running``, ``require_sync`` or ``stopped``."""
        self._state.set_explorer_status(explorer, session, status, time.monotonic())
        await self._revision.advance()

    async def wait_new_model_state_dict(
        self,
        current_version: int,
        timeout: float,
        explorer: str | None = None,
        session: str = "",
        restarts: int = 0,
    ) -> int | None:
        """Wait until a version newer than ``current_version`` is published, and return it.

        After a restart in place, a version of a lower number is newer than one from before.

        Returns None when the trainer has stopped, so that none will come. A named explorer counts
        as ``require_sync`` until it acknowledges.

        Args:
            restarts: `Published.restarts` of ``current_version``.

        Raises:
            WeightsTimeoutError: none came within ``timeout`` seconds.
        """
        if explorer is not None:
            await self.set_explorer_status(explorer, session, REQUIRE_SYNC)

        state = self._state

        def has_newer() -> bool:
            return state.versions.has_newer(current_version, restarts)

        if not await self._revision.wait_for(
            lambda: has_newer() or state.trainer_status == STOPPED, timeout
        ):
            raise WeightsTimeoutError(
                f"no version newer than {current_version} within {timeout:g} s; the newest is "
                f"{state.version}"
            )
        return state.version if has_newer() else None

    async def get_model_state_dict(self) -> Published:
        """The published version: its description and the references to its parts.

        Raises:
            NothingPublishedError.
        """
        if self._state.versions.withdrawn:
            raise NothingPublishedError(
                f"version {self._state.version} has made room for the next one; wait for that"
            )
        return self._state.versions.current()

    async def get_state_dict_meta(self) -> VersionMeta:
        """The published version's description alone. Raises `NothingPublishedError`."""
        return self._state.versions.current().meta

    async def acknowledge(
        self,
        explorer: str,
        session: str,
        version: int,
        digest: str,
        taken: Mapping[TransferKind, int] | None = None,
        restarts: int = 0,
    ) -> None:
        """The explorer serves ``version``, whose digest it checked; see `WeightsState`."""
        now = time.monotonic()
        try:
            self._state.acknowledge(explorer, session, version, digest, now, taken, restarts)
        finally:
            await self._revision.advance()

    async def refuse(
        self, explorer: str, session: str, version: int, cause: str, retries: bool = False
    ) -> None:
        """The explorer could not take ``version``, and why. See `WeightsState.refuse`."""
        now = time.monotonic()
        self._state.refuse(explorer, session, version, cause, now, retries=retries)
        await self._revision.advance()

    # -- the pace of training ---------------------------------------------------------------

    next_trainer_task = _of_pacing(PacingCalls.next_trainer_task)
    begin_step = _of_pacing(PacingCalls.begin_step)
    end_step = _of_pacing(PacingCalls.end_step)
    next_in_flight = _of_pacing(PacingCalls.next_in_flight)
    note_aborted = _of_pacing(PacingCalls.note_aborted)
    finish_pace = _of_pacing(PacingCalls.finish_pace)
    join_pace = _of_pacing(PacingCalls.join_pace)
    next_explorer_move = _of_pacing(PacingCalls.next_explorer_move)
    deliver_batch = _of_pacing(PacingCalls.deliver_batch)

    # -- for all, and for the process that made the actor ------------------------------------

    async def get_contact(self) -> Contact:
        """How this actor is found again."""
        return replace(self._followed.contact, restarts=self._state.rewound[0])

    async def next_report(self, seen: int, timeout: float) -> tuple[int, WeightsReport] | None:
        """The report for the monitor, once it is newer than ``seen`` (0 at first).

        Returns its number and the report; None after ``timeout`` seconds, and until a version was
        published, or reached no explorer.
        """
        state, revision = self._state, self._revision
        if not await revision.wait_for(
            lambda: revision.number > seen and state.versions.offered >= 0, timeout
        ):
            return None
        return revision.number, weights_report(state, self._pacing.rollouts())

    async def follow(self, seen: int, timeout: float) -> StateChanges | None:
        """The changes after revision ``seen`` (0 at first), for the process that keeps this actor.

        The call also confirms that everything up to ``seen`` is kept. None after ``timeout`` s.
        """
        return await self._followed.follow(seen, timeout)

    async def get_status(self) -> SynchronizerStatus:
        """The version of each explorer, and how the last synchronisation went."""
        return snapshot(self._state)

    async def wait_acknowledged(self, version: int, timeout: float) -> bool:
        """Wait until every explorer that takes part serves ``version`` or a newer one.

        Those that stopped, were lost, or came back and have not caught up do not take part. False
        after ``timeout`` seconds.
        """
        roster = self._state.roster
        return await self._revision.wait_for(lambda: not roster.behind(version), timeout)


def actor_options(namespace: str) -> dict[str, Any]:
    """Ray's options of the namespace's Synchronizer, for a process that makes it.

    The actor runs on the node of that process and nowhere else: a host of explorers that is lost
    takes no trainer's calls with it, and the node of a process that lives is there.
    """
    node = ray.get_runtime_context().get_node_id()
    return {
        "name": ACTOR_NAME,
        "namespace": namespace,
        "num_cpus": 0,
        "max_concurrency": MAX_CALLS,
        "scheduling_strategy": NodeAffinitySchedulingStrategy(node, soft=False),
    }
