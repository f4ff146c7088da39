"""The store of the method ``store``: where the environment says that it is; opening it."""

import os
from collections.abc import Mapping
from dataclasses import dataclass

from trainsync.api import env
from trainsync.runtime.errors import SettingsError
from trainsync.storage.objects.address import parse
from trainsync.storage.objects.bucket import Limits, ObjectBucket
from trainsync.storage.objects.errors import StoreUrlError
from trainsync.storage.objects.of_run import credentials
from trainsync.storage.objects.opening import StoreOptions, open_store


@dataclass(frozen=True)
class SyncStore:
    """``spec.sync.store`` without its credentials, which stay in the environment."""

    url: str
    endpoint: str | None = None
    region: str | None = None
    allow_http: bool = False

    def environment(self) -> dict[str, str | None]:
        """The variables that make `read_sync_store` give this in another process."""
        return {
            env.SYNC_STORE_URL: self.url,
            env.SYNC_STORE_ENDPOINT: self.endpoint,
            env.SYNC_STORE_REGION: self.region,
            env.SYNC_STORE_ALLOW_HTTP: "true" if self.allow_http else None,
        }

    def open(self, timeout: float) -> ObjectBucket:
        """The store, with credentials of this process. Nothing is asked of it yet.

        Args:
            timeout: ``sync.timeoutSeconds``: no request is tried again for longer.

        Raises:
            SettingsError: it cannot be opened.
        """
        given = credentials(os.environ, env.SYNC_STORE_CREDENTIAL_PREFIX, parse(self.url).scheme)
        limits = limits_within(timeout)
        options = StoreOptions(self.endpoint, self.region, self.allow_http, given, limits)
        try:
            return open_store(self.url, options)
        except StoreUrlError as error:
            raise SettingsError(f"{env.SYNC_STORE_URL}: {error}") from error


def limits_within(timeout: float) -> Limits:
    """The usual bounds of each call, none of which is longer than ``timeout``."""
    usual = Limits()
    return Limits(
        connect_seconds=min(usual.connect_seconds, timeout),
        call_seconds=min(usual.call_seconds, timeout),
        transfer_seconds=min(usual.transfer_seconds, timeout),
        retry_seconds=min(usual.retry_seconds, timeout),
    )


def read_sync_store(environ: Mapping[str, str]) -> SyncStore | None:
    """The store that the environment names; None where it names none.

    Raises:
        SettingsError: it is no URL of a store, or something is said of a store that is not named.
    """
    url = environ.get(env.SYNC_STORE_URL)
    endpoint = environ.get(env.SYNC_STORE_ENDPOINT) or None
    region = environ.get(env.SYNC_STORE_REGION) or None
    allow_http = environ.get(env.SYNC_STORE_ALLOW_HTTP) or "false"
    if allow_http not in ("true", "false"):
        raise SettingsError(
            f"{env.SYNC_STORE_ALLOW_HTTP} is {allow_http!r}; expected true or false"
        )
    if not url:
        if endpoint or region or allow_http == "true":
            raise SettingsError(
                f"{env.SYNC_STORE_URL} is not set, though variables of that store are: expected "
                "s3://bucket/prefix, gs://bucket/prefix or az://container/prefix"
            )
        return None
    try:
        place = str(parse(url))
    except StoreUrlError as error:
        raise SettingsError(f"{env.SYNC_STORE_URL}: {error}") from error
    return SyncStore(place, endpoint, region, allow_http == "true")
