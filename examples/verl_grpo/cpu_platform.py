"""The platform that verl does not have: a CPU, on which its engines run without a GPU.

`set_platform(CPUPlatform())` before ``verl.workers.engine`` is imported, which looks at it once; or
by verl's own plug-in variables, for every process of a job::

    VERL_USE_EXTERNAL_MODULES=verl_grpo.cpu_platform VERL_PLATFORM=cpu
"""

import contextlib
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import torch
from verl.plugin.platform import PlatformBase, PlatformRegistry


@PlatformRegistry.register(platform="cpu")
class CPUPlatform(PlatformBase):
    """What verl asks its platform for, answered for a CPU."""

    device_name = "cpu"
    vendor_name = "cpu"

    @property
    def device_module(self) -> ModuleType:
        """verl compares it with ``torch.cpu``."""
        return torch.cpu

    def is_available(self) -> bool:
        """Whether there is a device apart from the CPU."""
        return False

    def current_device(self) -> Any:
        """Not a number, as verl has it: torch takes that for a GPU's."""
        return torch.device("cpu")

    def device_count(self) -> int:
        """One a process."""
        return 1

    def get_device_capability(self, device_index: int = 0) -> tuple[None, None]:
        """A CPU has none."""
        return None, None

    def communication_backend_name(self) -> str:
        """Of torch.distributed."""
        return "gloo"

    def visible_devices_envvar(self) -> str:
        """A name is wanted; nothing reads the variable."""
        return "CPU_VISIBLE_DEVICES"

    def ray_resource_name(self) -> str:
        """What verl's pools count, for which Ray is told of as many as there are workers."""
        return "GPU"

    def ray_noset_envvars(self) -> list[str]:
        """None: Ray hides no CPU from a process."""
        return []

    def is_ipc_supported(self) -> bool:
        """Of GPU memory."""
        return False

    def cudart(self) -> None:
        """A CPU has none."""

    @contextlib.contextmanager
    def nvtx_range(self, msg: str) -> Iterator[None]:
        """Without a profiler of GPUs there is nothing to mark."""
        yield

    def _nothing(self, *args: Any, **kwargs: Any) -> None:
        return None

    set_device = synchronize = manual_seed = manual_seed_all = _nothing
    set_allocator_settings = empty_cache = profiler_start = profiler_stop = _nothing
