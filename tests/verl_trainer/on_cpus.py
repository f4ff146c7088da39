"""What verl's trainer lacks on a CPU; verl imports this in each of its processes.

By ``VERL_USE_EXTERNAL_MODULES`` (verl's plug-ins), and, once its engines can be imported, by
``actor_rollout_ref.model.external_lib``: see `engines_on_cpus`.
"""

from typing import Any

import torch
import torch.distributed as dist
import verl_grpo.cpu_platform  # noqa: F401 - registers the platform "cpu"

# verl calls these on whatever device it has; torch.cpu lacks them.
torch.cpu.empty_cache = lambda: None
for _name in ("memory_allocated", "memory_reserved", "max_memory_allocated", "max_memory_reserved"):
    setattr(torch.cpu, _name, lambda *args: 0)

_init_process_group = dist.init_process_group


def init_process_group(backend: str | None = None, **kwargs: Any) -> None:
    """verl asks for one backend for the CPU and one for its device, which here is the CPU too."""
    if backend == "cpu:gloo,cpu:gloo":
        backend = "gloo"
    _init_process_group(backend, **kwargs)


dist.init_process_group = init_process_group
