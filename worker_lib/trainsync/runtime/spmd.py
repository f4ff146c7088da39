"""One claim for all ranks of a job whose processes were started side by side (torchrun)."""

import sys
from collections.abc import Callable, Mapping
from types import ModuleType

from trainsync.runtime.errors import JoinError

Identity = tuple[int, str]  # attempt, incarnation


def is_spmd(environ: Mapping[str, str]) -> bool:
    """Whether this process is one of several that all call `RunContext.from_env`."""
    return int(environ.get("WORLD_SIZE") or 1) > 1


def claim_once(claim: Callable[[], Identity]) -> tuple[Identity, bool]:
    """Let rank 0 ``claim`` and tell the others; returns the claim, and whether it was made here.

    Raises:
        JoinError: torch.distributed is not initialised, or rank 0 could not claim (on every rank).
    """
    dist = _torch_distributed()
    if dist.get_rank() != 0:
        answer: list[Identity | str | None] = [None]
        dist.broadcast_object_list(answer, src=0)
        return _granted(answer[0]), False
    try:
        identity = claim()
    except Exception as error:
        dist.broadcast_object_list([f"{type(error).__name__}: {error}"], src=0)
        raise
    dist.broadcast_object_list([identity], src=0)
    return identity, True


def rank_and_world_size() -> tuple[int, int]:
    """Of the initialised default process group; (0, 1) when there is none."""
    dist = sys.modules.get("torch.distributed")
    if dist is None or not dist.is_available() or not dist.is_initialized():
        return 0, 1
    return dist.get_rank(), dist.get_world_size()


def _granted(answer: Identity | str | None) -> Identity:
    if isinstance(answer, tuple):
        return answer
    raise JoinError(f"rank 0 could not claim the attempt: {answer}")


def _torch_distributed() -> ModuleType:
    # Looked up, not imported: a process that has not imported torch has no process group either.
    dist = sys.modules.get("torch.distributed")
    if dist is None or not dist.is_available() or not dist.is_initialized():
        raise JoinError(
            "WORLD_SIZE is greater than 1, but torch.distributed is not initialised: call "
            "init_process_group before RunContext.from_env, so that rank 0 claims for all ranks"
        )
    return dist
