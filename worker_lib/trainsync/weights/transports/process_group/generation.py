"""One generation of the process group for weights, which is not used again after a failure."""

import atexit
import logging
import os
import queue
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import Any, Final

import torch
from torch._C._distributed_c10d import Store

from trainsync.weights.errors import GroupFailedError
from trainsync.weights.transports.process_group.backend import RankSpec, begin_broadcast, make_group

logger = logging.getLogger(__name__)

_AWAKE_SECONDS: Final = 100e-6  # of asking again, before sleeping between two questions
_PAUSE_SECONDS: Final = 200e-6
_EXIT_SECONDS: Final = 3.0
_LOOK_SECONDS: Final = 0.05  # between two looks at whether the group is given up

_ending: weakref.WeakSet[threading.Thread] = weakref.WeakSet()


class WeightGroup:
    """A member's end of it. One thread, which never waits for longer than it said.

    A call of torch that lost a member may never return. So all of them are made by a thread of
    their own, which is left behind then.

    Attributes:
        given_up: asked while waiting; why not to go on, or nothing.

    Args:
        store: gives the trainer's store, in that thread.
        end: until when all must have joined, on the monotonic clock.
        library_timeout: seconds that the backend may wait in a collective: longer than callers.
        greets: whether a byte travels at once, so that the connections are there; no, where the
            others are not of trainsync, and take no byte.

    Raises:
        GroupFailedError: not all came in time.
    """

    def __init__(
        self,
        spec: RankSpec,
        store: Callable[[], Store],
        end: float,
        library_timeout: float,
        given_up: Callable[[], str],
        *,
        greets: bool = True,
    ) -> None:
        self.spec = spec
        self.given_up = given_up
        self._lock = threading.Lock()  # the group is given up before it is made, or after
        self._over = threading.Event()
        self._group: Any = None
        self._flying: list[tuple[Any, torch.Tensor]] = []
        self._calls: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None]
        self._calls = queue.SimpleQueue()
        threading.Thread(target=self._run, name="trainsync-group", daemon=True).start()

        def join() -> None:
            group = make_group(spec, store(), library_timeout)
            with self._lock:
                if not self._over.is_set():
                    self._group = group
                    return
            group.abort()  # no caller waits any more

        try:
            self._call(join, end)
            if greets:
                self.begin(torch.zeros(1, dtype=torch.uint8, device=spec.device), end)
                self.finish(end)  # now the connections are there too
        except BaseException:
            self.abort()
            raise

    def begin(self, data: torch.Tensor, end: float) -> None:
        """Let ``data`` (uint8, contiguous) travel; it must be left alone until `finish`.

        Raises:
            GroupFailedError: `abort` must be called then. So with `finish`.
        """
        work = self._call(lambda: begin_broadcast(self._group, data), end)
        self._flying.append((work, data))

    def finish(self, end: float) -> torch.Tensor:
        """Wait for the first that travels still, until ``end`` on the monotonic clock."""
        work, data = self._flying[0]
        asked = time.monotonic()
        looked = asked
        while not work.is_completed():
            now = time.monotonic()
            if now >= end:
                raise GroupFailedError("a bucket's deadline has passed in the group")
            if now - looked >= _LOOK_SECONDS:
                looked = now
                self._check_given_up()
            if now - asked < _AWAKE_SECONDS:
                os.sched_yield()
            else:
                time.sleep(_PAUSE_SECONDS)
        try:
            work.wait()  # it is over: this raises what it ended with
        except RuntimeError as error:
            raise self._failed(error) from error
        self._flying.pop(0)
        return data

    def abort(self) -> None:
        """Give it up, at once. What travels is kept until the backend has let go of it."""
        with self._lock:
            first = not self._over.is_set()
            self._over.set()
        if first:
            self._calls.put(None)
            thread = threading.Thread(target=self._discard, name="trainsync-group-end", daemon=True)
            _ending.add(thread)
            thread.start()

    def _discard(self) -> None:
        group, self._group = self._group, None
        try:
            if group is not None:
                group.abort()
        except RuntimeError as error:
            logger.warning("the group %s does not end: %s", self.spec.name, error)
        del group  # gloo waits for what travels
        self._flying.clear()

    def _call(self, what: Callable[[], Any], end: float) -> Any:
        done: Future[Any] = Future()
        self._calls.put((_here(self.spec.device, what), done))
        while not done.done():
            left = end - time.monotonic()
            wait([done], max(0.0, min(left, _LOOK_SECONDS)))
            if not done.done():
                self._check_given_up()
                if left <= 0:
                    raise GroupFailedError("the group has not come together in time")
        try:
            return done.result()
        except (RuntimeError, OSError, ValueError) as error:  # torch raises all of these
            raise self._failed(error) from error

    def _failed(self, error: Exception) -> GroupFailedError:
        """Without the secret: torch names the keys of the store that it waited for."""
        said = str(error).replace(self.spec.secret, "...")
        return GroupFailedError(f"the group has failed: {said}")

    def _check_given_up(self) -> None:
        cause = self.given_up()
        if cause:
            raise GroupFailedError(cause)

    def _run(self) -> None:
        while (item := self._calls.get()) is not None:
            what, done = item
            try:
                done.set_result(what())
            except BaseException as error:  # noqa: BLE001 - raised to the waiting caller
                done.set_exception(error)
            del item, what, done


@atexit.register
def _settle() -> None:
    """Let torch take down what is given up: cut short by the end of Python, it crashes."""
    end = time.monotonic() + _EXIT_SECONDS
    for thread in list(_ending):
        thread.join(max(0.0, end - time.monotonic()))


def _here(device: torch.device, what: Callable[[], Any]) -> Callable[[], Any]:
    """``what`` on the stream of this thread, behind what was begun there."""
    if device.type != "cuda":
        return what
    stream = torch.cuda.current_stream(device)

    def call() -> Any:
        with torch.cuda.stream(stream):  # and so on its device
            return what()

    return call
