"""Workers that reconcile keys from the queue, and the periodic resync of all runs."""

import asyncio
import logging
import time
from typing import Final

from trainsync_operator.controller.queue import WorkQueue
from trainsync_operator.kube.client import ApiError
from trainsync_operator.kube.kinds import RUN
from trainsync_operator.kube.logging import about
from trainsync_operator.kube.store import Store
from trainsync_operator.metrics.metrics import Metrics
from trainsync_operator.reconcile.reconcile import Reconciler
from trainsync_operator.reconcile.run import Key

_LOG = logging.getLogger(__name__)
# A look takes 10 ms of processor even if nothing has changed; the watches are read anew as often.
RESYNC_SECONDS: Final = 1800.0
# Of few runs one is looked at as often: an alert takes 15 minutes without a look for a standstill.
LONGEST_PAUSE_SECONDS: Final = 300.0
# Each of a reconcile's dozen calls has a deadline; this limit covers all other code.
RECONCILE_SECONDS: Final = 120.0
# A failure that passes at the next try is nothing to tell of.
TOLD_AFTER: Final = 3
TELL_SECONDS: Final = 30.0


async def work(queue: WorkQueue[Key], reconciler: Reconciler, metrics: Metrics) -> None:
    """Reconcile keys forever; a failed key is queued again with back-off."""
    while True:
        key = await queue.take()
        metrics.depth.set(len(queue))
        with about(key.namespace, key.name), metrics.busy.track_inprogress():
            await work_on(key, queue, reconciler, metrics)
        metrics.depth.set(len(queue))


async def work_on(
    key: Key, queue: WorkQueue[Key], reconciler: Reconciler, metrics: Metrics
) -> None:
    """Reconcile a key that was taken; a failure puts it back with back-off, and is not raised."""
    begun = time.monotonic()
    try:
        async with asyncio.timeout(RECONCILE_SECONDS):
            again = await reconciler.reconcile(key)
    except (ApiError, TimeoutError) as error:
        bounds = (error.retry_after, error.at_most) if isinstance(error, ApiError) else ()
        wait = queue.failed(key, *bounds)
        metrics.reconciles.labels("error").inc()
        metrics.retries.inc()
        message = str(error) or f"one look took longer than {RECONCILE_SECONDS:g} s"
        _LOG.warning("reconcile failed, next try in %.1f s: %s", wait, message)
        # Where the API server asks to wait, the status has to wait, too.
        quiet = isinstance(error, ApiError) and (error.already_reported or error.retry_after > 0)
        if queue.failures(key) >= TOLD_AFTER and not quiet:
            await _tell(key, reconciler, message)
    except Exception:  # noqa: BLE001
        # A bug with one run must not stop the others: log, count, back off.
        wait = queue.failed(key)
        metrics.reconciles.labels("fault").inc()
        metrics.retries.inc()
        _LOG.exception("reconcile broke, next try in %.1f s", wait)
    else:
        queue.done(key)
        metrics.succeeded()
        if again is not None:
            queue.add_after(key, again)
    finally:
        metrics.reconciled(key, time.monotonic() - begun)


async def _tell(key: Key, reconciler: Reconciler, message: str) -> None:
    """Say in the run's status why nothing happens; best effort, as the API server fails."""
    try:
        async with asyncio.timeout(TELL_SECONDS):
            await reconciler.unable(key, message)
    except (ApiError, TimeoutError) as error:
        _LOG.warning("the status does not tell of it: %s", str(error) or "too slow")
    except Exception:  # noqa: BLE001 - the worker goes on, and has counted the failure itself
        _LOG.exception("the status does not tell of it")


async def resync(
    queue: WorkQueue[Key],
    store: Store,
    seconds: float = RESYNC_SECONDS,
    longest_pause: float = LONGEST_PAUSE_SECONDS,
) -> None:
    """Queue every run once in ``seconds``, spread over that time, should an event be missed.

    Args:
        longest_pause: seconds between two runs at most, however few there are.
    """
    while True:
        runs = store.names(RUN)
        if not runs:
            await asyncio.sleep(longest_pause)
        for run in runs:
            await asyncio.sleep(min(seconds / len(runs), longest_pause))
            queue.add(Key(*run))
