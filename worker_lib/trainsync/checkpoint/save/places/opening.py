"""Which place a process's saves go to, by the directory or URL that names it."""

from pathlib import Path

from trainsync.checkpoint.save.places.base import SavePlace
from trainsync.checkpoint.save.places.store import StorePlace
from trainsync.checkpoint.save.places.volume import VolumePlace
from trainsync.storage.layout import RunDirectory
from trainsync.storage.objects.address import is_url
from trainsync.storage.objects.of_run import open_run_store


def open_place(
    where: str | Path,
    attempt: int,
    incarnation: str,
    *,
    incremental: bool = False,
    continues: str | None = None,
) -> SavePlace:
    """The place; credentials of a store are the environment's.

    Args:
        incremental: states that have not changed since the newest commit are not written again.
        continues: the `SavePlace.writer` of a process that has died, whose parts are finished.

    Raises:
        StoreUrlError: a URL, and of no store that can be opened.
    """
    if is_url(where):
        bucket = open_run_store(str(where))
        return StorePlace(bucket, attempt, incarnation, incremental=incremental)
    run = RunDirectory(Path(where))
    return VolumePlace(run, attempt, incarnation, incremental=incremental, continues=continues)
