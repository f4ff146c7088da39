"""A server's place in the memory that it shares with its agent."""

import hashlib
from typing import Final
from urllib.parse import urlsplit

_DIGITS: Final = 16
_LOCAL: Final = frozenset({"localhost", "127.0.0.1", "::1", "0.0.0.0"})  # noqa: S104 - of a URL


def place_of(url: str, *names: str) -> str:
    """Digits for files of a server, the same for all names of this host.

    Args:
        url: of the server.
        names: of what the files are for, where a server has several of a kind.
    """
    parts = urlsplit(url)
    host = "localhost" if parts.hostname in _LOCAL else parts.hostname
    port = parts.port or (443 if parts.scheme == "https" else 80)
    what = " ".join((f"{host}:{port}", *names))
    return hashlib.sha256(what.encode()).hexdigest()[:_DIGITS]
