"""The pace of training, as a training loop and a rollout loop use it.

The loops are the same for every style of ``spec.sync``. The trainer's, in the process that
leads it::

    pace = ctx.pace_trainer(publish, step=start, batches_per_step=4)
    for step in range(start + 1, last + 1):
        batches = pace.next_batches()
        ...  # train on [batch.payload for batch in batches]
        pace.trained(step)
    pace.finish()

and that of each explorer::

    pace = ctx.pace_explorer(client, lambda version: client.update(engine, version))
    for turn in pace:
        pace.deliver(turn, make_batch(turn.number))

New weights are published by ``publish`` and taken by ``update``, both of which are called when the
style says so. Batches go to the trainer through Ray's object store; a bounded number is in store.
"""

import errno
import logging
import math
import os
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Any

import ray
import torch

from trainsync.data.places import BatchCursor
from trainsync.tracing.steps import StepTracer
from trainsync.weights.errors import (
    DigestMismatchError,
    ExplorerLostError,
    ExplorerReplacedError,
    InconsistentUploadError,
    SchemaMismatchError,
    UnknownExplorerError,
    WeightsError,
    WeightsUnavailableError,
)
from trainsync.weights.explorer.client import ExplorerClient
from trainsync.weights.pacing.calls import ExplorerOrder, TrainerTask
from trainsync.weights.pacing.messages import Batch, TrainerPlan, Turn
from trainsync.weights.pacing.policy import ExplorerMove, SyncPolicy
from trainsync.weights.pacing.rollout_trace import RolloutTimes, TracedPayload, record_rollout
from trainsync.weights.synchronizer.connection import SynchronizerConnection
from trainsync.weights.synchronizer.roster import STOPPED

logger = logging.getLogger(__name__)

# Of one question; the answer comes as soon as there is one.
_POLL_SECONDS = 5.0
_ANSWER_SECONDS = 60.0
_MAX_LOSSES = 20  # rounds in a row in which a batch was lost
_RETRY_SECONDS = 5.0  # until a version that could not be taken is tried again
# The same version would be refused again.
_REFUSALS = (SchemaMismatchError, DigestMismatchError, InconsistentUploadError)


