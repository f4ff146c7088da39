"""Upload a sharded model from rank 0 alone, which gathers it with the help of the other ranks."""

import contextlib
import time
from collections.abc import Iterator
from typing import Any, Final

import torch

from trainsync.engines.engine import LoRAWeights
from trainsync.engines.errors import GatherFailedError
from trainsync.engines.full_tensors import other_names
from trainsync.engines.gather_ahead import GatherAhead, GatherAlong
from trainsync.engines.module_engine import TrainedModule
from trainsync.engines.rank_line import RankLine
from trainsync.engines.sent_tensors import joined, sent_tensors
from trainsync.weights.stream_source import Value
from trainsync.weights.upload import Uploaded, Uploader

_LATE_SECONDS: Final = 5.0  # more than a rank may be late after its own deadline


class GatheredUpload:
    """What one rank keeps from version to version. All ranks make it, and use it, together."""

    def __init__(self) -> None:
        self._line: RankLine | None = None
        self._seconds = 0.0  # bound of the line
        self._uploader = Uploader(0, 1)

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
            timeout: seconds in all, equal on all ranks, which hear of one another's end up to 5 s
                later; a rank that stops while rank 0 cannot upload is known after twice that.

        Raises:
            GatherFailedError: a weight could not be gathered on this rank, or not in time.
            TrainerRankFailedError: another rank failed, or is gone; says which, if it could.
            What `Uploader.upload_stream` raises, on rank 0.
        """
        started = time.monotonic()
        line = self._line_for(timeout)
        uploaded = Uploaded(version, published=False, bytes=0, seconds=0.0)
        problem: Exception | None = None

        def gather() -> Iterator[tuple[str, Value]]:
            return sent_tensors(TrainedModule(module, lora=lora))

        try:
            if line.rank == 0:
                gathered = GatherAhead(gather, timeout)
                uploaded = self._lead(gathered, module, synchronizer, version, started + timeout)
            else:
                _follow(GatherAlong(gather), timeout)
        except Exception as error:  # noqa: BLE001 - raised by `agree`, here and there
            problem = error
        left = max(0.0, started + timeout - time.monotonic())
        line.agree(problem, left + _LATE_SECONDS, f"uploading version {version}")
        return Uploaded(version, uploaded.published, uploaded.bytes, time.monotonic() - started)

    def _lead(
        self,
        gathered: GatherAhead[Value],
        module: torch.nn.Module,
        synchronizer: Any,
        version: int,
        end: float,
    ) -> Uploaded:
        try:
            seconds = max(0.0, end - time.monotonic())
            return self._uploader.upload_stream(
                joined(gathered), synchronizer, version, seconds, other_names(module)
            )
        except BaseException:
            # The other ranks gather to the end, and so must this one.
            with contextlib.suppress(GatherFailedError):
                gathered.drain(max(0.0, end - time.monotonic()))
            raise

    def _line_for(self, seconds: float) -> RankLine:
        if self._line is None or self._seconds < seconds:
            if self._line is not None:
                self._line.close()
            self._line, self._seconds = RankLine(seconds + _LATE_SECONDS), seconds
        return self._line


def _follow(along: GatherAlong, seconds: float) -> None:
    if not along.wait(seconds):
        raise GatherFailedError(
            f"the weights were not gathered within {seconds:.3g} s: a trainer rank is gone, was "
            "stopped or does not come along"
        )
    if along.problem is not None:
        raise along.problem
