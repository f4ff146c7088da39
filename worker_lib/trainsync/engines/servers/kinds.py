"""The kinds of servers that an agent drives."""

from pathlib import Path
from typing import Final, Literal, cast, get_args

from trainsync.engines.servers.adapter import Adapter
from trainsync.engines.servers.base import PauseMode
from trainsync.engines.servers.sglang import SGLangPauseMode, SGLangServer
from trainsync.engines.servers.vllm import VLLMServer
from trainsync.engines.servers.vllm_adapter import VLLMAdapterServer

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
    adapter: Adapter | None = None,
) -> VLLMServer | SGLangServer:
    """A driver of one server.

    Args:
        memory: the memory file system in which versions are staged.
        timeout: see the drivers.
        pause: one of `PAUSES`.
        adapter: of vLLM, which versions are of; None: they are of the whole model.

    Raises:
        ValueError: the engine has no such pause, or takes no adapter.
    """
    if adapter is not None:
        if engine != "vllm":
            raise ValueError(f"{engine} takes no adapter")
        return VLLMAdapterServer(url, adapter, memory, pause=pause, timeout=timeout)
    if engine == "vllm":
        return VLLMServer(url, pause=pause, timeout=timeout)
    mode = cast(SGLangPauseMode, pause)  # the driver checks it
    return SGLangServer(url, pause=mode, timeout=timeout, memory=memory)
