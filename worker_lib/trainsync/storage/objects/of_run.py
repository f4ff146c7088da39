"""Opens the store of a run's checkpoints, as its environment says.

On Kubernetes the operator sets variables of our own for it (`trainsync.api.env`), and those of the
clouds stay the training's. Without them, as in a local run, those of the clouds count.
"""

import os
from collections.abc import Mapping
from dataclasses import replace
from typing import Final

from trainsync.api import env
from trainsync.api.bucket import CREDENTIALS
from trainsync.storage.objects.bucket import Limits, ObjectBucket
from trainsync.storage.objects.errors import StoreUrlError
from trainsync.storage.objects.opening import StoreOptions, open_store
from trainsync.storage.objects.requests import bandwidth

MONITOR_LIMITS: Final = Limits(
    connect_seconds=5.0,
    call_seconds=15.0,
    retries=3,
    retry_seconds=10.0,
    parts=2,
    pause_seconds=2.0,
)
"""A bucket that refuses is told of within seconds; the core asks it again, and answers requests
meanwhile. Parts: the monitor's container is small."""


def options_of_run(
    environ: Mapping[str, str] = os.environ, limits: Limits | None = None
) -> StoreOptions:
    """Options of the run's store, of the environment. Raises `StoreUrlError`: one is wrong."""
    limits = limits or Limits()
    if text := environ.get(env.STORE_UPLOAD_BYTES_PER_SECOND):
        try:
            limits = replace(limits, upload_bytes_per_second=bandwidth.parse(text))
        except ValueError as error:
            raise StoreUrlError(f"{env.STORE_UPLOAD_BYTES_PER_SECOND} is {error}") from None
    return StoreOptions(
        endpoint=environ.get(env.STORE_ENDPOINT) or None,
        region=environ.get(env.STORE_REGION) or None,
        allow_http=environ.get(env.STORE_ALLOW_HTTP, "").lower() == "true",
        credentials=credentials(environ, env.STORE_CREDENTIAL_PREFIX),
        limits=limits,
    )


def credentials(
    environ: Mapping[str, str], prefix: str, scheme: str | None = None
) -> dict[str, str]:
    """obstore's settings from the variables that have this prefix before a cloud's name.

    Args:
        scheme: of the cloud's URLs; None: any cloud's.
    """
    clouds = CREDENTIALS.values() if scheme is None else (CREDENTIALS.get(scheme, ()),)
    names = [name for of_cloud in clouds for name in of_cloud]
    given = {name: environ.get(f"{prefix}{name}") for name in names}
    # The clouds' names of their variables, in small letters, are obstore's of its settings.
    return {name.lower(): value for name, value in given.items() if value}


def open_run_store(url: str, limits: Limits | None = None) -> ObjectBucket:
    """The store of this process's run. Nothing is asked of it yet.

    Raises:
        StoreUrlError: the URL or a variable is wrong.
    """
    return open_store(url, options_of_run(limits=limits))
