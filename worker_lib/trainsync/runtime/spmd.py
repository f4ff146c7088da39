"""One claim, and one answer, for all ranks that were started side by side (torchrun)."""

import json
import logging
import sys
import time
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any, Final

from trainsync.runtime.errors import JoinError

logger = logging.getLogger(__name__)

Identity = tuple[int, str]  # attempt, incarnation
_LINGER_SECONDS: Final = 5.0
_TELL_SECONDS: Final = 10.0
_POLL_SECONDS: Final = (0.005, 0.1)  # first and longest pause between two looks


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


def ask_once(what: str, ask: Callable[[], str], timeout: float) -> str:
    """Rank 0 asks and leaves the answer for the others, which take it: all have the same.

    Without a process group of several ranks this process asks. Rank 0 does not wait for the others,
    which may not want to know; each rank's n-th call takes rank 0's n-th answer.

    Args:
        timeout: seconds that the others wait for rank 0.

    Raises:
        JoinError: rank 0 could not ask, or said nothing in time. On rank 0, what ``ask`` raises.
    """
    rank, world_size = rank_and_world_size()
    if world_size == 1:
        return ask()
    store: Any = _torch_distributed().distributed_c10d._get_default_store()
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
