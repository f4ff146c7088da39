"""Opens a store with credentials that are given: nothing of the environment's is mixed with them.

obstore reads the clouds' variables beside every setting that it is given. So each setting that
decides where requests go, or whose they are, is given here, be it with the cloud's default; and
keys come from a function, beside which obstore looks for no others.
"""

import json
import os
import tempfile
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Final

from trainsync.storage.objects.address import StoreUrl
from trainsync.storage.objects.errors import StoreUrlError
from trainsync.storage.objects.options import StoreOptions

if TYPE_CHECKING:
    from obstore.store import ClientConfig, ObjectStore, RetryConfig

_REGION: Final = "us-east-1"
_GOOGLE: Final = "https://storage.googleapis.com"
_GOOGLE_FILES: Final = ("GOOGLE_SERVICE_ACCOUNT", "GOOGLE_SERVICE_ACCOUNT_PATH")


def opened(
    url: StoreUrl, options: StoreOptions, client: "ClientConfig", retry: "RetryConfig"
) -> "ObjectStore":
    """The store of ``url``, with ``options.credentials``.

    Raises:
        StoreUrlError: a credential is missing.
        Exception: obstore's, of a wrong one.
    """
    from obstore.store import AzureStore, GCSStore, S3Store

    given = {_short(name): value for name, value in options.credentials.items()}
    common: dict[str, Any] = {
        "prefix": url.prefix or None,
        "client_options": {**client, "allow_invalid_certificates": False},
        "retry_config": retry,
    }
    if url.scheme == "s3":
        config, keys = _s3(url, options, given)
        return S3Store(url.container, config=config, credential_provider=lambda: keys, **common)
    if url.scheme == "az":
        config, keys = _azure(url, options, given)
        if keys is None:
            return AzureStore(url.container, config=config, **common)
        return AzureStore(url.container, config=config, credential_provider=lambda: keys, **common)

    def make(config: Any) -> "ObjectStore":
        return GCSStore(url.container, config=config, **common)

    return _google(given, make)


def _s3(url: StoreUrl, options: StoreOptions, given: dict[str, str]) -> tuple[Any, Any]:
    region = options.region or _REGION
    endpoint = options.endpoint or f"https://s3.{region}.amazonaws.com"
    keys = {
        "access_key_id": _taken(url, given, "access_key_id", "AWS_ACCESS_KEY_ID"),
        "secret_access_key": _taken(url, given, "secret_access_key", "AWS_SECRET_ACCESS_KEY"),
        "token": given.pop("session_token", None),
        "expires_at": None,
    }
    config = {
        **given,  # nothing that is known: obstore refuses it
        "region": region,
        "endpoint": endpoint,
        "aws_endpoint_url_s3": endpoint,
        "skip_signature": False,
        "virtual_hosted_style_request": False,
        "s3_express": False,
        "conditional_put": "etag",
    }
    return config, keys


def _azure(url: StoreUrl, options: StoreOptions, given: dict[str, str]) -> tuple[Any, Any]:
    account = _taken(url, given, "account_name", "AZURE_STORAGE_ACCOUNT_NAME")
    key = given.pop("account_key", None)
    config = {
        **given,
        "account_name": account,
        "endpoint": options.endpoint or f"https://{account}.blob.core.windows.net",
        "use_emulator": False,
        "use_fabric_endpoint": False,
        "skip_signature": False,
    }
    return config, None if key is None else {"access_key": key, "expires_at": None}


def _google(given: dict[str, str], make: "Callable[[Any], ObjectStore]") -> "ObjectStore":
    """Beside a key obstore refuses a file of one, which the environment may name: then the key is
    given as a file, too, for as long as it opens the store."""
    text = given.pop("service_account_key", "")
    config: dict[str, Any] = {**given, "base_url": _google_url(text), "skip_signature": False}
    if not any(os.environ.get(name) for name in _GOOGLE_FILES):
        return make({**config, "service_account_key": text})
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:  # readable by its owner alone
        file.write(text)
        file.flush()
        return make({**config, "service_account": file.name})


def _google_url(text: str) -> str:
    try:
        found = json.loads(text)
    except ValueError:
        return _GOOGLE  # obstore refuses the key
    said = found.get("gcs_base_url") if isinstance(found, Mapping) else None
    return said if isinstance(said, str) else _GOOGLE


def _short(name: str) -> str:
    for prefix in ("aws_", "azure_storage_", "google_"):
        name = name.removeprefix(prefix)
    return name


def _taken(url: StoreUrl, given: dict[str, str], name: str, shown: str) -> str:
    value = given.pop(name, None)
    if not value:
        raise StoreUrlError(f"{url}: {shown} is missing among the credentials that are given")
    return value
