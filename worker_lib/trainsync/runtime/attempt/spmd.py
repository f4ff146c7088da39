"""One claim, and one answer, for all ranks that were started side by side (torchrun)."""

import json
import sys
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import TYPE_CHECKING, Final

from trainsync.api import env
from trainsync.dist.errors import PeerError
from trainsync.runtime.errors import JoinError, SettingsError

if TYPE_CHECKING:
    from trainsync.dist.rank_zero import RankZero

Identity = tuple[int, str]  # attempt, incarnation
_CLAIM_SECONDS: Final = 600.0  # for the slowest rank to come, and for the monitor to answer


def is_spmd(environ: Mapping[str, str]) -> bool:
    """Whether this process is one of several that all call `RunContext.from_env`.

    Raises:
        SettingsError: the variable is no number.
    """
    text = environ.get("WORLD_SIZE") or "1"
    try:
        return int(text) > 1
    except ValueError:
        raise SettingsError(f"WORLD_SIZE is {text!r}; expected a whole number") from None


def claim_once(claim: Callable[[], Identity]) -> tuple[Identity, bool]:
    """Let rank 0 ``claim`` and tell the others; returns the claim, and whether it was made here.

    Raises:
        JoinError: torch.distributed is not initialised, or rank 0 could not claim (on every rank).
    """
    is_first = _torch_distributed().get_rank() == 0
    # Here, and not above: it imports torch.
    from trainsync.dist.group_agreement import open_agreement

    ranks = open_agreement("claim", _CLAIM_SECONDS)
    try:
        answers = ranks.do("claiming the attempt", lambda: json.dumps(claim()) if is_first else "")
    except PeerError as error:
        raise JoinError(f"rank 0 could not claim the attempt: {error}") from error
    attempt, incarnation = json.loads(answers[0])
    return (attempt, incarnation), is_first


def ask_once(what: str, ask: Callable[[], str], timeout: float) -> str:
    """`RankZero.ask_once`; without a process group of several ranks this process asks.

    Raises:
        JoinError: rank 0 could not ask, is gone, or said nothing in time. On rank 0, what ``ask``
            raises.
    """
    ranks = rank_zero()
    if ranks is None:
        return ask()
    try:
        return ranks.ask_once(what, ask, timeout)
    except PeerError as error:
        raise JoinError(str(error)) from error


def rank_zero() -> "RankZero | None":
    """Rank 0's words for the other ranks; None without a process group of several ranks."""
    # Looked up, not imported: a process that has not imported torch has no process group either.
    dist = sys.modules.get("torch.distributed")
    if dist is None or not dist.is_available() or not dist.is_initialized():
        return None
    if dist.get_world_size() == 1:
        return None
    from trainsync.dist.rank_zero import open_rank_zero

    return open_rank_zero()


def rank_and_world_size(environ: Mapping[str, str], *, alone: bool) -> tuple[int, int]:
    """The rank and world size of the initialised default process group, else of ``environ``.

    Args:
        alone: no other process can take this one for itself; then (0, 1) if nothing says more.

    Raises:
        SettingsError: the variables are no rank and world size.
        JoinError: nothing says it.
    """
    dist = sys.modules.get("torch.distributed")
    if dist is not None and dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    for names in ((env.RANK, env.WORLD_SIZE), ("RANK", "WORLD_SIZE")):
        rank, world_size = (environ.get(name) for name in names)
        if rank and world_size:
            return _checked(names, rank, world_size)
        if names[0] == env.RANK and (rank or world_size):
            raise SettingsError(f"{' and '.join(names)} come together; expected both or none")
    if alone:
        return 0, 1
    raise JoinError(
        "which rank this process is, and of how many, is not known: torch.distributed is not "
        f"initialised, and neither {env.RANK} and {env.WORLD_SIZE} nor RANK and WORLD_SIZE are "
        "set; expected coordinator(rank=..., world_size=...)"
    )


def _checked(names: tuple[str, str], rank: str, world_size: str) -> tuple[int, int]:
    try:
        number, ranks = int(rank), int(world_size)
    except ValueError:
        number, ranks = 0, 0
    if not 0 <= number < ranks:
        raise SettingsError(
            f"{names[0]} is {rank!r} and {names[1]} is {world_size!r}; expected a rank of 0 to one "
            "less than the world size"
        )
    return number, ranks


def _torch_distributed() -> ModuleType:
    # Looked up, not imported: a process that has not imported torch has no process group either.
    dist = sys.modules.get("torch.distributed")
    if dist is None or not dist.is_available() or not dist.is_initialized():
        raise JoinError(
            "WORLD_SIZE is greater than 1, but torch.distributed is not initialised: call "
            "init_process_group before RunContext.from_env, so that rank 0 claims for all ranks"
        )
    return dist
