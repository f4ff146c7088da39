"""Bring a model that verl offloads to where it can be read, and let it go again."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from trainsync.engines.fsdp.state import fsdp_version
from trainsync.engines.protocol import is_megatron


@contextmanager
def resident(module: Any, offloads: bool) -> Iterator[None]:
    """Within it the model's shards can be read and gathered.

    Args:
        offloads: whether verl keeps the parameters on the host between steps. With FSDP2 that
            changes nothing: each shard can be read where it is.
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
    """Within it an FSDP model is on its device, and can be calculated with."""
    if not offloads:
        yield
        return
    # They take either FSDP, whatever their types say.
    from verl.utils import fsdp_utils as untyped_fsdp

    fsdp_utils: Any = untyped_fsdp
    fsdp_utils.load_fsdp_model_to_gpu(module)
    try:
        yield
    finally:
        fsdp_utils.offload_fsdp_model_to_cpu(module)