class TrainerPace:
    """The training loop's side: publishes weights when they are due, and returns batches.

    Args:
        synchronizer: actor handle, from `RunContext.synchronizer`.
        policy: the style; see `trainsync.weights.pacing.policy`.
        publish: publishes the trainers' weights as the version that it is given, which is the
            number of the last complete step. The version may arrive after it has returned.
        step: the last complete step; 0 for a fresh run.
        batches_per_step: how many explorers' batches one step trains on. With style ``fixed``, as
            many as there are explorers.
        meanwhile: called every few seconds while there is nothing to train on; what it raises
            ends the wait. It may look after the processes of explorers and trainers: explorers can
            wait for weights that a trainer took with it when it died.
        keep_batches: after a restart in place, train on the batches that explorers made or were
            making before; else they are thrown away. Where prompts follow from `Turn.number`, those
            are kept if no trained step is lost; with ``cursor``, all but those of weights that are
            no more.
        cursor: says which batches of the data are trained; then `Turn.place` names the batch that
            an explorer is to make, each of which is trained on once. At the end of the data a step
            may have fewer batches.
        tracer: of the attempt, for the traces of its steps; None: nothing is recorded.
    """

    def __init__(
        self,
        synchronizer: Any,
        policy: SyncPolicy,
        publish: Callable[[int], object],
        step: int,
        batches_per_step: int = 1,
        meanwhile: Callable[[], object] = lambda: None,
        *,
        keep_batches: bool = False,
        cursor: BatchCursor | None = None,
        tracer: StepTracer | None = None,
    ) -> None:
        self._tracer = tracer
        self._train_began = time.time()
        self._settings = TrainerPlan(policy, batches_per_step, keep_batches)
        self._cursor = cursor
        self._places: list[int] = []  # of the batches that were returned last
        self._publish = publish
        self._meanwhile = meanwhile
        self._step = step
        self._timeout = policy.timeout
        self._connection = SynchronizerConnection(synchronizer, _ANSWER_SECONDS)
        self._sent: int | None = None
        self._began = time.monotonic()
        self._waited = 0.0

    @property
    def _plan(self) -> TrainerPlan:
        trained = None if self._cursor is None else self._cursor.done
        return replace(self._settings, trained=trained)

    @property
    def seconds(self) -> tuple[float, float]:
        """Since this was made, and how many of these went into waiting and publishing."""
        return time.monotonic() - self._began, self._waited

    def next_batches(self) -> list[Batch]:
        """The batches of the next step; publishes weights meanwhile when the style says so.

        An explorer that holds training up for the policy's timeout is given up; one that comes
        back takes part again.

        Raises:
            WeightsTimeoutError: there was nothing to train on for the policy's timeout.
            WeightsUnavailableError: the Synchronizer does not answer, batches are lost again and
                again, or the first version or four in a row were aborted.
            SupersededTrainerError: the trainers were restarted in place since this was made.
            What ``publish`` and ``meanwhile`` raise.
        """
        began = time.time()
        with self._waiting():
            batches = self._next_batches()
        self._places = [batch.place for batch in batches]
        self._train_began = time.time()
        if self._tracer is not None:
            step = self._step + 1
            self._tracer.record(step, "trainsync.wait", began, self._train_began)
            for batch in batches:
                record_rollout(self._tracer, step, batch)
        return [replace(batch, payload=_bare(batch.payload)) for batch in batches]

    def _next_batches(self) -> list[Batch]:
        lost: list[tuple[str, int]] = []
        losses = 0
        while losses <= _MAX_LOSSES:
            task: TrainerTask | None = self._call(
                "next_trainer_task", self._plan, self._step, self._sent, _POLL_SECONDS, lost
            )
            lost = []
            if task is None:
                self._meanwhile()
                continue
            if task.publish:
                self._publish_now()
                continue
            batches, lost = _load(task.batches, self._timeout)
            if not lost:
                self._call("begin_step", self._step + 1, [batch.key for batch in batches])
                return batches
            losses += 1
        raise WeightsUnavailableError(
            f"step {self._step + 1}: {losses} times in a row a batch was lost before it was read"
        )

    def trained(self, step: int) -> None:
        """Training step ``step`` is complete; it must be the one after the last.

        Raises:
            ValueError: it is not, or the cursor was not told of the step's batches.
            SupersededTrainerError: the trainers were restarted in place since this was made.
            WeightsUnavailableError: the Synchronizer does not answer.
        """
        if step != self._step + 1:
            raise ValueError(f"step {step} does not follow step {self._step}")
        if self._cursor is not None and not all(p in self._cursor.done for p in self._places):
            raise ValueError(
                f"the cursor was not told that step {step} trained on places {self._places}; call "
                "cursor.trained(batch.place for batch in batches) before the step is saved"
            )
        self._step = step
        if self._tracer is not None:
            self._tracer.record(step, "rl.train", self._train_began)
        self._call("end_step", step)

    def finish(self, meanwhile: Callable[[], object] = lambda: None) -> list[str]:
        """Publish the last version, let explorers take it, and tell them that training ended.

        Args:
            meanwhile: called every few seconds while explorers take it; what it raises ends the
                wait, and explorers go on. It may look after the trainers' processes.

        Returns:
            the explorers that did not take it within the policy's timeout, lost ones too.

        Raises:
            What `trained`, ``publish`` and ``meanwhile`` raise.
        """
        with self._waiting():
            if self._sent != self._step:
                self._publish_now()  # else the trainers may be restarted, and explorers go on
            deadline = time.monotonic() + self._timeout
            while True:
                seconds = max(0.0, min(_POLL_SECONDS, deadline - time.monotonic()))
                try:
                    taken, behind = self._finish_within(seconds)
                except BaseException:
                    self._call("set_trainer_status", STOPPED)
                    raise
                if taken or time.monotonic() >= deadline:
                    self._call("set_trainer_status", STOPPED)
                    return behind
                meanwhile()

    def _finish_within(self, seconds: float) -> tuple[bool, list[str]]:
        found: tuple[bool, list[str]] = self._call("finish_pace", self._plan, self._step, seconds)
        return found

    @contextmanager
    def _waiting(self) -> Iterator[None]:
        began = time.monotonic()
        try:
            yield
        finally:
            self._waited += time.monotonic() - began

    def _publish_now(self) -> None:
        self._publish(self._step)
        self._sent = self._step

    def _call(self, method: str, *arguments: Any, timeout: float = _POLL_SECONDS) -> Any:
        return self._connection.call(method, *arguments, timeout=timeout + _ANSWER_SECONDS)


