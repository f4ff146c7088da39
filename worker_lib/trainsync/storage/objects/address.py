"""URLs of stores. The path is taken as it is written, as by ``aws s3``: nothing is decoded."""

import re
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Final

from trainsync.storage.objects.errors import StoreUrlError

_SCHEME: Final = re.compile(r"^([A-Za-z][A-Za-z0-9+.-]*)://(.*)$", re.DOTALL)
_CONTAINERS: Final = {
    "s3": re.compile(r"^[A-Za-z0-9][A-Za-z0-9._-]{1,253}[A-Za-z0-9]$"),
    "gs": re.compile(r"^[a-z0-9][a-z0-9._-]{1,220}[a-z0-9]$"),
    "az": re.compile(r"^[a-z0-9$][a-z0-9-]{1,61}[a-z0-9]$"),
}
_EXPECTED: Final = (
    "expected s3://bucket/prefix, gs://bucket/prefix, az://container/prefix or file:///directory"
)
_LONGEST_PREFIX: Final = 512
"""Of the 1,024 bytes that a key may have."""


@dataclass(frozen=True)
class StoreUrl:
    """Where a store is: ``container`` is the bucket (empty with ``file``), ``prefix`` has no slash
    at its ends."""

    scheme: str
    container: str
    prefix: str

    def __str__(self) -> str:
        parts = [part for part in (self.container, self.prefix) if part]
        return f"{self.scheme}://{'/' if self.scheme == 'file' else ''}{'/'.join(parts)}"


def is_url(text: str | Path) -> bool:
    """Whether ``text`` is meant as a URL, be it a good one; else it is a directory."""
    return isinstance(text, str) and _SCHEME.match(text) is not None


def parse(text: str) -> StoreUrl:
    """The store that ``text`` names.

    Raises:
        StoreUrlError: none; the message has nothing of what may be a password.
    """
    match = _SCHEME.match(text)
    if match is None:
        raise StoreUrlError(f"{_printable(text)} is no URL of a store: {_EXPECTED}")
    scheme, rest = match[1].lower(), match[2]
    container, _, prefix = rest.partition("/")
    if "@" in container:
        raise StoreUrlError(
            f"{scheme}://…: credentials are refused in a URL, which others may read; give them "
            "by the environment"
        )
    for sign in "?#":
        if sign in rest:
            raise StoreUrlError(
                f"{scheme}://{_printable(rest.partition(sign)[0])}…: {sign!r} is refused in the "
                "URL of a store; options go into the environment"
            )
    shown = f"{scheme}://{_printable(rest)}"
    if scheme != "file" and scheme not in _CONTAINERS:
        raise StoreUrlError(f"{shown}: no store is opened by {scheme}://; {_EXPECTED}")
    if scheme == "file":
        if container:
            raise StoreUrlError(f"{shown}: expected file:/// and an absolute path")
    elif _CONTAINERS[scheme].match(container) is None:
        raise StoreUrlError(f"{shown}: {container!r} can be no bucket's name; {_EXPECTED}")
    return StoreUrl(scheme, container, _checked(prefix.strip("/"), shown))


def _checked(prefix: str, shown: str) -> str:
    if len(prefix.encode()) > _LONGEST_PREFIX:
        raise StoreUrlError(f"{shown}: the prefix is longer than {_LONGEST_PREFIX} bytes")
    if any(ord(sign) < 32 or ord(sign) == 127 for sign in prefix):
        raise StoreUrlError(f"{shown}: a control character is refused in a prefix")
    if prefix and any(part in ("", ".", "..") for part in prefix.split("/")):
        raise StoreUrlError(f"{shown}: expected no empty part, '.' or '..' in the prefix")
    return str(PurePosixPath(prefix)) if prefix else ""


def _printable(text: str) -> str:
    return "".join(sign if sign.isprintable() else "?" for sign in text[:200])
