"""Options of a store beside its URL: endpoint, region, limits."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from trainsync.storage.objects.bucket import Limits


@dataclass(frozen=True)
class StoreOptions:
    """Options beside the URL; those not given come from the environment.

    With credentials none do: the environment's may be of another account or server.

    Args:
        endpoint: of a store that is not the cloud's own; ``https://…``.
        region: S3's.
        allow_http: whether an endpoint may be ``http://…``, where others can read and change what
            goes by.
        credentials: obstore's settings of the cloud, such as ``access_key_id``.
    """

    endpoint: str | None = None
    region: str | None = None
    allow_http: bool = False
    credentials: Mapping[str, str] = field(default_factory=dict, repr=False)
    limits: Limits = field(default_factory=Limits)