class ExplorerPace:
    """A rollout loop's side: iterate to get turns; new weights are taken between two of them.

    A version that ``update`` cannot take (a `WeightsError`, or no memory) does not end the loop:
    the explorer goes on with what it serves as far as the style lets it, takes the next version,
    and tries the same one again where that may help. The run's status says why. If the engine
    failed half-way, there is no turn before an update has succeeded.

    Args:
        client: of this explorer.
        update: takes a version newer than the one given (-1 at first) and returns it, or None when
            the trainer has stopped, as `ExplorerClient.update`.
        timeout: seconds that `deliver` waits for a trainer that does not ask for batches.
    """

    def __init__(
        self, client: ExplorerClient, update: Callable[[int], int | None], timeout: float = 600.0
    ) -> None:
        self._client = client
        self._update = update
        self._timeout = timeout
        self.version = -1
        self._restarts = 0  # of the trainers
        self._times = RolloutTimes()
        self._retry_at = math.inf  # when a version that could not be taken is tried again
        client.ask("join_pace", timeout=_ANSWER_SECONDS)

    def __iter__(self) -> Iterator[Turn]:
        """One turn after another, until training ends.

        Raises:
            ExplorerReplacedError: another process has this explorer's id.
            WeightsUnavailableError: the Synchronizer does not answer.
            What ``update`` raises for other reasons than the weights.
        """
        while True:
            if self._client.torn:
                # `_retry_at` is not set yet when code outside of this loop left the client torn.
                time.sleep(min(_RETRY_SECONDS, max(0.0, self._retry_at - time.monotonic())))
            order: ExplorerOrder = self._client.ask(
                "next_explorer_move",
                _POLL_SECONDS,
                time.monotonic() >= self._retry_at,
                timeout=_POLL_SECONDS + _ANSWER_SECONDS,
            )
            if order.move == ExplorerMove.STOP:
                return
            if order.restarts > self._restarts:
                self._restarts = order.restarts
                if order.serves < self.version:  # the trainers went on from an older step
                    self.version = order.serves
                    self._client.forget(order.serves)
            if order.move == ExplorerMove.FETCH or self._client.torn:
                if not self._take(order.published):
                    return
            elif order.turn is not None:
                self._times = RolloutTimes()
                yield order.turn

    def _take(self, offered: int) -> bool:
        """Take a newer version, or keep the served one; False when none will come any more."""
        self._retry_at = math.inf
        try:
            version = self._update(self.version)
        except (ExplorerReplacedError, ExplorerLostError, UnknownExplorerError):
            raise
        except (WeightsError, MemoryError, RuntimeError) as error:
            if isinstance(error, RuntimeError) and not _lacks_memory(error):
                raise
            refused = not self._client.torn and isinstance(error, _REFUSALS)
            if not refused:
                self._retry_at = time.monotonic() + _RETRY_SECONDS
            if not self._client.torn:  # the client has reported that itself
                cause = str(error) or type(error).__name__
                self._client.report(offered, cause, retries=not refused)
            return True
        self.version = self.version if version is None else version
        return version is not None

    def span(self, name: str) -> AbstractContextManager[None]:
        """Around a part of the present turn, such as ``rl.reward``: a span of the trace of the step
        that trains on the batch. Does nothing unless ``OTEL_EXPORTER_OTLP_ENDPOINT`` is set."""
        return self._times.span(name)

    def deliver(self, turn: Turn, payload: object) -> bool:
        """Give the trainer the batch of ``turn``; any object that Ray can carry.

        False when training has no use for it any more, say because this explorer was given up.
        """
        taken: bool = self._client.ask(
            "deliver_batch",
            turn,
            [ray.put(self._times.added_to(payload))],
            self._timeout,
            timeout=self._timeout + _ANSWER_SECONDS,
        )
        if not taken:
            logger.warning("batch %d came too late and is not trained on", turn.number)
        return taken


def _bare(payload: Any) -> Any:
    return payload.payload if isinstance(payload, TracedPayload) else payload


def _lacks_memory(error: RuntimeError) -> bool:
    """Whether memory of a device or of the host is exhausted; for the host torch has no class."""
    return isinstance(error, torch.OutOfMemoryError) or os.strerror(errno.ENOMEM) in str(error)


def _load(batches: tuple[Batch, ...], timeout: float) -> tuple[list[Batch], list[tuple[str, int]]]:
    """The batches with their payloads, and the keys of those whose payload is lost."""
    deadline = time.monotonic() + timeout
    loaded: list[Batch] = []
    lost: list[tuple[str, int]] = []
    for batch in batches:
        try:
            payload = ray.get(batch.payload, timeout=max(0.0, deadline - time.monotonic()))
            loaded.append(replace(batch, payload=payload))
        except (ray.exceptions.ObjectLostError, ray.exceptions.GetTimeoutError) as error:
            logger.warning("batch %d of %s is lost: %s", batch.number, batch.explorer, error)
            lost.append(batch.key)
    return loaded, lost
