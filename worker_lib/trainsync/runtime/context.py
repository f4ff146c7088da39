"""RunContext: a process's hold on its run."""

import contextlib
import os
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final

from trainsync.api.protocol import LoadReport, ResumePoint
from trainsync.api.status import ServerWeights
from trainsync.checkpoint.load.resume import Resume, report_damage, report_load
from trainsync.checkpoint.save import ending
from trainsync.monitor.client.base import MonitorClient
from trainsync.monitor.client.sender import SenderStats
from trainsync.runtime.attempt import spmd
from trainsync.runtime.attempt.claiming import join
from trainsync.runtime.attempt.restarts import (
    DEFAULT_MAX_RESTARTS,
    Errors,
    ResultT,
    renewed,
    run_with_restarts,
)
from trainsync.runtime.attempt.resuming import Resuming
from trainsync.runtime.connection import MonitorConnection
from trainsync.runtime.coordinators import open_coordinator
from trainsync.runtime.cursors import DataCursors
from trainsync.runtime.description import RunDescription
from trainsync.runtime.errors import JoinError
from trainsync.runtime.relays.synchronizer_access import SynchronizerAccess
from trainsync.runtime.reporting import ProgressReports, progress_report
from trainsync.runtime.servers import reported_servers
from trainsync.runtime.settings import RunSettings, read_settings
from trainsync.runtime.stop.closing import Closing, SaveEndings, close_all
from trainsync.runtime.stop.shutdown import DEFAULT_GRACE_SECONDS, GracefulShutdown
from trainsync.runtime.stop.stopping import StopRequests
from trainsync.runtime.trace_resource import trace_resource
from trainsync.storage.hosting import Hosting
from trainsync.tracing import steps as tracing
from trainsync.tracing.steps import LoopSpans, StepTracer

if TYPE_CHECKING:
    import torch

    from trainsync.checkpoint.coordinator import CheckpointCoordinator
    from trainsync.checkpoint.save.part import WhenFull
    from trainsync.data.cursor import DataCursor
    from trainsync.data.places import BatchCursor
    from trainsync.weights.explorer.client import ExplorerClient
    from trainsync.weights.pacing.loops import ExplorerPace, TrainerPace

_CLOSE_SECONDS: Final = 15.0
_LEAST_SECONDS: Final = 1.0  # for closing, however long saves took


