"""The explorer's side of the Synchronizer: wait for a version, fetch, verify, acknowledge."""

import contextlib
import logging
import threading
import time
import weakref
from dataclasses import replace
from typing import Any, Final

from trainsync.tracing.steps import StepTracer
from trainsync.weights.buckets.layout import TensorMeta
from trainsync.weights.errors import (
    DigestMismatchError,
    InconsistentUploadError,
    NothingPublishedError,
    SchemaMismatchError,
    WeightsError,
    WeightsLateError,
    WeightsReplacedError,
    WeightsTimeoutError,
)
from trainsync.weights.explorer.engine_calls import (
    give,
    refuse_asynchronous,
    refuse_awaitable,
)
from trainsync.weights.synchronizer.connection import ExplorerRegistration, RenewalTimer
from trainsync.weights.transports.base import (
    LoadsWeights,
    Weights,
    WeightSource,
    check_fit,
    meta_of,
)
from trainsync.weights.transports.object_store.fetcher import MemorySource
from trainsync.weights.transports.shared_memory.segment_store import Sweeper
from trainsync.weights.versions import Position, Published

logger = logging.getLogger(__name__)

_LEAVE_SECONDS: Final = 10.0
# How long to wait for bytes before asking the Synchronizer whether the trainer has stopped, and
# how long to wait there for a version that replaces one.
_LOOK_SECONDS: Final = 1.0


