"""The kinds of servers that an agent drives."""

from pathlib import Path
from typing import Final, Literal, cast, get_args

from trainsync.engines.servers.base import PauseMode
from trainsync.engines.servers.sglang import SGLangPauseMode, SGLangServer
from trainsync.engines.servers.vllm import VLLMServer

EngineKind = Literal["vllm", "sglang"]

PAUSES: Final[dict[EngineKind, tuple[PauseMode, ...]]] = {
    "vllm": get_args(PauseMode),
    "sglang": get_args(SGLangPauseMode),
}
"""The pauses that each kind has."""


def driver_of(
    engine: EngineKind,
    url: str,
    memory: Path,
    *,
    timeout: float,
    pause: PauseMode = "keep",
) -> VLLMServer | SGLangServer:
    """A driver of one server.

    Args:
        memory: the memory file system in which versions are staged.
        timeout: see the drivers.
        pause: one of `PAUSES`.

    Raises:
        ValueError: the engine has no such pause.
    """
    if engine == "vllm":
        return VLLMServer(url, pause=pause, timeout=timeout)
    mode = cast(SGLangPauseMode, pause)  # the driver checks it
    return SGLangServer(url, pause=mode, timeout=timeout, memory=memory)
