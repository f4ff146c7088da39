"""The kinds of servers that an agent drives."""

from pathlib import Path
from typing import Final, Literal, cast, get_args

from trainsync.engines.servers.adapter import Adapter
from trainsync.engines.servers.base import OwnedDriver, PauseMode
from trainsync.engines.servers.custom import load_driver
from trainsync.engines.servers.sglang import SGLangPauseMode, SGLangServer
from trainsync.engines.servers.sglang_routes.base import SGLangRoute
from trainsync.engines.servers.vllm import VLLMServer
from trainsync.engines.servers.vllm_adapter import VLLMAdapterServer

EngineKind = Literal["vllm", "sglang", "custom"]

PAUSES: Final[dict[EngineKind, tuple[PauseMode, ...]]] = {
    "vllm": get_args(PauseMode),
    "sglang": get_args(SGLangPauseMode),
    "custom": get_args(PauseMode),
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
    driver: str | None = None,
    sglang_route: SGLangRoute = "disk",
) -> OwnedDriver:
    """A driver of one server.

    Args:
        memory: the memory file system in which versions are staged.
        timeout: see the drivers.
        pause: one of `PAUSES`.
        adapter: of vLLM, which versions are of; None: they are of the whole model.
        driver: of an engine ``custom``, as ``package.module:function``.
        sglang_route: of SGLang, by which versions come to the server.

    Raises:
        ValueError: the engine has no such pause or route, or takes no adapter, or has no driver.
        DriverError: the driver cannot be had.
    """
    if sglang_route != "disk" and engine != "sglang":
        raise ValueError(f"{engine} has no route {sglang_route}")
    if adapter is not None:
        if engine != "vllm":
            raise ValueError(f"{engine} takes no adapter")
        return VLLMAdapterServer(url, adapter, memory, pause=pause, timeout=timeout)
    if engine == "custom":
        if driver is None:
            raise ValueError("a custom engine has no driver")
        return load_driver(driver)(url, timeout=timeout, pause=pause, memory=memory)
    if engine == "vllm":
        return VLLMServer(url, pause=pause, timeout=timeout)
    mode = cast(SGLangPauseMode, pause)  # the driver checks it
    return SGLangServer(url, pause=mode, timeout=timeout, memory=memory, route=sglang_route)