class ExplorerClient:
    """One explorer. Every call ends within ``timeout`` seconds, and a few more.

        client = ctx.explorer("explorer-0")
        while (version := client.update(engine, version)) is not None:
            ...

    or, step by step, for anything that takes tensors::

        while (weights := client.wait_and_fetch(served)) is not None:
            model.load_state_dict(weights.state_dict)
            client.acknowledge(weights)
            served = weights.version

    A thread renews the explorer's lease at the Synchronizer until `leave`, or until the client is
    garbage. An explorer that was given up meanwhile, or whose Synchronizer was rebuilt, registers
    again by itself with the version that it serves.

    Args:
        synchronizer: actor handle, from `Synchronizer.get_actor`.
        explorer: an id that no other explorer of the run has. A new process with the same id
            replaces the older one, which gets no weights any more and whose calls then raise
            `ExplorerReplacedError`.
        source: brings the bytes; of Ray's object store when it is not given. `leave` closes it.
        schema_may_change: take versions whose names, shapes or dtypes are not those of the first
            one that was acknowledged; by default they are refused.
        tracer: of the attempt, to record how long each version took; None: nothing is recorded.

    Attributes:
        timeout: seconds of every call that is not given any.
        refused: the newest version that was not what it should be; -1 for none.
        torn: an engine failed while it took a version, and may hold parts of it: nothing may be
            generated before an `update` has succeeded.
    """

    def __init__(
        self,
        synchronizer: Any,
        explorer: str,
        timeout: float = 600.0,
        source: WeightSource | None = None,
        *,
        schema_may_change: bool = False,
        tracer: StepTracer | None = None,
    ) -> None:
        self.timeout = timeout
        self._tracer = tracer
        self._take_began = 0.0
        self.torn = False
        self.refused = -1
        self._refused_restarts = 0
        self._offered_restarts = 0  # of what was fetched last
        self._source = source or MemorySource()
        self._schema_may_change = schema_may_change
        self._schema: list[TensorMeta] | None = None  # of the first version that was taken
        self._fetched: list[TensorMeta] = []
        sweep = Sweeper().sweep  # shared memory that a killed trainer left on this host
        self._registration = ExplorerRegistration(
            synchronizer, explorer, timeout, self._source, sweep
        )
        timer = self._registration.timer
        weakref.finalize(self, _abandon, timer, self._source).atexit = False
        self._source.when_ready(timer.beat)

    def wait(
        self, current_version: int, timeout: float | None = None, *, restarts: int | None = None
    ) -> int | None:
        """The newest version once it is newer than ``current_version``.

        None when the trainer has stopped, so that none will come. When trainers were restarted in
        place, their versions are newer than all from before, also at a lower number.

        Args:
            restarts: `Published.restarts` of ``current_version``; None: of what was acknowledged
                last.

        Raises:
            WeightsTimeoutError: none came within ``timeout`` seconds.
            WeightsUnavailableError: the Synchronizer does not answer.
            SchemaMismatchError: the model does not take a version that the trainer broadcasts;
                once for each.
        """
        limit = self.timeout if timeout is None else timeout
        self._raise_refused(current_version)

        def refused() -> bool:
            return self._refused_before(current_version) is not None

        # The answer has as long again as the wait itself, or a minute: whichever is less.
        known = self._registration.restarts if restarts is None else restarts
        version: int | None = self._registration.call(
            "wait_new_model_state_dict",
            current_version,
            limit,
            self._registration.explorer,
            self._registration.session,
            *([known] if known else []),  # a default of the actor
            timeout=limit + min(60.0, self.timeout),
            give_up=refused if self._source.pushed else None,
        )
        if version is None:
            self._raise_refused(current_version)
        return version

    def _refused_before(self, current_version: int) -> tuple[int, SchemaMismatchError] | None:
        """A newer version that was refused though it is not published, and was not told of yet."""
        refused = self._source.refused
        newest = max(current_version, self.refused)
        return refused if refused is not None and refused[0] > newest else None

    def _raise_refused(self, current_version: int) -> None:
        found = self._refused_before(current_version)
        if found is not None:
            self.refused = found[0]
            raise found[1]

    def fetch(self) -> Weights:
        """The published version, verified. What was fetched before is not valid any more.

        Raises:
            What `WeightSource.fetch` raises; NothingPublishedError; SchemaMismatchError: names,
                shapes or dtypes are not those of the version that was taken first.
        """
        self._take_began = time.time()
        published: Published = self._published()
        return self._fetch(published, self.timeout)

    def wait_and_fetch(self, current_version: int, timeout: float | None = None) -> Weights | None:
        """`wait`, then `fetch`: a version newer than ``current_version``, perhaps the next but one.

        None when the trainer has stopped, so that none will come. A version that is damaged, or
        does not fit, is raised once; the next call waits for a newer one.

        Args:
            timeout: seconds to wait for a version; the client's if it is not given. Both together,
                waiting and fetching, take no longer than the client's, or this if it is longer.

        Raises:
            WeightsTimeoutError: none came within ``timeout`` seconds.
            What `WeightSource.fetch` raises.
        """
        current = self.newest(current_version)
        limit = self.timeout if timeout is None else timeout
        deadline = time.monotonic() + limit
        end = deadline if self._source.pushed else deadline + max(0.0, self.timeout - limit)
        while self.wait(current[1], _left(deadline), restarts=current[0]) is not None:
            # A Synchronizer that died between telling and giving is rebuilt with what was answered
            # for only, and the trainer then sends the newer version again.
            with contextlib.suppress(NothingPublishedError):
                published: Published = self._published()
                if published.position > current:
                    self._take_began = time.time()
                    weights = self._take(published, deadline, end)
                    if weights is not None:
                        return weights
                    current = published.position  # the bytes of this one are gone
        return None

    def newest(self, current_version: int) -> Position:
        """Of a version that is served, and of the one that was refused last: the newer one."""
        served = self._registration.restarts, current_version
        return max(served, (self._refused_restarts, self.refused))

    def update(
        self, engine: LoadsWeights, current_version: int, timeout: float | None = None
    ) -> int | None:
        """Bring ``engine`` to a version newer than ``current_version``, and acknowledge it.

        Returns that version; None when the trainer has stopped, so that none will come. Raises what
        `wait_and_fetch` and the engine raise; then no version is acknowledged.

        Raises:
            TypeError: the engine's methods are coroutines: expected `AsyncExplorerClient.update`.
        """
        refuse_asynchronous(engine)
        weights = self.wait_and_fetch(current_version, timeout)
        if weights is None:
            return None
        try:
            began: object = engine.begin_update(weights.version)  # type: ignore[func-returns-value] # a coroutine is refused
            refuse_awaitable(began, engine)
            give(self._source, engine, weights)
        except BaseException as error:
            self.note_failed(weights.version, error)
            raise
        self.note_loaded(weights)
        return weights.version

    def note_kept(self) -> None:
        """An engine computes with the memory of the version that was fetched last."""
        self._source.keep()

    def note_loaded(self, weights: Weights) -> None:
        """An engine has taken ``weights``: acknowledge them."""
        self.torn = False
        if self._tracer is not None:
            name = self._registration.explorer
            self._tracer.record(
                weights.version,
                "trainsync.take",
                self._take_began,
                attributes={"trainsync.explorer": name},
            )
        self.acknowledge(weights)

    def note_failed(self, version: int, error: BaseException) -> None:
        """An engine raised ``error`` while it took ``version``; see `torn`."""
        self._source.release()
        if isinstance(error, SchemaMismatchError):
            self._refuse(version, error)
            return
        self.torn = True
        if isinstance(error, Exception):  # else this process is about to end, or was interrupted
            cause = f"loading version {version} failed, and the explorer serves nothing: {error}"
            self.report(version, cause, retries=True)

    def _take(self, published: Published, deadline: float, end: float) -> Weights | None:
        """The bytes of ``published``; None if there are none, but perhaps of another version.

        Bytes that are gone are looked for again until ``deadline``: a volume may show a step a
        little later to this host than to the monitor. ``end`` is the deadline of bytes that exist.

        Raises:
            WeightsTimeoutError: they stay away, and no newer version comes; the message says why.
            What `WeightSource.fetch` raises.
        """
        while True:
            gone: WeightsReplacedError | None = None
            left = _left(end)
            # A version that came at the last moment still gets a moment to be fetched.
            seconds = min(_LOOK_SECONDS, left) if self._source.pushed else max(_LOOK_SECONDS, left)
            try:
                return self._fetch(published, seconds)
            except WeightsReplacedError as error:
                gone = error
            except (DigestMismatchError, InconsistentUploadError, SchemaMismatchError) as error:
                self._refuse(published.meta.version, error)
                raise
            except WeightsLateError:
                if _left(end) <= 0 or not self._source.pushed:
                    raise
            seconds = 0.0 if gone is None else min(_LOOK_SECONDS, _left(deadline))
            with contextlib.suppress(WeightsTimeoutError):
                self.wait(published.meta.version, seconds, restarts=published.restarts)
                return None  # there is a newer one, or none will come any more
            if gone is not None and _left(deadline) <= 0:
                raise WeightsTimeoutError(f"{gone}; no newer version came in time") from gone
            # The same version, when a resumed trainer has announced other weights for it.
            with contextlib.suppress(NothingPublishedError):
                published = self._published()

    def _published(self) -> Published:
        published: Published = self._registration.call("get_model_state_dict", timeout=self.timeout)
        return published

    def _fetch(self, published: Published, seconds: float) -> Weights:
        self._offered_restarts = published.restarts
        weights = self._source.fetch(published, seconds)
        if published.restarts:
            weights = replace(weights, restarts=published.restarts)
        self._fetched = [meta_of(*named) for named in weights.state_dict.items()]
        if not self._schema_may_change:
            try:
                check_fit(weights.version, self._schema, self._fetched)
            except SchemaMismatchError as error:
                self._source.release()
                raise SchemaMismatchError(f"{error} (unlike the version taken first)") from None
        return weights

    def _refuse(self, version: int, cause: Exception) -> None:
        """Report why this explorer keeps its present version; the caller raises the cause."""
        self.refused, self._refused_restarts = version, self._offered_restarts
        self.report(version, str(cause))

    def report(self, version: int, cause: str, *, retries: bool = False) -> None:
        """Say why this explorer does not serve ``version``, for the run's status and the log.

        Args:
            retries: it will try to take the same version again, and may be waited for.
        """
        explorer = self._registration.explorer
        logger.error("explorer %s does not take version %d: %s", explorer, version, cause)
        try:
            self.ask("refuse", version, cause, retries)
        except WeightsError as error:
            logger.warning("the refusal of version %d could not be reported: %s", version, error)

    def acknowledge(self, weights: Weights) -> None:
        """Say that this explorer now serves ``weights``, which are not valid any more.

        Call it after loading them.
        """
        self._source.release()
        self._registration.acknowledge(weights, self.timeout)
        self._source.copied(weights)
        self._schema = self._schema or self._fetched or None

    def leave(self) -> None:
        """Say that this explorer goes."""
        try:
            self._registration.leave(min(self.timeout, _LEAVE_SECONDS))
        finally:
            self._source.close()

    def forget(self, served: int) -> None:
        """Versions newer than ``served`` are no more: what comes in their place may be taken."""
        self.refused = min(self.refused, served)

    def ask(self, method: str, *arguments: Any, timeout: float | None = None) -> Any:
        """A call of the Synchronizer that begins with an explorer and its session.

        Raises what `SynchronizerConnection.call` raises.
        """
        limit = self.timeout if timeout is None else timeout
        return self._registration.ask(method, *arguments, timeout=limit)


def _abandon(timer: RenewalTimer, source: WeightSource) -> None:
    """The client is gone. Closing takes time, which a garbage collection has not."""
    timer.set()
    threading.Thread(target=source.close, name="trainsync-close", daemon=True).start()


def _left(deadline: float) -> float:
    return max(0.0, deadline - time.monotonic())