class RunContext(RunDescription):
    """The run's attempt, as one process takes part in it. Make it with `from_env`.

    It may be pickled: a Ray driver hands it to its actors, which then speak for the same attempt
    and incarnation. Connections and threads are made when first used, and are not pickled.
    """

    # It inherits from `RunDescription`, whose names are all public here: holding one would repeat
    # every signature and docstring.

    def __init__(
        self, settings: RunSettings, claimed_here: bool = False, hosting: Hosting | None = None
    ) -> None:
        """Use `from_env`. ``settings`` must have an attempt and an incarnation."""
        super().__init__(settings)
        self._claimed_here = claimed_here
        self._connection = MonitorConnection(settings, hosting=claimed_here)
        self._progress = ProgressReports()
        self._pace: TrainerPace | None = None
        self._stops = StopRequests(settings, lambda: self.monitor)
        self._synchronizer = SynchronizerAccess(self.ray_namespace, claimed_here=claimed_here)
        self._endings = SaveEndings()
        self._resuming = Resuming(
            settings,
            lambda: self.monitor,
            report_damage=self._report_damage,
            report_load=self._report_load,
            opened=lambda: self._loop.begin(),
        )
        self._cursors = DataCursors(self.resume_here)
        self._hosting = hosting
        self._loop = LoopSpans(StepTracer(self._incarnation))
        tracing.start(trace_resource(settings))

    @classmethod
    def from_env(
        cls, directory: str | Path | None = None, *, environ: Mapping[str, str] | None = None
    ) -> "RunContext":
        """Join the run that the environment describes, claiming its attempt.

        - ``TRAINSYNC_INCARNATION`` is set (see `env`): join the attempt that was claimed.
        - Several ranks side by side (``WORLD_SIZE`` > 1): call it on every rank after
          ``init_process_group``; rank 0 claims for all.
        - No ``TRAINSYNC_MONITOR_URL``: a local run in ``TRAINSYNC_CHECKPOINT_DIR``, else in
          ``directory``, else in ``./trainsync-run``; its attempt is one after the last claimed.
          Either may be the URL of a store, ``s3://bucket/prefix``: then no volume is needed, and
          credentials are the environment's.
          On Kubernetes the TrainingRun names the directory, and ``directory`` is not used.

        Raises:
            SettingsError: the environment is incomplete or cannot be read.
            ClaimRefusedError: the attempt is another process's, or a process that lives hosts this
                local run; exit with an error.
            JoinError: the other ranks were told that rank 0 could not claim.
            MonitorError: the monitor cannot be reached, or refuses.
        """
        environ = os.environ if environ is None else environ
        return join(cls, read_settings(environ, directory), environ)

    @property
    def monitor(self) -> MonitorClient:
        """This process's client of the monitor."""
        return self._connection.client(on_open=lambda: ending.keep(self))

    def report(
        self,
        step: int,
        total: int | None = None,
        metrics: Mapping[str, float] | None = None,
        links: Mapping[str, str] | None = None,
    ) -> None:
        """Tell the monitor where training is; returns at once.

        A background thread sends the newest report. One that cannot be sent is logged and counted
        (see `reports`), and training goes on; while the monitor is away the newest is tried again.

        Args:
            step: the last completed global step.
            total: steps that the run will have.
            metrics: at most 64 numbers; of one that becomes NaN or infinite a line is logged.
            links: pages about the run elsewhere, by name, such as ``{"W&B": wandb.run.url}``; told
                once, the process's later reports repeat them. The run's status and page show them.

        Raises:
            FencedError: an earlier report was refused because a newer attempt runs: exit.
            ValueError: the report itself is wrong: a step after ``total``, say.
        """
        known = self._progress.links | dict(links or {})
        seconds = None if self._pace is None else self._pace.seconds
        report = progress_report(step, total, metrics, known, seconds)
        self._progress.links = known
        self._progress.send(report, self.monitor)
        self._loop.reported(step)

    def span(
        self, name: str, step: int, **attributes: str | bool | int | float
    ) -> AbstractContextManager[None]:
        """Around a part of ``step``, in any process of the attempt: a span of the step's trace.

        Such as ``with ctx.span("rl.reward", step):``. Does nothing unless
        ``OTEL_EXPORTER_OTLP_ENDPOINT`` is set. The step's own span ends at `report`, and began at
        the report before.
        """
        return self._loop.tracer.span(step, name, attributes)

    @property
    def reports(self) -> SenderStats:
        """Counts how the progress reports of this process fared."""
        return self._progress.stats

    def should_checkpoint(self, step: int, last: int | None = None) -> bool:
        """Whether to save after ``step``: every ``checkpoint.interval``, after the ``last``, and
        once when the run is suspended or preempted: its pods wait for that save.

        Where torch.distributed has several ranks, call it on every rank, at the same steps: rank 0
        hears of the request and all answer alike. A driver of Ray actors calls it alone.

        Raises:
            JoinError: rank 0 did not call it for this step within five minutes.
        """
        return self._stops.saves(step, due=super().should_checkpoint(step, last))

    def answer_stop(self, step: int) -> bool:
        """Say that ``step`` is saved, if a save is asked for: whether one was.

        For loops of others, which do not call `should_checkpoint`; asks the monitor now. To be
        called on one rank.
        """
        return self._stops.answer(step)

    def wait_if_stopping(self, unless: Callable[[], bool] = lambda: False) -> None:
        """To be called after a save: does not return while the run gives up its pods.

        Steps trained after the save would be lost. Returns at once when nothing is asked for; else
        when the request is withdrawn, or its deadline is long over. Mostly the process ends here.
        On other ranks than the one that heard of the request it returns at once: they wait for
        that rank in their next collective.

        Args:
            unless: returns also when this is true, such as ``lambda: shutdown.requested``.
        """
        self._stops.wait(unless)

    def resume(self) -> Resume | None:
        """The newest committed checkpoint, its manifest and file sizes verified.

        With ``checkpoint.verify: digest`` its bytes, too: that takes as long as to read them, at
        most an hour. One whose bytes have changed is set aside for the one before. None when the
        run has committed nothing: start at step 0.

        Where torch.distributed has several ranks, rank 0 asks and all that call it get the same.
        Call it on every rank, or on rank 0 alone.

        Raises:
            NoValidCheckpointError: there were commits and none is valid any more.
            VerifyingError: an hour was not enough.
            CorruptCheckpointError: the volume does not hold what the monitor named.
            JoinError: rank 0 could not ask, or said nothing.
        """
        return self._resuming.together()

    def resume_here(self) -> Resume | None:
        """As `resume`, asked by this process alone, and once: other ranks need not call it."""
        return self._resuming.alone()

    def with_restarts(
        self,
        train: "Callable[[Resume | None], ResultT]",
        *,
        restart_on: Errors,
        max_restarts: int = DEFAULT_MAX_RESTARTS,
    ) -> ResultT:
        """Call ``train`` with the checkpoint to go on from, again after each error that says that
        trainers' processes died: a restart in place, in the same attempt and job::

            def train(resume):
                with make_trainers(ctx, resume) as trainers:  # ends what is left of them
                    ...

            ctx.with_restarts(train, restart_on=TrainerLostError)

        Explorers and their Synchronizer stay, and go on meanwhile. The first restart is at once,
        those that follow after 1, 2, 4, ... seconds, 16 at most.

        Args:
            restart_on: an exception, or several, of ``train``.
            max_restarts: of this attempt; the error after that is raised, and the job fails. 0
                restarts nothing.

        Returns:
            What ``train`` returns.

        Raises:
            What ``train``, `resume` and `restart_in_place` raise.
        """
        return run_with_restarts(self, train, restart_on, max_restarts)

    def restart_in_place(self, reason: str) -> None:
        """Go on in this attempt with trainers' processes that are made anew; `with_restarts`
        calls it.

        The processes of before are fenced: what they had not committed is aborted, what they still
        ask or write is refused. `resume` then says anew where to go on, this context's `env` and
        pickles are for the new processes, and coordinators, cursors and paces are to be made anew.
        Explorers go on with the versions up to that step, and take later ones anew.

        To be called in the process that claimed the attempt, which is no rank of several.

        Args:
            reason: for people; shown by the run's status and Events.

        Raises:
            JoinError: this is another process; or the attempt was restarted 99 times.
            FencedError: a newer attempt, or another successor, has the run: exit.
            MonitorError: the monitor is not reached within about seven minutes, or is older.
            What `resume` raises.
        """
        self._progress.restart(_LEAST_SECONDS)  # first: what was trained is told
        client = renewed(self.monitor, self._claimed_here, reason, self._settings)
        self._settings = replace(self._settings, incarnation=client.incarnation)
        self._incarnation = client.incarnation
        if self._stops.listener is not None:
            self._stops.listener.close(_LEAST_SECONDS)
        self._connection.renew(self._settings, client)
        self._stops = StopRequests(self._settings, lambda: self.monitor)
        self._loop = LoopSpans(StepTracer(self._incarnation))
        self._pace = None
        self._resuming.restart(self._settings)
        resume = self.resume_here()
        self._synchronizer.restart(self._settings, client, resume)
        self._loop.begin()

    def data_cursor(
        self,
        length: int,
        *,
        epochs: int | None = 1,
        shuffle: bool = True,
        seed: int = 0,
        subdir: str = "actor",
    ) -> "DataCursor":
        """Deals out the items of a dataset, going on from the checkpoint that `resume` names.

        For the one process that holds the cursor, mostly the driver; other ranks need not call it.
        Give the cursor, or its ``state_dict()``, to `CheckpointCoordinator.save`.

        Args:
            length, epochs, shuffle, seed: see `trainsync.DataCursor`.
            subdir: as given to the save.

        Raises:
            DataMismatchError: the checkpoint's cursor is of another dataset, or it has none.
            ValueError: this process's pace keeps batches, whose items the cursor would deal again.
            What `resume` raises.
        """
        return self._cursors.of_items(length, epochs, shuffle, seed, subdir)

    def batch_cursor(
        self,
        length: int,
        batch_size: int,
        *,
        epochs: int | None = 1,
        shuffle: bool = True,
        seed: int = 0,
        subdir: str = "actor",
    ) -> "BatchCursor":
        """As `data_cursor`, for batches that explorers take from a pace: each is trained once, also
        those that are kept over a restart in place.

        Args:
            length, batch_size, epochs, shuffle, seed: see `BatchOrder`.
            subdir: as given to the save.

        Raises:
            DataMismatchError: the checkpoint's cursor is of another dataset, or it has none.
            ValueError: `BatchOrder` refuses.
            What `resume` raises.
        """
        return self._cursors.of_batches(length, batch_size, epochs, shuffle, seed, subdir)

    def _report_load(self, report: LoadReport) -> None:
        if not self._connection.closed:
            report_load(self.monitor, report)

    def _report_damage(self, point: ResumePoint, what: str) -> bool:
        if self._connection.closed:
            return False
        return report_damage(self.monitor, point.step, point.manifest_digest, what)

    def coordinator(
        self,
        rank: int | None = None,
        world_size: int | None = None,
        *,
        when_full: "WhenFull" = "wait",
        overlapped: bool = False,
        component_prefix: str = "",
    ) -> "CheckpointCoordinator":
        """A coordinator for this rank; by default torch.distributed says which, else
        ``TRAINSYNC_RANK`` and ``TRAINSYNC_WORLD_SIZE``, or ``RANK`` and ``WORLD_SIZE``.

        The process that claimed the attempt alone is rank 0 of 1 where nothing says otherwise.
        Any other process, such as a Ray actor, has to say which rank it is: two processes of one
        rank would write each other's files.

        The other arguments are those of `CheckpointCoordinator`.

        Raises:
            JoinError: nothing says which rank this process is.
        """
        if rank is None or world_size is None:
            here, ranks = spmd.rank_and_world_size(os.environ, alone=self._claimed_here)
            rank = here if rank is None else rank
            world_size = ranks if world_size is None else world_size
        made = open_coordinator(
            self._settings,
            self.monitor,
            rank,
            world_size,
            when_full=when_full,
            overlapped=overlapped,
            component_prefix=component_prefix,
        )
        self._endings.add(made)
        return made

    def graceful_shutdown(
        self,
        *coordinators: "CheckpointCoordinator",
        grace_seconds: float = DEFAULT_GRACE_SECONDS,
    ) -> GracefulShutdown:
        """A context around the training loop that ends it in order on SIGTERM::

            with ctx.graceful_shutdown(coordinator) as shutdown:
                for step in range(first, last + 1):
                    if shutdown.requested:
                        break
                    ...

        To be entered in the main thread. What is staged is written, the rest is aborted, and the
        process exits with 143; see `GracefulShutdown`.

        Args:
            coordinators: all that this process saves with.
            grace_seconds: less than the pod's ``terminationGracePeriodSeconds``.
        """
        return GracefulShutdown(coordinators, self.close, grace_seconds=grace_seconds)

    def server_weights(self) -> tuple[ServerWeights, ...]:
        """Each inference server of the run by itself, by name, as its agent reported it last.

        For clients that ask servers one by one, and not behind the addresses of `servers`:
        ``endpoint`` and ``agent`` are URLs, ``tag`` and ``proven`` say which weights the server has
        and whether they are proven, ``ready`` whether it may be asked; ``verdict`` may be of older
        weights. A report is 20 s old at most. None in a local run, whose monitor no agent reports
        to.

        Raises:
            MonitorError: the monitor is not reached, or is older than this library.
        """
        return reported_servers(self.monitor)

    def synchronizer(self) -> Any:
        """Handle of this attempt's Synchronizer (a Ray actor); Ray must be initialised.

        The process that claimed the attempt makes the actor, which ends with it, makes it again if
        it dies, and reports its state to the monitor; others wait for it. Versions start at the
        step resumed from, or at 0. After a restart in place trainers need a new handle: calls by
        the one of before are refused. Explorers go on with theirs. In a Ray cluster without
        trainers, a `RemoteSynchronizer`.

        Raises:
            WeightsUnavailableError: the claiming process has not made it within a minute.
        """
        return self._synchronizer.handle(self._settings, lambda: self.monitor, self.resume_here)

    def explorer(
        self,
        name: str,
        device: "torch.device | None" = None,
        *,
        expected: "Mapping[str, torch.Tensor] | None" = None,
        wants: Callable[[str], bool] | None = None,
        schema_may_change: bool = False,
    ) -> "ExplorerClient":
        """This explorer's side of the Synchronizer; every call is bounded by ``sync.timeout``.

        Args:
            name: that no other explorer of the run has.
            device: where the tensors are of most use. A GPU takes them from the trainer's GPU where
                method and trainer can do that; else they come on the CPU. See `WeightReceiver`.
            expected: what the model takes, say its ``state_dict()`` (also of the device ``meta``):
                weights of other names, shapes or dtypes are refused before any is loaded.
            wants: whether the tensor of this name is to be fetched, with method ``memory``.
            schema_may_change: without ``expected``, too, weights of other names, shapes or dtypes
                than those that were taken first are refused, unless this says that they may come.

        Raises:
            JoinError: ``wants`` with a method that brings every tensor to every explorer.
        """
        from trainsync.runtime.methods import open_explorer

        actor = self.synchronizer()
        return open_explorer(
            self._settings, name, actor, device, expected, wants, schema_may_change
        )

    def pace_trainer(
        self,
        publish: Callable[[int], object],
        *,
        step: int,
        batches_per_step: int = 1,
        meanwhile: Callable[[], object] = lambda: None,
        keep_batches: bool = False,
        cursor: "BatchCursor | None" = None,
    ) -> "TrainerPace":
        """The training loop's side of ``spec.sync.style``; see `trainsync.weights.pacing.loops`.

        The arguments are those of `TrainerPace`.
        """
        from trainsync.weights.pacing.loops import TrainerPace

        self._refuse_pace()
        self._cursors.keep_batches(keep_batches)
        policy = self.sync.policy(batches_per_step)
        self._pace = pace = TrainerPace(
            self.synchronizer(),
            policy,
            publish,
            step,
            batches_per_step,
            meanwhile,
            keep_batches=keep_batches,
            cursor=cursor,
            tracer=self._loop.tracer,
        )
        self._loop.begin()
        return pace

    def pace_explorer(
        self, client: "ExplorerClient", update: Callable[[int], int | None]
    ) -> "ExplorerPace":
        """A rollout loop's side of it; the arguments are those of `ExplorerPace`."""
        from trainsync.weights.pacing.loops import ExplorerPace

        self._refuse_pace()
        return ExplorerPace(client, update, timeout=self.sync.timeout)

    def _refuse_pace(self) -> None:
        if self._settings.is_apart:
            raise JoinError(
                f"cluster {self._settings.cluster} has no trainers, and batches do not leave a Ray "
                "cluster: take versions with ctx.explorer, and bring batches your own way"
            )

    def close(self, timeout: float = _CLOSE_SECONDS) -> None:
        """Let saves be written, send the last report and let go of the monitor; nothing after that.

        In the process that claimed a local run, which hosts its monitor, saves that other ranks
        still write are waited for, too, so that they commit. What is not committed is logged.

        Args:
            timeout: seconds for all of it, the last request to the monitor apart.
        """
        self._connection.check_process()
        deadline = time.monotonic() + timeout
        self._close(deadline, deadline, for_others=True)

    def end(self, deadline: float) -> None:
        """As `close`, at the exit of a process that did not call it: see `ending`."""
        soon = min(deadline, time.monotonic() + _CLOSE_SECONDS)
        self._close(deadline, soon, for_others=not ending.interrupted())

    def _close(self, written_by: float, deadline: float, *, for_others: bool) -> None:
        """`close` by ``deadline``, once saves are written, or ``written_by`` has come."""
        ending.forget(self)
        opened = self._connection.opened if for_others else None
        self._endings.finish(self.run, opened, written_by, deadline)
        # Another deadline than for saves, which may have taken all of theirs.
        deadline = max(deadline, time.monotonic() + _LEAST_SECONDS)
        threads: list[tuple[Closing, str]] = [(self._progress, "the last report was not sent")]
        if self._stops.listener is not None:
            threads.append((self._stops.listener, "requests to save are still asked for"))
        threads += self._synchronizer.endings()
        close_all(self.run, threads, deadline)
        self._connection.close()
        if self._hosting is not None:
            self._hosting.release()
        self._endings.close()

    def __enter__(self) -> "RunContext":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        # An error of the body says more than one of closing.
        with contextlib.suppress(Exception) if kind is not None else contextlib.nullcontext():
            if kind is None or issubclass(kind, Exception):
                self.close()
            else:  # Ctrl-C, or the process is told to end: no other process is waited for
                deadline = time.monotonic() + _CLOSE_SECONDS
                self._close(deadline, deadline, for_others=False)

    def __reduce__(self) -> tuple[type["RunContext"], tuple[RunSettings]]:
        return type(self), (self._settings,)
