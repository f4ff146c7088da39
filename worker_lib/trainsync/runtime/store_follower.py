"""An explorer that has nothing of a run but the store of its weights."""

import os
import time
from collections.abc import Mapping
from types import TracebackType
from typing import Final, Self

import torch

from trainsync.api import env
from trainsync.runtime.errors import SettingsError
from trainsync.runtime.sync_store import read_sync_store
from trainsync.weights.errors import WeightsError, WeightsReplacedError, WeightsUnavailableError
from trainsync.weights.transports.anchors.index import VersionRow
from trainsync.weights.transports.anchors.reader import AnchorReader
from trainsync.weights.transports.base import Weights, meta_of

_POLL_SECONDS: Final = 1.0


class StoreFollower:
    """Versions that a run publishes by ``sync.method: store``, without Ray and without a monitor.

        with StoreFollower("s3://my-bucket/runs/a", region="eu-central-1") as follower:
            while (weights := follower.next(timeout=600)) is not None:
                model.load_state_dict(weights.state_dict)

    The run does not know of it: training does not wait, no status names it, and the store keeps
    what it needs for as long as any version. It may only read. Two models are held in memory. One
    thread.

    Args:
        url: of the store; None: it and the other arguments as the environment says
            (``TRAINSYNC_SYNC_STORE_URL`` and its neighbours). Credentials are of the environment.
        endpoint: of a server of your own.
        allow_http: whether that may be without encryption.
        expected: what the model takes, say its ``state_dict()``; other weights are refused. None:
            anything.
        timeout: seconds for each version, after which the store is given up.

    Raises:
        SettingsError: the store cannot be opened, or is not named.
        DeltaError: numba is not there.
    """

    def __init__(
        self,
        url: str | None = None,
        *,
        endpoint: str | None = None,
        region: str | None = None,
        allow_http: bool = False,
        expected: Mapping[str, torch.Tensor] | None = None,
        timeout: float = 600.0,
    ) -> None:
        given = {
            env.SYNC_STORE_URL: url,
            env.SYNC_STORE_ENDPOINT: endpoint,
            env.SYNC_STORE_REGION: region,
            env.SYNC_STORE_ALLOW_HTTP: "true" if allow_http else None,
        }
        said = {name: value for name, value in given.items() if value is not None}
        place = read_sync_store(os.environ if url is None and not said else said)
        if place is None:
            raise SettingsError(
                "no store is named: expected url, such as s3://bucket/prefix, or "
                f"{env.SYNC_STORE_URL} in the environment"
            )
        metas = None if expected is None else [meta_of(*named) for named in expected.items()]
        self._timeout = timeout
        self._reader = AnchorReader(place.open(timeout), metas)
        self._last: tuple[int, int, str] | None = None

    def next(self, timeout: float) -> Weights | None:
        """The newest version, once it is another one than was given last, every byte verified.

        A version that a new attempt publishes may have a lower number. Its tensors are valid until
        the next call but one.

        Args:
            timeout: seconds; the store is asked each second.

        Returns:
            None when no other version was published within ``timeout``.

        Raises:
            WeightsUnavailableError, WeightsReplacedError: the store did not answer, or not give the
                version, until then.
            DigestMismatchError, InconsistentUploadError, SchemaMismatchError: see `AnchorReader`.
        """
        deadline = time.monotonic() + timeout
        while True:
            problem: WeightsError | None = None
            try:
                row = self._reader.newest()
                if row is not None and _name(row) != self._last:
                    weights = self._reader.fetch(row.weight_version, row.digest, self._timeout)
                    self._last = _name(row)
                    return weights
            except (WeightsReplacedError, WeightsUnavailableError) as error:
                problem = error  # a newer one is there, or soon
            left = deadline - time.monotonic()
            if left <= 0:
                if problem is not None:
                    raise problem
                return None
            time.sleep(min(left, _POLL_SECONDS))

    def close(self) -> None:
        """End its threads. What was given last stays valid."""
        self._reader.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def _name(row: VersionRow) -> tuple[int, int, str]:
    return row.attempt, row.weight_version, row.digest
