"""A CPU platform for verl, which has none, to run its engines without a GPU.

Call `set_platform(CPUPlatform())` before ``verl.workers.engine`` is imported, or set verl's plug-in
variables for every process of a job::

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
    """verl's platform interface for a CPU."""

    device_name = "cpu"
    vendor_name = "cpu"

    @property
    def device_module(self) -> ModuleType:
        """The module that verl compares with ``torch.cpu``."""
        return torch.cpu

    def is_available(self) -> bool:
        """Whether there is a device other than the CPU."""
        return False

    def current_device(self) -> Any:
        """``cpu`` instead of an index as in verl: torch takes an index for a GPU."""
        return torch.device("cpu")

    def device_count(self) -> int:
        """One device for each process."""
        return 1

    def get_device_capability(self, device_index: int = 0) -> tuple[None, None]:
        """A CPU has none."""
        return None, None

    def communication_backend_name(self) -> str:
        """The backend of torch.distributed."""
        return "gloo"

    def visible_devices_envvar(self) -> str:
        """A required name; no program reads the variable."""
        return "CPU_VISIBLE_DEVICES"

    def ray_resource_name(self) -> str:
        """The Ray resource of verl's pools; Ray must be started with one unit for each worker."""
        return "GPU"

    def ray_noset_envvars(self) -> list[str]:
        """Empty: Ray hides no CPU from a process."""
        return []

    def is_ipc_supported(self) -> bool:
        """Whether GPU memory can be shared by IPC."""
        return False

    def cudart(self) -> None:
        """A CPU has none."""

    @contextlib.contextmanager
    def nvtx_range(self, msg: str) -> Iterator[None]:
        """Does nothing: there is no GPU profiler."""
        yield

    def _nothing(self, *args: Any, **kwargs: Any) -> None:
        return None

    set_device = synchronize = manual_seed = manual_seed_all = _nothing
    set_allocator_settings = empty_cache = profiler_start = profiler_stop = _nothing
