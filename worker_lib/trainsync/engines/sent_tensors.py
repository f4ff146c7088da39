"""The weights of a training engine as rank 0 sends them: no large one whole, if that can be."""

from collections.abc import Iterator
from typing import Any

from torch.distributed.tensor import DTensor

from trainsync.engines.engine import adapt
from trainsync.engines.full_tensors import chosen_tensors, full_tensor
from trainsync.engines.module_engine import TrainedModule
from trainsync.engines.sharded_parts import PartBuffers, comes_in_parts, parts_on_rank_0
from trainsync.weights.stream_source import Value


def sent_tensors(engine: Any) -> Iterator[tuple[str, Value]]:
    """As `full_tensors` on rank 0; what the other ranks get is for nothing.

    A model that FSDP2 shards by rows gives tensors of more than `PART_BYTES` in parts. verl's
    engines gather whole tensors by themselves; FSDP1 gathers one wrapped module at a time.

    Args:
        engine: see `adapt`.
    """
    trained, buffers = adapt(engine), PartBuffers()
    if not isinstance(trained, TrainedModule):
        yield from trained.get_per_tensor_param()
        return
    for name, tensor in chosen_tensors(trained.module, trained.lora):
        if isinstance(tensor, DTensor) and comes_in_parts(tensor):
            for part in parts_on_rank_0(tensor, buffers):
                yield name, part
                del part  # it is the other side's now
        else:
            yield name, full_tensor(tensor)
        del tensor
