"""Waits for saves that are finished after their ranks died, before a run goes on without them."""

import logging

from trainsync.runtime.settings import RunSettings
from trainsync.storage.errors import StorageError
from trainsync.storage.layout import RunDirectory
from trainsync.storage.saves.claims import read_claims

logger = logging.getLogger(__name__)


def await_rescued(settings: RunSettings, owners: list[tuple[int, str]]) -> None:
    """Wait for saves of ``owners`` (attempt, incarnation) that the run's ranks had in memory.

    At once where the run keeps nothing there; else see `await_rescue`. Never raises.
    """
    if settings.memory_place is None or not owners:
        return
    # Here: a driver need not have what it is made of.
    from trainsync.checkpoint.rescue.waiting import await_rescue
    from trainsync.checkpoint.save.places.opening import open_place

    where = settings.directory if settings.store is None else settings.store
    places = [open_place(where, attempt, incarnation) for attempt, incarnation in owners]
    await_rescue(places, copies=settings.memory_place.guests is not None)


def await_rescued_before_claim(settings: RunSettings) -> None:
    """The same for the owners of the newest attempt, if the next one is about to supersede that."""
    if settings.memory_place is None:
        return
    try:
        owners = [owner for owner in _newest_owners(settings) if owner[0] != settings.attempt]
    except (OSError, StorageError) as error:
        logger.warning("what the attempt before had in memory is not awaited: %s", error)
        return
    await_rescued(settings, owners)


def _newest_owners(settings: RunSettings) -> list[tuple[int, str]]:
    if settings.store is not None:
        from trainsync.storage.objects.live.term import read_term
        from trainsync.storage.objects.of_run import open_run_store

        term = read_term(open_run_store(settings.store))
        if term is None or term.attempt is None or term.run_uid != settings.uid:
            return []
        return [(term.attempt, incarnation) for incarnation in term.clusters.values()]
    claims = read_claims(RunDirectory(settings.directory), settings.uid)
    return [
        (claim.attempt, claim.incarnation)
        for claim in claims
        if claim.attempt == claims[-1].attempt
    ]
