"""How publishing a version went."""

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class PublishReport:
    """How one rank's part in publishing a version went.

    Attributes:
        version: the global step.
        seconds: for which this rank was kept from training.
        bytes: that this rank sent or staged; with ``nccl`` and ``store`` rank 0 sends them all.
        lost: explorers that did not get it, and why; they may come back. Known to rank 0, with
            ``nccl``.
        refused: explorers whose model it does not fit, and why; they keep what they serve. Known
            as ``lost`` is.
        passes: how often the weights were sent: more than once when an explorer was lost, or not
            all could take them the same way. Known as ``lost`` is.
        group: explorers that got them from GPU to GPU. Known as ``lost`` is.
        same_host: explorers that read them from shared memory. Known as ``lost`` is.
        delta: explorers that got only what changed. Known as ``lost`` is.
        delta_bytes: what those got; 0 when none did. Next to ``bytes`` it says whether a delta
            pays. With ``store`` what was put, if it was a delta.
        aborted: with ``store``, why the version is not published: the store was away, or not in
            time. Explorers keep the version before, and the pace goes on without it. Known to
            rank 0; empty where it is.
        delta_off: with ``sync.delta``, why what changed is not looked for at present: too much
            changes each time, so that versions go in full, as fast as without. It begins again by
            itself. Empty while it is looked for. With ``memory`` on every rank, of its own share.
    """

    version: int
    seconds: float
    bytes: int
    lost: Mapping[str, str] = field(default_factory=dict)
    refused: Mapping[str, str] = field(default_factory=dict)
    passes: int = 1
    same_host: tuple[str, ...] = ()
    delta: tuple[str, ...] = ()
    delta_bytes: int = 0
    group: tuple[str, ...] = ()
    delta_off: str = ""
    aborted: str = ""
