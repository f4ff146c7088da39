"""Upload a sharded model from rank 0 alone, which gathers it with the help of the other ranks."""

import time
from collections.abc import Iterator
from typing import Any, Final

import torch

from trainsync.dist.agreement import Agreement
from trainsync.engines.errors import GatherFailedError
from trainsync.engines.protocol import LoRAWeights
from trainsync.engines.publish.gathering import GatherAhead, GatherAlong
from trainsync.engines.publish.sent_tensors import joined, other_names, sent_tensors
from trainsync.engines.trainer_ranks import trainer_ranks
from trainsync.weights.buckets.tensor_stream import Value
from trainsync.weights.transports.object_store.upload import Uploaded, Uploader

_LATE_SECONDS: Final = 5.0  # more than a rank may be late after its own deadline


class GatheredUpload:
    """One rank's state from version to version. All ranks make it, and use it, together.

    Args:
        dtype: see `Uploader`.
        group: the process group of these ranks; None: the default one.
    """

    def __init__(self, dtype: torch.dtype | None = None, group: Any = None) -> None:
        self._ranks: Agreement | None = None
        self._seconds = 0.0  # bound of the messages
        self._dtype = dtype
        self._group = group
        self._uploader = Uploader(0, 1, dtype=dtype)

    def upload(
        self,
        module: torch.nn.Module,
        lora: LoRAWeights,
        synchronizer: Any,
        version: int,
        timeout: float,
    ) -> Uploaded:
        """Let rank 0 upload the whole of ``module``; on the others nothing is uploaded.

        Args:
            timeout: seconds of the upload, equal on all ranks. If it fails, all gather to the end,
                for as long again; so a rank that stops is known after twice that, and 5 s.

        Raises:
            GatherFailedError: a weight could not be gathered on this rank, or not in time. Others
                may wait in the gathering still, which would mix with what comes next in the
                process group: the ranks must end then, and be started anew.
            TrainerRankFailedError: another rank failed, or is gone; says which, if it could. Where
                that was in the gathering, or the rank is gone, the same holds.
            What `Uploader.upload_stream` raises, on rank 0. The gathering is over then, unless a
                note of the error says otherwise.
        """
        started = time.monotonic()
        ranks = self._ranks_for(timeout)
        end = time.monotonic() + 2 * timeout
        uploaded = Uploaded(version, published=False, bytes=0, seconds=0.0)
        problem: Exception | None = None

        def gather() -> Iterator[tuple[str, Value]]:
            return sent_tensors(module, lora, self._dtype, ranks.root)

        try:
            if ranks.rank == 0:
                gathered = GatherAhead(gather, timeout)
                uploaded = self._lead(gathered, module, lora, synchronizer, version, timeout)
            else:
                _follow(GatherAlong(gather), 2 * timeout)
        except Exception as error:  # noqa: BLE001 - raised by `agree`, here and there
            problem = error
        left = max(0.0, end - time.monotonic())
        ranks.agree("", problem, f"uploading version {version}", left + _LATE_SECONDS)
        return Uploaded(version, uploaded.published, uploaded.bytes, time.monotonic() - started)

    def _lead(
        self,
        gathered: GatherAhead[Value],
        module: torch.nn.Module,
        lora: LoRAWeights,
        synchronizer: Any,
        version: int,
        timeout: float,
    ) -> Uploaded:
        try:
            also = other_names(module, lora)
            return self._uploader.upload_stream(
                joined(gathered), synchronizer, version, timeout, also
            )
        except BaseException as error:
            # The other ranks gather to the end, and so must this one, though its time may be over.
            try:
                gathered.drain(timeout)
            except GatherFailedError as stuck:
                stuck.add_note(f"the upload had failed before: {type(error).__name__}: {error}")
                raise
            raise

    def _ranks_for(self, seconds: float) -> Agreement:
        if self._ranks is None or self._seconds < seconds:
            self._ranks = trainer_ranks(2 * seconds + _LATE_SECONDS, self._group)
            self._seconds = seconds
        return self._ranks


def _follow(along: GatherAlong, seconds: float) -> None:
    if not along.wait(seconds):
        raise GatherFailedError(
            f"the weights were not gathered within {seconds:.3g} s: a trainer rank is gone, was "
            "stopped or does not come along"
        )
    if along.problem is not None:
        raise along.problem
