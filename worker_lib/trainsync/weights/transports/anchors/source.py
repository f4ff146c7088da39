"""The method ``store`` on the explorer's side: versions out of a bucket."""

import logging
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeoutError
from typing import Final

from trainsync.storage.objects.bucket import ObjectBucket
from trainsync.weights.buckets.layout import TensorMeta
from trainsync.weights.delta.compiling import prepare
from trainsync.weights.errors import WeightsUnavailableError
from trainsync.weights.transports.anchors.reader import AnchorReader, NamesWay, ReadsObject
from trainsync.weights.transports.base import Weights, WeightSource
from trainsync.weights.versions import STORE, Published

_LOG = logging.getLogger(__name__)
_COMPILE_SECONDS: Final = 60.0


class StoreSource(WeightSource):
    """Stages what was announced while the version before is served; needs to read alone.

    Args:
        expected: what the model takes; other weights are refused. None: anything.
        read, way: see `AnchorReader`.

    Raises:
        DeltaError: numba is not there.
    """

    def __init__(
        self,
        bucket: ObjectBucket,
        *,
        expected: Sequence[TensorMeta] | None = None,
        read: ReadsObject | None = None,
        way: NamesWay | None = None,
    ) -> None:
        self._reader = AnchorReader(bucket, expected, read, way)
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="trainsync-ready")
        self._readying: Future[None] | None = None

    def fetch(self, published: Published, timeout: float) -> Weights:
        """See `WeightSource`."""
        meta = published.meta
        if meta.method != STORE:
            raise WeightsUnavailableError(
                f"version {meta.version} was published by {meta.method}, not through a store"
            )
        started = time.monotonic()
        self.wait_ready(timeout)
        left = max(0.0, timeout - (time.monotonic() - started))
        return self._reader.fetch(meta.version, meta.digest, left)

    def proof(self, published: Published, timeout: float) -> bytes | None:
        """The proof of a published version; None: it has none. Raises as `fetch`."""
        return self._reader.proof(published.meta.version, published.meta.digest, timeout)

    def copied(self, weights: Weights) -> None:
        """Copy them for the next delta to change, behind the caller."""
        self._readying = self._pool.submit(self._make_ready)

    def wait_ready(self, timeout: float) -> None:
        """Until what was `copied` is ready for the next delta.

        Raises:
            WeightsUnavailableError: it is not within ``timeout`` seconds.
        """
        if self._readying is None:
            return
        try:
            self._readying.result(timeout)
        except FutureTimeoutError:
            raise WeightsUnavailableError("the version before is still being copied") from None
        except Exception as error:  # noqa: BLE001 - said; `fetch` copies what it needs by itself
            _LOG.warning("the version before is not copied ahead: %r", error)
        self._readying = None

    def _make_ready(self) -> None:
        prepare(_COMPILE_SECONDS, compact=True)  # else the first delta waits for it past its time
        self._reader.make_ready()

    def close(self) -> None:
        """End its threads."""
        self._pool.shutdown(wait=True, cancel_futures=True)
        self._reader.close()
