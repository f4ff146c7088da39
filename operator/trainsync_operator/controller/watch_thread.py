"""kopf in a thread of its own: it may end and start again, and nothing else of the operator does.

kopf ends with every error of a watch but 410, and when it ends it cancels all tasks of its loop.
"""

import asyncio
import contextlib
import logging
import threading
from functools import partial
from typing import Final

import kopf

from trainsync_operator.controller import watch
from trainsync_operator.controller.watch import Add
from trainsync_operator.reconcile.reconcile import Key

_LOG = logging.getLogger(__name__)
FIRST_RESTART_SECONDS: Final = 1.0
LAST_RESTART_SECONDS: Final = 30.0
_CLOSE_SECONDS: Final = 3.0


class WatchThread:
    """Watches runs and their children until it is cancelled.

    Args:
        add: called in the loop that this object was made in.
        namespaces: of the runs; all when empty.
    """

    def __init__(self, add: Add, namespaces: list[str]) -> None:
        self._add = add
        self._namespaces = namespaces
        self._operator = asyncio.get_running_loop()
        self._ended: asyncio.Future[None] = self._operator.create_future()
        self._loop = asyncio.new_event_loop()
        self._stop = asyncio.Event()
        self._thread = threading.Thread(target=self._run, name="watches", daemon=True)

    async def run(self) -> None:
        """Watch for ever; a watch that fails starts again, with back-off.

        Raises:
            Exception: the thread ended by a fault of ours.
        """
        self._thread.start()
        try:
            await self._ended
        finally:
            with contextlib.suppress(RuntimeError):  # the thread has ended
                self._loop.call_soon_threadsafe(self._stop.set)
            await asyncio.to_thread(self._thread.join, _CLOSE_SECONDS)

    def _run(self) -> None:
        try:
            self._loop.run_until_complete(self._watch())
        except Exception as error:  # noqa: BLE001 -- handed to the operator's loop
            self._tell(partial(self._fail, error))
        finally:
            self._loop.close()

    async def _watch(self) -> None:
        registry = watch.registry(self._add_from_here)
        wait = FIRST_RESTART_SECONDS
        while not self._stop.is_set():
            begun = self._loop.time()
            cause: object = "kopf returned"
            try:
                await kopf.operator(
                    registry=registry,
                    settings=watch.settings(),
                    standalone=True,
                    clusterwide=not self._namespaces,
                    namespaces=self._namespaces,
                    stop_flag=self._stop,
                )
            except Exception as error:  # noqa: BLE001 -- whatever a watch fails of is tried again
                cause = error
            if self._stop.is_set():
                return
            if self._loop.time() - begun > LAST_RESTART_SECONDS:
                wait = FIRST_RESTART_SECONDS
            _LOG.warning("watches failed, they start again in %g s: %r", wait, cause)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stop.wait(), wait)
            wait = min(2 * wait, LAST_RESTART_SECONDS)

    def _add_from_here(self, key: Key, *, edited: bool = False) -> None:
        self._tell(partial(self._add, key, edited=edited))

    def _tell(self, what: "partial[None]") -> None:
        with contextlib.suppress(RuntimeError):  # the operator's loop is closed
            self._operator.call_soon_threadsafe(what)

    def _fail(self, error: Exception) -> None:
        if not self._ended.done():
            self._ended.set_exception(error)
