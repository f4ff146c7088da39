"""Load a model that verl offloads, and offload it again after use."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from trainsync.engines.fsdp.state import fsdp_version
from trainsync.engines.protocol import is_megatron


@contextmanager
def resident(module: Any, offloads: bool) -> Iterator[None]:
    """Context in which the model's shards can be read and gathered.

    Args:
        offloads: whether verl keeps the parameters on the host between steps. No effect with FSDP2,
            whose shards can be read on the host.
    """
    if offloads and is_megatron(module):
        from verl.utils import megatron_utils as untyped_megatron

        megatron_utils: Any = untyped_megatron
        megatron_utils.load_megatron_model_to_gpu(module, load_grad=False)
        try:
            yield
        finally:
            megatron_utils.offload_megatron_model_to_cpu(module)
    else:
        with on_device(module, offloads and fsdp_version(module) == 1):
            yield


@contextmanager
def on_device(module: Any, offloads: bool) -> Iterator[None]:
    """Context in which an FSDP model is on its device and can compute."""
    if not offloads:
        yield
        return
    # These functions accept FSDP1 and FSDP2, although their types name one.
    from verl.utils import fsdp_utils as untyped_fsdp

    fsdp_utils: Any = untyped_fsdp
    fsdp_utils.load_fsdp_model_to_gpu(module)
    try:
        yield
    finally:
        fsdp_utils.offload_fsdp_model_to_cpu(module)
