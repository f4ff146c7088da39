"""Calls to a Synchronizer that may be rebuilt meanwhile, each with a deadline.

An explorer's calls go through its `ExplorerRegistration`: a lease that a thread renews. An explorer
that was given up, or whose Synchronizer was rebuilt, registers again by itself.
"""

import logging
import math
import secrets
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Final, Protocol

import ray

from trainsync.weights import threads
from trainsync.weights.errors import (
    ExplorerLostError,
    ExplorerReplacedError,
    UnknownExplorerError,
    WeightsError,
    WeightsUnavailableError,
)
from trainsync.weights.ray_errors import one_sentence, raised_there
from trainsync.weights.synchronizer.followed_state import Contact
from trainsync.weights.synchronizer.handle import FENCED, SynchronizerHandle
from trainsync.weights.synchronizer.remote import RemoteConnection, RemoteSynchronizer
from trainsync.weights.synchronizer.roster import Serving
from trainsync.weights.transports.broadcast.link import TrainerEndpoint

if TYPE_CHECKING:  # the Synchronizer's process imports this file, and does without torch
    from trainsync.weights.transports.base import Weights, WeightSource

logger = logging.getLogger(__name__)

ACTOR_NAME: Final = "trainsync-synchronizer"

# Longer than it takes to notice that the actor died and to start another process.
_REBUILD_SECONDS = 60.0
_LOOK_SECONDS = 0.1
_RENEWALS_IN_A_LEASE: Final = 3


def find_actor(namespace: str, timeout: float = 60.0) -> Any:
    """The handle of the namespace's Synchronizer.

    Raises:
        WeightsUnavailableError: there was none within ``timeout`` seconds.
    """
    deadline = time.monotonic() + timeout
    while True:
        try:
            return ray.get_actor(ACTOR_NAME, namespace=namespace)
        except ValueError as error:
            if time.monotonic() >= deadline:
                raise WeightsUnavailableError(
                    f"no Synchronizer in Ray namespace {namespace!r} after {timeout:g} s; "
                    "the job's driver makes it with RunContext.synchronizer()"
                ) from error
            time.sleep(_LOOK_SECONDS)


class SynchronizerConnection:
    """One process's way to the Synchronizer of a Ray namespace. Any thread may use it.

    When an actor dies that is kept, a call waits for the one that replaces it, for up to a minute,
    and is made again there; otherwise it fails at once.

    Args:
        synchronizer: handle, from `RunContext.synchronizer`, whose trainers the calls speak for. Or
            Ray's own, from `Synchronizer.get_actor`: then they count as those that train when the
            connection is made, and the actor must live then.
        timeout: seconds for the first answer.
    """

    def __init__(self, synchronizer: Any, timeout: float) -> None:
        named = isinstance(synchronizer, SynchronizerHandle)
        self._handle = synchronizer.actor if named else synchronizer
        self._lock = threading.Lock()  # guards the handle
        self.rebuilds = 0
        # As much as is known before the first answer.
        self.contact = Contact(synchronizer.namespace if named else "", named, math.inf)
        self.contact = self.call("get_contact", timeout=timeout)
        self._restarts = synchronizer.restarts if named else self.contact.restarts

    def call(
        self,
        method: str,
        *arguments: Any,
        timeout: float,
        when_repeated: Mapping[str, Any] | None = None,
        give_up: Callable[[], bool] | None = None,
    ) -> Any:
        """The answer of one method of the actor.

        Args:
            timeout: seconds for everything.
            when_repeated: more arguments, of a call that may have been taken before.
            give_up: asked five times a second; the answer is None once it is true.

        Raises:
            WeightsUnavailableError: no answer in time, or the actor is gone for good.
            What the method raises.
        """
        fence = {"restarts": self._restarts} if method in FENCED else {}
        deadline = time.monotonic() + timeout
        gone_since: float | None = None
        while True:
            handle = self._handle
            more = when_repeated if gone_since is not None and when_repeated is not None else {}
            try:
                reference = getattr(handle, method).remote(*arguments, **more, **fence)
                if give_up is None:
                    return ray.get(reference, timeout=max(0.0, deadline - time.monotonic()))
                return _answer(reference, deadline, give_up)
            except ray.exceptions.GetTimeoutError:
                raise _silent(method, timeout) from None
            except ray.exceptions.RayTaskError as error:
                raised = raised_there(error)
                raise raised from raised.__cause__
            except ray.exceptions.RayActorError as error:
                if not self.contact.kept:
                    raise _gone(error) from None
                gone_since = gone_since or time.monotonic()
                self._look(handle, min(deadline, gone_since + _REBUILD_SECONDS), error)

    def lasts(self) -> bool:
        """Whether calls are possible still: not after Ray has ended here."""
        return threads.ray_is_there()

    def _look(self, dead: Any, deadline: float, error: Exception) -> None:
        """Find the actor again. It may be the same: Ray also says that one cannot be reached."""
        if time.monotonic() + _LOOK_SECONDS > deadline:
            raise _gone(error) from None
        time.sleep(_LOOK_SECONDS)
        try:
            found = ray.get_actor(ACTOR_NAME, namespace=self.contact.namespace)
        except ValueError:
            return  # not rebuilt yet; the caller asks the dead one, and comes back
        with self._lock:
            if self._handle is dead and found._actor_id != dead._actor_id:
                self._handle = found
                self.rebuilds += 1


