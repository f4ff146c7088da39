"""Ranks of torch.distributed on this machine, forked from a server that has imported torch once."""

import multiprocessing
import os
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Any

from tests.distributed.processes.forked import CONTEXT, preload
from tests.ports import port_of, reserved_port

preload("trainsync.engines.fsdp.state_dicts")


@dataclass(frozen=True)
class Rank:
    """A rank's end: its result, its traceback, or the signal that killed the rank."""

    exit_code: int | None
    value: Any
    error: str | None


def run_ranks(
    function: Callable[..., Any], *arguments: Any, world_size: int = 2, seconds: float = 90
) -> list[Rank]:
    """Run ``function(*arguments)`` on ranks with torchrun's environment; ends all ranks.

    ``function`` must be importable by name. Ranks end without leaving the process group, so that a
    rank does not wait for a lost member.
    """
    with reserved_port() as reservation:
        return _run_ranks(function, arguments, world_size, seconds, port_of(reservation))


def _run_ranks(
    function: Callable[..., Any],
    arguments: tuple[Any, ...],
    world_size: int,
    seconds: float,
    port: int,
) -> list[Rank]:
    processes, readers = [], []
    for rank in range(world_size):
        reader, writer = CONTEXT.Pipe(duplex=False)
        environ = {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(world_size),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
        }
        process = CONTEXT.Process(target=_rank, args=(writer, environ, function, arguments))
        process.start()
        writer.close()
        processes.append(process)
        readers.append(reader)
    try:
        deadline = time.monotonic() + seconds
        values: dict[int, tuple[Any, str | None]] = {}
        pending = dict(enumerate(readers))
        while pending and (left := deadline - time.monotonic()) > 0:
            ready = wait(list(pending.values()), left)
            for rank in [rank for rank, reader in pending.items() if reader in ready]:
                values[rank] = _receive(pending.pop(rank))
        for process in processes:
            process.join(max(0.0, deadline - time.monotonic()))
    finally:
        for process in processes:
            process.kill()
            process.join(10)
    return [
        Rank(process.exitcode, *values.get(rank, (None, "timed out")))
        for rank, process in enumerate(processes)
    ]


def values_of(ranks: list[Rank]) -> list[Any]:
    """Results of ranks, all of which must have succeeded."""
    for number, rank in enumerate(ranks):
        assert rank.error is None, f"rank {number}: {rank.error}"
        assert rank.exit_code == 0, f"rank {number} ended with {rank.exit_code}"
    return [rank.value for rank in ranks]


def _receive(reader: Connection) -> tuple[Any, str | None]:
    try:
        value, error = reader.recv()
    except EOFError:
        return None, "ended without a result"
    return value, error


def _rank(
    writer: Connection,
    environ: dict[str, str],
    function: Callable[..., Any],
    arguments: tuple[Any, ...],
) -> None:
    for name in [name for name in os.environ if name.startswith("TRAINSYNC_")]:
        del os.environ[name]
    os.environ.update(environ)
    import torch

    torch.set_num_threads(1)
    try:
        writer.send((function(*arguments), None))
        code = 0
    except BaseException:  # noqa: BLE001 - the test shows it
        writer.send((None, traceback.format_exc()))
        code = 1
    writer.close()
    for child in multiprocessing.active_children():
        child.kill()  # Megatron keeps a writer process of 600 MB, which never ends
    os._exit(code)
