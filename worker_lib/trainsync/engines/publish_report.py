"""What became of a version that was published."""

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class PublishReport:
    """How one rank's part in publishing a version went.

    Attributes:
        version: the global step.
        seconds: for which this rank was kept from training.
        bytes: that this rank sent or staged; with ``nccl`` rank 0 sends them all.
        lost: explorers that did not get it, and why; they may come back. Known to rank 0, with
            ``nccl``.
        refused: explorers whose model it does not fit, and why; they keep what they serve. Known
            as ``lost`` is.
    """

    version: int
    seconds: float
    bytes: int
    lost: Mapping[str, str] = field(default_factory=dict)
    refused: Mapping[str, str] = field(default_factory=dict)