def connect(synchronizer: Any, timeout: float) -> SynchronizerConnection | RemoteConnection:
    """A connection by Ray, or by the monitor; see `SynchronizerConnection`."""
    if isinstance(synchronizer, RemoteSynchronizer):
        return RemoteConnection(synchronizer, timeout)
    return SynchronizerConnection(synchronizer, timeout)


class LeaseHolder(Protocol):
    """Holds a lease."""

    def lasts(self) -> bool:
        """Whether it can be renewed still."""
        ...

    def renew(self, timeout: float) -> None:
        """Renew it within ``timeout`` seconds."""
        ...


class RenewalTimer:
    """Says when to renew a lease: after a time, or at once when there is news."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._ended = False
        self._news = False

    def beat(self) -> None:
        """There is news."""
        with self._changed:
            self._news = True
            self._changed.notify_all()

    def set(self) -> None:
        """End the renewals."""
        with self._changed:
            self._ended = True
            self._changed.notify_all()

    def is_set(self) -> bool:
        """Whether the renewals have ended."""
        return self._ended

    def wait(self, seconds: float) -> bool:
        """Until the next renewal is due, at most ``seconds``; True when there will be none."""
        with self._changed:
            self._changed.wait_for(lambda: self._ended or self._news, seconds)
            self._news = False
            return self._ended


class ExplorerRegistration:
    """One explorer process at the Synchronizer, from `register_explorer` to `leave`. Any thread.

    Args:
        synchronizer: actor handle.
        explorer: id of the explorer.
        timeout: seconds to register.
        source: of its weights, which is stopped when another process has the explorer's id.
        sweep: called before each renewal, in its thread; must not raise.

    Attributes:
        session: random name of this process.
        timer: of the thread that renews the lease, which ends when the registration is not held
            any more.
    """

    def __init__(
        self,
        synchronizer: Any,
        explorer: str,
        timeout: float,
        source: "WeightSource",
        sweep: Callable[[], None],
    ) -> None:
        self.explorer = explorer
        self.session = secrets.token_hex(8)
        self.timer = RenewalTimer()
        self._source = source
        self._serving: Serving | None = None
        self._lock = threading.RLock()  # orders acknowledgements and registrations
        self._connection = connect(synchronizer, timeout)
        self._connection.call("register_explorer", explorer, self.session, timeout=timeout)
        lease = self._connection.contact.lease_seconds
        threads.start(
            f"trainsync-{explorer}",
            renew_until,
            self.timer,
            weakref.ref(self),
            self.timer,
            lease / _RENEWALS_IN_A_LEASE,
            sweep,
        )

    def call(
        self,
        method: str,
        *arguments: Any,
        timeout: float,
        give_up: Callable[[], bool] | None = None,
    ) -> Any:
        """A call of the Synchronizer, for which this process registers again where that is needed.

        Raises:
            ExplorerReplacedError: another process has the explorer's id.
            What `SynchronizerConnection.call` raises.
        """
        deadline = time.monotonic() + timeout

        def call() -> Any:
            left = _left(deadline)
            return self._connection.call(method, *arguments, timeout=left, give_up=give_up)

        try:
            try:
                return call()
            except (UnknownExplorerError, ExplorerLostError) as error:
                self._rejoin(error, deadline)
            return call()
        except ExplorerReplacedError:
            # The trainer knows explorers by name: two of one name would take turns at its link.
            if not self.timer.is_set():
                logger.error("explorer %s is another process now; this one ends", self.explorer)
            self.timer.set()
            self._source.stop()
            raise

    def ask(self, method: str, *arguments: Any, timeout: float) -> Any:
        """A call that begins with the explorer and its session. Raises what `call` raises."""
        return self.call(method, self.explorer, self.session, *arguments, timeout=timeout)

    def acknowledge(self, weights: "Weights", timeout: float) -> None:
        """Say that the explorer serves ``weights`` now. Raises what `call` raises."""
        with self._lock:
            version, digest, taken = weights.version, weights.digest, weights.taken
            restarts = [weights.restarts] if weights.restarts else []  # a default of the actor
            self.ask("acknowledge", version, digest, taken, *restarts, timeout=timeout)
            self._serving = Serving(version, digest, taken, weights.restarts)

    @property
    def restarts(self) -> int:
        """`Published.restarts` of what was acknowledged last."""
        return 0 if self._serving is None else self._serving.restarts

    def renew(self, timeout: float) -> None:
        """Renew the lease, and say what is served; a thread does so by itself."""
        self.ask("renew", self._serving, self._source.ready, timeout=timeout)

    def lasts(self) -> bool:
        """See `LeaseHolder`."""
        return self._connection.lasts()

    def leave(self, timeout: float) -> None:
        """Say that this explorer goes; the thread ends."""
        self.timer.set()
        self._connection.call("leave", self.explorer, self.session, timeout=timeout)

    def _rejoin(self, error: WeightsError, deadline: float) -> None:
        """Register again; raises ``error`` when the registration is not held any more."""
        if self.timer.is_set():
            raise error
        logger.warning("explorer %s registers again: %s", self.explorer, error)
        with self._lock:
            again = self.explorer, self.session, True, self._serving
            self._connection.call("register_explorer", *again, timeout=_left(deadline))
        self.timer.beat()  # whether it is ready is not known there any more


def renew_until(
    holder: "weakref.ref[LeaseHolder]",
    ended: RenewalTimer,
    seconds: float,
    sweep: Callable[[], None],
) -> None:
    """Renew the lease every ``seconds`` until ``ended``, or until nothing refers to the holder.

    Args:
        sweep: called before each renewal.
    """
    silent = False
    while not ended.wait(seconds):
        sweep()
        alive = holder()
        if alive is None or not alive.lasts():
            return
        try:
            alive.renew(timeout=2 * seconds)
            silent = False
        except Exception as error:  # noqa: BLE001 - the next renewal may succeed
            if not alive.lasts():
                return  # the next call of the client raises
            if not silent and not ended.is_set():
                cause = str(error) or type(error).__name__
                logger.warning("no sign of life could be given: %s", cause)
            silent = True
        del alive


def find_group(synchronizer: Any, timeout: float) -> Callable[[], TrainerEndpoint | None]:
    """A function that asks the Synchronizer where the trainer broadcasts from.

    It returns None before the trainer has said so, and when Ray has ended.

    Args:
        synchronizer: actor handle.
        timeout: seconds of one question; the function raises `WeightsUnavailableError` after them.
    """
    connections: list[SynchronizerConnection] = []

    def find() -> TrainerEndpoint | None:
        with threads.calling_ray() as allowed:
            if not allowed:
                return None
            if not connections:
                connections.append(SynchronizerConnection(synchronizer, timeout))
            group: TrainerEndpoint | None = connections[0].call(
                "get_weight_sync_group", timeout=timeout
            )
            return group

    def find_remotely() -> TrainerEndpoint | None:
        group: TrainerEndpoint | None = synchronizer.call("get_weight_sync_group", timeout=timeout)
        return group

    return find_remotely if isinstance(synchronizer, RemoteSynchronizer) else find


def _answer(reference: Any, deadline: float, give_up: Callable[[], bool]) -> Any:
    """The answer, or None; raises as `ray.get` does at the deadline."""
    if time.monotonic() >= deadline:
        return ray.get(reference, timeout=0.0)
    over = threads.answer(reference, lambda: give_up() or time.monotonic() >= deadline)
    if over is None and not give_up():
        return ray.get(reference, timeout=0.0)
    return over


def _silent(method: str, seconds: float) -> WeightsUnavailableError:
    return WeightsUnavailableError(f"the Synchronizer did not answer {method} within {seconds:g} s")


def _gone(error: Exception) -> WeightsUnavailableError:
    return WeightsUnavailableError(f"the Synchronizer is gone: {one_sentence(error)}")


def _left(deadline: float) -> float:
    return max(0.0, deadline - time.monotonic())
