"""Listings of an S3 server as they were a while ago, as of stores that are not consistent."""

import re
import threading
import time
from dataclasses import dataclass, field
from typing import Final
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import unescape

_ENTRY: Final = re.compile(rb"<Contents>.*?</Contents>", re.DOTALL)
_FOLDER: Final = re.compile(rb"<CommonPrefixes>.*?</CommonPrefixes>", re.DOTALL)
_KEY: Final = re.compile(rb"<Key>(.*?)</Key>", re.DOTALL)
_PREFIX: Final = re.compile(rb"<Prefix>(.*?)</Prefix>", re.DOTALL)


@dataclass
class StaleListings:
    """Told of every request that succeeded; makes each listing ``lag`` seconds old while ``on``.

    What was put within the lag is missing, and what was removed within it is there still.
    """

    lag: float
    on: bool = False
    changed: int = 0
    """Listings that differed from the server's."""
    _born: dict[str, float] = field(default_factory=dict)
    _gone: dict[str, tuple[float, bytes]] = field(default_factory=dict)
    _entries: dict[str, bytes] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def __call__(self, method: str, path: str, body: bytes, data: bytes) -> bytes:
        """The body of the answer; see `FaultProxy.listing`."""
        url = urlsplit(path)
        query = parse_qs(url.query, keep_blank_values=True)
        key = unquote(url.path).lstrip("/").partition("/")[2]
        with self._lock:
            if method == "GET" and "list-type" in query:
                return self._old(data, query)
            if method == "DELETE":
                self._remove(key)
            elif method == "POST" and "delete" in query:
                for found in _KEY.findall(body):
                    self._remove(unescape(found.decode()))
            elif (method == "PUT" and "partNumber" not in query) or "uploadId" in query:
                self._born.setdefault(key, time.monotonic())
        return data

    def _remove(self, key: str) -> None:
        self._born.pop(key, None)
        if key in self._entries:
            self._gone[key] = (time.monotonic(), self._entries.pop(key))

    def _old(self, data: bytes, query: dict[str, list[str]]) -> bytes:
        now = time.monotonic()
        for entry in _ENTRY.findall(data):
            self._entries[_key_of(entry)] = entry
        if not self.on:
            return data

        def kept(match: re.Match[bytes]) -> bytes:
            young = now - self._born.get(_key_of(match[0]), -self.lag) < self.lag
            return b"" if young else match[0]

        def kept_folder(match: re.Match[bytes]) -> bytes:
            found = _PREFIX.search(match[0])
            folder = "" if found is None else unescape(found[1].decode())
            below = [born for key, born in self._born.items() if key.startswith(folder)]
            young = bool(below) and all(now - born < self.lag for born in below)
            return b"" if young else match[0]

        old = _FOLDER.sub(kept_folder, _ENTRY.sub(kept, data))
        prefix = query.get("prefix", [""])[0]
        ghosts = b"".join(
            entry
            for key, (when, entry) in sorted(self._gone.items())
            if now - when < self.lag
            and key.startswith(prefix)
            and key not in self._born
            and ("delimiter" not in query or "/" not in key[len(prefix) :])
        )
        old = old.replace(b"</ListBucketResult>", ghosts + b"</ListBucketResult>")
        self.changed += old != data
        return old


def _key_of(entry: bytes) -> str:
    found = _KEY.search(entry)
    assert found is not None, "each entry of a listing has a key"
    return unescape(found[1].decode())
