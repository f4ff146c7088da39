"""One claim for all ranks of a job whose processes were started side by side (torchrun)."""

import json
import sys
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Final

from trainsync.runtime.errors import JoinError

Identity = tuple[int, str]  # attempt, incarnation

_CLAIM_SECONDS: Final = 600.0  # for the slowest rank to come, and for the monitor to answer


def is_spmd(environ: Mapping[str, str]) -> bool:
    """Whether this process is one of several that all call `RunContext.from_env`."""
    return int(environ.get("WORLD_SIZE") or 1) > 1


def claim_once(claim: Callable[[], Identity]) -> tuple[Identity, bool]:
    """Let rank 0 ``claim`` and tell the others; returns the claim, and whether it was made here.

    Raises:
        JoinError: torch.distributed is not initialised, or rank 0 could not claim (on every rank).
    """
    is_first = _torch_distributed().get_rank() == 0
    # Here, and not above: it imports torch.
    from trainsync.dist.agreement import open_agreement
    from trainsync.dist.errors import PeerError

    ranks = open_agreement("claim", _CLAIM_SECONDS)
    try:
        answers = ranks.do("claiming the attempt", lambda: json.dumps(claim()) if is_first else "")
    except PeerError as error:
        raise JoinError(f"rank 0 could not claim the attempt: {error}") from error
    attempt, incarnation = json.loads(answers[0])
    return (attempt, incarnation), is_first


def rank_and_world_size() -> tuple[int, int]:
    """Of the initialised default process group; (0, 1) when there is none."""
    dist = sys.modules.get("torch.distributed")
    if dist is None or not dist.is_available() or not dist.is_initialized():
        return 0, 1
    return dist.get_rank(), dist.get_world_size()


def _torch_distributed() -> ModuleType:
    # Looked up, not imported: a process that has not imported torch has no process group either.
    dist = sys.modules.get("torch.distributed")
    if dist is None or not dist.is_available() or not dist.is_initialized():
        raise JoinError(
            "WORLD_SIZE is greater than 1, but torch.distributed is not initialised: call "
            "init_process_group before RunContext.from_env, so that rank 0 claims for all ranks"
        )
    return dist
