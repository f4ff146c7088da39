"""Settings of the mirror, by `trainsync.api.mirror`."""

from dataclasses import dataclass


@dataclass(frozen=True)
class MirrorSettings:
    """As in the spec; credentials are in the environment."""

    url: str
    endpoint: str | None = None
    region: str | None = None
    allow_http: bool = False
    keep_last: int = 3
    keep_every: int | None = None
    upload_bytes_per_second: int = 0
