"""One claim, and one answer, for all ranks that were started side by side (torchrun)."""

import json
import logging
import sys
import time
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any, Final

from trainsync.api import env
from trainsync.runtime.errors import JoinError, SettingsError

logger = logging.getLogger(__name__)

Identity = tuple[int, str]  # attempt, incarnation
_LINGER_SECONDS: Final = 5.0
_TELL_SECONDS: Final = 10.0
_POLL_SECONDS: Final = (0.005, 0.1)  # first and longest pause between two looks

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


def ask_once(what: str, ask: Callable[[], str], timeout: float) -> str:
    """Rank 0 asks and leaves the answer for the others, which take it: all have the same.

    Without a process group of several ranks this process asks. Rank 0 does not wait for the others,
    which may not want to know; each rank's n-th call takes rank 0's n-th answer.

    Args:
        timeout: seconds that the others wait for rank 0.

    Raises:
        JoinError: rank 0 could not ask, or said nothing in time. On rank 0, what ``ask`` raises.
    """
    dist = sys.modules.get("torch.distributed")
    if dist is None or not dist.is_available() or not dist.is_initialized():
        return ask()
    rank, world_size = dist.get_rank(), dist.get_world_size()
    if world_size == 1:
        return ask()
    store: Any = dist.distributed_c10d._get_default_store()
    key = f"trainsync/{what}/{store.add(f'trainsync/{what}/calls/{rank}', 1)}"
    if rank == 0:
        try:
            answer = ask()
        except Exception as error:
            store.set(key, json.dumps({"error": f"{type(error).__name__}: {error}"}))
            _linger(store, key, world_size)
            raise
        store.set(key, json.dumps({"answer": answer}))
        return answer
    said = json.loads(_await(store, key, what, timeout))
    store.set(f"{key}/read/{rank}", "")
    if "error" in said:
        raise JoinError(f"{what}: rank 0 could not ask: {said['error']}")
    return str(said["answer"])


def _group() -> tuple[Any, int, int] | None:
    """torch.distributed, rank and world size; None without a process group of several ranks."""
    dist = sys.modules.get("torch.distributed")
    if dist is None or not dist.is_available() or not dist.is_initialized():
        return None
    world_size = dist.get_world_size()
    return (dist, dist.get_rank(), world_size) if world_size > 1 else None


def is_group() -> bool:
    """Whether this process is one of several ranks of torch.distributed."""
    return _group() is not None


def is_first() -> bool:
    """Whether this process is rank 0, or alone."""
    group = _group()
    return group is None or group[1] == 0


_TOLD: Final = 1000  # so many words are kept: with GPUs rank 0 may be many steps ahead
_told: list[str] = []


def tell(what: str, word: str) -> None:
    """Rank 0 leaves a word for the other ranks, which take it with `told`; it does not wait."""
    group = _group()
    if group is None:
        return
    store: Any = group[0].distributed_c10d._get_default_store()
    key = f"trainsync/told/{what}"
    store.set(key, word)
    if _told[-1:] != [key]:
        _told.append(key)
    while len(_told) > _TOLD:
        store.delete_key(_told.pop(0))


def told(what: str, timeout: float) -> str:
    """The word that rank 0 leaves for the other ranks, at most ``timeout`` seconds later.

    Raises:
        JoinError: it left none.
    """
    group = _group()
    if group is None:
        return ""
    store: Any = group[0].distributed_c10d._get_default_store()
    return _await(store, f"trainsync/told/{what}", what, timeout).decode()


def _linger(store: Any, key: str, world_size: int) -> None:
    """Rank 0 often hosts the store, and ends with what it raises: the others read it first."""
    deadline = time.monotonic() + _LINGER_SECONDS
    readers = [f"{key}/read/{rank}" for rank in range(1, world_size)]
    while not store.check(readers) and time.monotonic() < deadline:
        time.sleep(_POLL_SECONDS[0])


def _await(store: Any, key: str, what: str, timeout: float) -> bytes:
    # Looked at again and again: a blocking wait would keep the store from all else in this process.
    began, pause, told = time.monotonic(), _POLL_SECONDS[0], False
    try:
        while not store.check([key]):
            waited = time.monotonic() - began
            if waited > _TELL_SECONDS and not told:
                logger.warning("%s: waiting for rank 0, which has not asked yet", what)
                told = True
            if waited > timeout:
                raise JoinError(
                    f"{what}: rank 0 said nothing within {timeout:g} s; expected every rank to "
                    "make this call, or rank 0 alone"
                )
            time.sleep(pause)
            pause = min(2 * pause, _POLL_SECONDS[1])
        answer: bytes = store.get(key)
    except RuntimeError as error:
        raise JoinError(
            f"{what}: the store of the process group is gone (its host, mostly rank 0, ended?): "
            f"{error}"
        ) from error
    return answer


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
