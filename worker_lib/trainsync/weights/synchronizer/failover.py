"""Makes a run's Synchronizer, and makes it again when it dies, with nothing lost."""

import logging
import threading
import time
from typing import Any

import ray

from trainsync.weights import threads
from trainsync.weights.errors import WeightsUnavailableError
from trainsync.weights.ray_errors import one_sentence
from trainsync.weights.synchronizer.actor import Synchronizer, actor_options
from trainsync.weights.synchronizer.failover_state import FailoverState, RestoredState, StateChanges
from trainsync.weights.synchronizer.state import LEASE_SECONDS
from trainsync.weights.transports.shared_memory.segment_store import Sweeper

logger = logging.getLogger(__name__)

_POLL_SECONDS = 5.0  # of one question, which is answered as soon as something changes
_MAX_REBUILDS_IN_A_ROW = 5


class SynchronizerFailover:
    """Follows the Synchronizer from a thread of the job's driver, and rebuilds it.

    Parts that the actor took are held here too, as references, before the trainer is told that they
    were taken. A new actor publishes the same version, and knows the same explorers, under fresh
    leases; it runs on this process's node, as the first one does. An actor that cannot be reached
    for a while is followed again. After five actors that died before they answered, or when Ray
    itself is gone, rebuilding ends with an error in the log, and calls to the Synchronizer fail.

    Its thread is not one of `trainsync.runtime.relays`: weights are a layer below the runtime.

    Args:
        namespace: Ray namespace, with no Synchronizer in it.
        floor: see `WeightsState`.
        retry: seconds before an actor that cannot be reached is asked again.
        start: seconds for which a new actor waits at most for the name of the one before.
        look: seconds between its tries.
    """

    def __init__(
        self,
        namespace: str,
        floor: int = -1,
        lease_seconds: float = LEASE_SECONDS,
        *,
        retry: float = 1.0,
        start: float = 60.0,
        look: float = 0.2,
    ) -> None:
        self._retry_seconds = retry
        self._start_seconds = start
        self._look_seconds = look
        self._namespace = namespace
        self._lease_seconds = lease_seconds
        self._floor = floor
        self._failover_state = FailoverState(floor)
        self._closing = threading.Event()
        self.rebuilds = 0
        self.error: Exception | None = None
        self._handle: Any = None
        self._handle = self._make(None)
        self._thread = threads.start("trainsync-failover", self._run, self._closing)

    @property
    def handle(self) -> Any:
        """The actor of now."""
        return self._handle

    def close(self, timeout: float) -> bool:
        """Rebuild no longer. False if the thread did not end within ``timeout`` seconds."""
        self._closing.set()
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def _run(self) -> None:
        seen = in_a_row = 0
        sweeper = Sweeper()  # this may be the host of a trainer that was killed
        while not self._closing.is_set() and threads.ray_is_there():
            sweeper.sweep()
            try:
                changes = self._ask(seen)
                in_a_row = 0
                if changes is not None:
                    self._failover_state.apply(changes)
                    seen = changes.revision
            except ray.exceptions.ActorUnavailableError as error:  # it may well live
                logger.warning("the Synchronizer is asked again: %s", one_sentence(error))
                self._closing.wait(self._retry_seconds)
            except ray.exceptions.RayActorError as error:
                in_a_row += 1
                if in_a_row > _MAX_REBUILDS_IN_A_ROW or not self._rebuild(error):
                    return self._give_up(error)
                seen = 0
            except Exception as error:  # noqa: BLE001 - Ray is gone, or something unforeseen
                return self._give_up(error)
        return None

    def _ask(self, seen: int) -> StateChanges | None:
        """One question; given up when `close` is called meanwhile."""
        reference = self._handle.follow.remote(seen, _POLL_SECONDS)
        changes: StateChanges | None = threads.answer(reference, self._closing.is_set)
        return changes

    def _rebuild(self, cause: Exception) -> bool:
        """False when it is not wanted any more, or did not come to be in time."""
        if self._answers():
            logger.warning("the Synchronizer lives and is followed again: %s", one_sentence(cause))
            return not self._closing.is_set()
        logger.warning("the Synchronizer died and is built again: %s", one_sentence(cause))
        try:
            # Ray keeps the name of an actor whose process died for that actor until it is told.
            ray.kill(self._handle)
            self._handle = self._make(self._failover_state.remembered())
        except Exception as error:  # noqa: BLE001 - Ray is gone, say: told, and not tried again
            logger.warning("the Synchronizer could not be built again: %s", one_sentence(error))
            return False
        self.rebuilds += 1
        return not self._closing.is_set()

    def _make(self, remembered: RestoredState | None) -> Any:
        """A new actor, which takes the name of the dead one as soon as that has given it back."""
        actor = ray.remote(Synchronizer).options(**actor_options(self._namespace))
        deadline = time.monotonic() + self._start_seconds
        while True:
            try:
                return actor.remote(
                    self._namespace,
                    self._floor,
                    self._lease_seconds,
                    kept=True,
                    remembered=remembered,
                )
            except ValueError as error:
                if time.monotonic() >= deadline or self._closing.is_set():
                    raise WeightsUnavailableError(
                        f"Ray namespace {self._namespace!r} has a Synchronizer that this process "
                        "did not make, or that does not end"
                    ) from error
                time.sleep(self._look_seconds)

    def _answers(self) -> bool:
        """Whether the actor of now lives."""
        try:
            ray.get(self._handle.get_contact.remote(), timeout=self._retry_seconds)
        except ray.exceptions.RayError:
            return False
        return True

    def _give_up(self, error: Exception) -> None:
        self.error = error
        if not self._closing.is_set():
            logger.error("the Synchronizer is not rebuilt any more: %s", one_sentence(error))
