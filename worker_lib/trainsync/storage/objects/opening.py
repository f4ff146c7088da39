"""Opens the store of a URL: endpoint, region and credentials as the clouds' own tools name them.

Where credentials are given, `trainsync.storage.objects.explicit` opens it.
"""

import os
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Final

from trainsync.storage.objects import address, explicit
from trainsync.storage.objects.bucket import ObjectBucket
from trainsync.storage.objects.errors import StoreUrlError
from trainsync.storage.objects.options import StoreOptions

if TYPE_CHECKING:
    from obstore.store import ClientConfig, ObjectStore, RetryConfig

__all__ = ["ALLOW_HTTP", "StoreOptions", "open_store"]

_ENDPOINTS: Final = {
    "s3": ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT"),
    "az": ("AZURE_STORAGE_ENDPOINT", "AZURE_ENDPOINT"),
}
ALLOW_HTTP: Final = "AWS_ALLOW_HTTP"


def open_store(text: str, options: StoreOptions | None = None) -> ObjectBucket:
    """The store that the URL ``text`` names. Nothing is asked of it yet.

    Raises:
        StoreUrlError: the URL or an option is wrong, or obstore is not installed.
    """
    options = StoreOptions() if options is None else options
    url = address.parse(text)
    try:
        limits = options.limits
        calls = _open(url, options, limits.call_seconds)
        return ObjectBucket(calls, str(url), limits, _open(url, options, limits.transfer_seconds))
    except StoreUrlError:
        raise
    except ModuleNotFoundError as error:
        package = str(error.name).partition(".")[0]
        raise StoreUrlError(
            f"{url} needs the package {package}, which is not installed here: "
            f"`pip install {package}` in this environment or image"
        ) from None
    except Exception as error:  # noqa: BLE001 - its text may have a setting's value in it
        kind = type(error).__name__
        raise StoreUrlError(f"{url}: cannot be opened with these settings ({kind})") from None


def _open(url: address.StoreUrl, options: StoreOptions, seconds: float) -> "ObjectStore":
    from obstore.store import AzureStore, GCSStore, LocalStore, S3Store

    if url.scheme == "file":
        _refuse(url, options, region=True)
        if not Path(f"/{url.prefix}").is_dir():
            raise StoreUrlError(f"{url}: there is no such directory")
        return LocalStore(f"/{url.prefix}")
    client = _client(url, options, seconds)
    retry: RetryConfig = {
        "max_retries": options.limits.retries,
        "retry_timeout": timedelta(seconds=options.limits.retry_seconds),
        "backoff": {
            "init_backoff": timedelta(seconds=0.1),
            "max_backoff": timedelta(seconds=5),
        },
    }
    prefix = url.prefix or None
    if options.credentials:
        if url.scheme == "gs":
            _refuse(url, options, region=True)
        elif url.scheme == "az":
            _refuse(url, StoreOptions(region=options.region), region=True)
        return explicit.opened(url, options, client, retry)
    given: dict[str, str] = {}
    if options.endpoint is not None:
        given["endpoint"] = options.endpoint
    if url.scheme == "s3":
        if options.endpoint is not None:  # else the environment's own for S3 would win
            given["aws_endpoint_url_s3"] = options.endpoint
        if options.region is not None:
            given["region"] = options.region
        return S3Store(
            url.container,
            prefix=prefix,
            config={**given, "conditional_put": "etag"},  # type: ignore[arg-type]
            client_options=client,
            retry_config=retry,
        )
    if url.scheme == "az":
        _refuse(url, StoreOptions(region=options.region), region=True)
        return AzureStore(
            url.container,
            prefix=prefix,
            config=given,  # type: ignore[arg-type]
            client_options=client,
            retry_config=retry,
        )
    _refuse(url, options, region=True)
    return GCSStore(
        url.container,
        prefix=prefix,
        config=given,  # type: ignore[arg-type]
        client_options=client,
        retry_config=retry,
    )


def _client(url: address.StoreUrl, options: StoreOptions, seconds: float) -> "ClientConfig":
    environ: Mapping[str, str] = {} if options.credentials else os.environ
    names = _ENDPOINTS.get(url.scheme, ())
    from_environment = next((environ[name] for name in names if environ.get(name)), None)
    endpoint = options.endpoint or from_environment
    allowed = options.allow_http or environ.get(ALLOW_HTTP, "").lower() in ("1", "true")
    if endpoint is not None:
        scheme = endpoint.partition("://")[0].lower()
        if scheme not in ("http", "https") or "@" in endpoint:
            raise StoreUrlError(
                f"{url}: the endpoint is no https://host[:port] without a user and a password"
            )
        if scheme == "http" and not allowed:
            raise StoreUrlError(
                f"{url}: the endpoint is plain http, where others can read and change what goes "
                f"by; give an https:// one, or ask for it (--allow-http, {ALLOW_HTTP}=true)"
            )
    return {
        "allow_http": allowed,
        "connect_timeout": timedelta(seconds=options.limits.connect_seconds),
        "timeout": timedelta(seconds=seconds),
    }


def _refuse(url: address.StoreUrl, options: StoreOptions, *, region: bool) -> None:
    if options.endpoint is not None:
        raise StoreUrlError(f"{url}: {url.scheme}:// takes no endpoint")
    if region and options.region is not None:
        raise StoreUrlError(f"{url}: {url.scheme}:// takes no region")
