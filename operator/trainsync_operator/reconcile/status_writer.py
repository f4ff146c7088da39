"""Writes the operator's part of a run's status, at a pace, and to the very run that was read."""

from datetime import datetime
from typing import Any, Final

from trainsync_operator.kube import objects
from trainsync_operator.kube.client import ApiError, ApiRefusedError
from trainsync_operator.kube.kinds import RUN
from trainsync_operator.kube.objects import Object
from trainsync_operator.reconcile import status
from trainsync_operator.reconcile.fencing import as_read, same
from trainsync_operator.reconcile.pace import Pace
from trainsync_operator.reconcile.reads import Live
from trainsync_operator.reconcile.run import Key, Run

# The monitor writes its part of the status every two seconds, between our read and our write.
_TRIES: Final = 4


class StaleError(ApiError):
    """The run has changed, or is another one, since it was read; decide again, with back-off."""

    already_reported = True  # nothing is wrong


class StatusWriter:
    """Remembers when each run's status was written.

    Args:
        live: where it is written.
    """

    def __init__(self, live: Live) -> None:
        self._live = live
        self._pace: Pace[Key] = Pace()

    async def write_changes(self, run: Run, mine: dict[str, Any], now: datetime) -> Object | None:
        """Write a status that differs, once it may be written; the run as it is then, else None.

        Raises:
            StaleError: see `write`.
        """
        key, before = Key(run.namespace, run.name), status.owned(run.status)
        if self._pace.waits(key, before, mine, now) or before == mine:
            return None
        written = await self.write(as_read(run), mine)
        self._pace.wrote(key, now)
        return written

    async def write(self, raw: Object, mine: dict[str, Any]) -> Object:
        """Write to the very run that was read; a namesake, or one that moved on, is left alone.

        The resourceVersion fences, as server-side apply of a status does not look at the uid. When
        only the monitor has written meanwhile, what was decided still holds and is written.

        Raises:
            StaleError: the run has changed since.
        """
        live: Object | None = raw
        for _ in range(_TRIES):
            if live is None or not same(live, raw):
                break
            meta = objects.metadata(live)
            kept = {key: meta[key] for key in ("name", "namespace", "resourceVersion")}
            obj = {
                "apiVersion": RUN.api_version,
                "kind": RUN.name,
                "metadata": kept,
                "status": mine,
            }
            try:
                return await self._live.apply_status(RUN, obj)
            except ApiRefusedError as error:
                if error.status not in (404, 409):
                    raise
                live = await self._live.get(RUN, kept["namespace"], kept["name"])
        raise StaleError("the run has changed since it was read")

    def due(self, key: Key) -> list[datetime]:
        """When to look at a run again, whose counts wait to be written."""
        return self._pace.due(key)

    def gone(self, key: Key) -> None:
        """Forget a run."""
        self._pace.gone(key)
