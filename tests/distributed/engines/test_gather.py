"""Full weights out of sharded engines: every one, once, the same on every rank."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from trainsync.engines.adapt import adapt
from trainsync.engines.hf.export import gather_full_state
from trainsync.engines.lora.adapters import split
from trainsync.engines.protocol import LoRAWeights
from trainsync.engines.publish import sent_tensors as sending
from trainsync.engines.publish.gathering import GatherAhead
from trainsync.engines.publish.sent_tensors import described, module_tensors, sent_tensors
from trainsync.weights.buckets.tensor_part import PART_BYTES, TensorPart
from trainsync.weights.buckets.tensor_stream import Description, schema_of

from tests.bench.checkpoint.peak_memory import peak, resident
from tests.distributed.engines.fsdp_models import (
    ALSO,
    KINDS,
    Content,
    content,
    engine,
    expected,
)
from tests.distributed.ranks import run_ranks, values_of
from tests.distributed.verl.verl_version import VERL_0_8

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(180)]


def gather_every_kind() -> dict[str, list[tuple[str, Content]]]:
    dist.init_process_group("gloo")
    with torch.no_grad():
        found = {}
        for kind in KINDS:
            made = engine(kind)
            known = described(made.module) if dist.get_rank() == 0 else None  # it is no collective
            given = list(adapt(made).get_per_tensor_param())
            if dist.get_rank() == 0:
                told = Description(schema_of(given), torch.device("cpu"), ALSO)
                assert known == (None if kind.startswith("fsdp1") else told)
            found[kind] = [(name, content(tensor)) for name, tensor in given]
        return found


def test_every_rank_gathers_every_weight_once_of_fsdp1_fsdp2_and_plain_modules() -> None:
    wanted = {name: content(tensor) for name, tensor in expected().items()}
    for found in values_of(run_ranks(gather_every_kind)):
        for kind in KINDS:
            names = [name for name, _ in found[kind]]
            assert sorted(names) == sorted(wanted), kind
            assert dict(found[kind]) == wanted, kind


def send_in_parts() -> tuple[dict[str, Content], int]:
    """What came, and how many parts."""
    dist.init_process_group("gloo")
    sending.PART_BYTES = 64  # so that every small tensor is a large one
    values: dict[str, list[torch.Tensor]] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    parts = 0
    with torch.no_grad():
        for name, value in sent_tensors(engine("fsdp2").module):
            if isinstance(value, TensorPart):
                assert value.start == sum(part.numel() for part in values.get(name, []))
                assert value.data.nbytes <= 64
                parts += 1
            given = value.data if isinstance(value, TensorPart) else value
            values.setdefault(name, []).append(given.reshape(-1).clone())
            shapes[name] = tuple(value.shape)
    whole = {name: torch.cat(given).reshape(shapes[name]) for name, given in values.items()}
    return {name: content(tensor) for name, tensor in whole.items()}, parts


@pytest.mark.parametrize("world_size", [2, 3])
def test_rank_0_gets_every_bit_of_large_tensors_in_parts_in_order(world_size: int) -> None:
    ranks = values_of(run_ranks(send_in_parts, world_size=world_size))
    sent, parts = ranks[0]
    assert sent == {name: content(tensor) for name, tensor in expected().items()}
    assert parts > 30
    assert all(others == 0 for _, others in ranks[1:])


LARGE = (4096, 4096)  # float32: 64 MiB, 16 parts


def gather_a_large_tensor() -> int:
    """Bytes that were held more than before, at most."""
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2,))
    shard = torch.ones(LARGE[0] // 2, LARGE[1])  # the whole was never here
    module = torch.nn.Module()
    module.weight = torch.nn.Parameter(DTensor.from_local(shard, mesh, [Shard(0)], run_check=False))
    before = resident()
    count = 0
    for _, value in GatherAhead(lambda: sent_tensors(module), 60.0):
        count += 1
        del value
    assert count == (16 if dist.get_rank() == 0 else 0)
    return peak() - before


def test_no_rank_ever_holds_a_large_tensor_whole() -> None:
    for held in values_of(run_ranks(gather_a_large_tensor)):
        assert held < 8 * PART_BYTES  # whole it would be 16, and twice that while it is gathered


def gather_of_verl(directory: Path) -> dict[str, tuple[list[tuple[str, Content]], Any]]:
    """What each engine gives, and the whole of its module."""
    from tests.distributed.verl import verl_cpu

    dist.init_process_group("gloo")
    model = directory / "model"
    if dist.get_rank() == 0:
        verl_cpu.make_model(model)
    dist.barrier()
    found = {}
    for name, options in VERL_ENGINES.items():
        made = verl_cpu.make_engine(model, **options)
        given = [(key, content(tensor)) for key, tensor in adapt(made).get_per_tensor_param()]
        whole = gather_full_state(made.module, rank=0)
        found[name] = (given, {key: content(as_given(name, whole[key])) for key in whole})
    merging = verl_cpu.make_engine(model, lora_rank=4, lora_merged=True)
    found["merged"] = merged_of(merging)
    return found


def merged_of(engine: Any) -> tuple[list[tuple[str, Content]], dict[str, Content]]:
    """What an engine gives that merges a trained adapter, and what our own merging gives."""
    with torch.no_grad():
        for name, parameter in engine.module.named_parameters():
            if "lora_B" in name:  # they begin as zeros: nothing would be merged
                parameter.to_local().fill_(0.125)
    assert_an_adapter_is_not_lost(engine)
    before = gather_full_state(engine.module, rank=0)
    given = list(adapt(engine).get_per_tensor_param())
    ours = dict(module_tensors(engine.module, LoRAWeights.MERGED))
    after = gather_full_state(engine.module, rank=0)
    assert all(torch.equal(after[name], before[name]) for name in before), "the model has changed"
    base, _ = split(before)  # empty but on rank 0
    assert all(not torch.equal(ours[name], base[name]) for name in base if "q_proj.weight" in name)
    return (
        [(name, content(tensor)) for name, tensor in given],
        {name: content(tensor.bfloat16()) for name, tensor in ours.items()},
    )


def assert_an_adapter_is_not_lost(engine: Any) -> None:
    """verl 0.8 gives a backend such as ours the base model's weights."""
    from trainsync.integrations.verl.backend import TrainsyncCheckpointEngine

    TrainsyncCheckpointEngine(1 << 20)
    if VERL_0_8:
        with pytest.raises(ValueError, match="without the adapter"):
            engine.get_per_tensor_param()
        return
    weights, adapter = engine.get_per_tensor_param()
    assert adapter is None
    assert not any("lora_" in name for name, _ in weights)


def as_given(kind: str, weight: torch.Tensor) -> torch.Tensor:
    """verl 0.8 rounds to bfloat16, but for a model with an adapter that is not merged."""
    return weight.bfloat16() if VERL_0_8 and kind != "adapter" else weight


VERL_ENGINES: dict[str, dict[str, Any]] = {
    "fsdp2": {"strategy": "fsdp2"},
    "fsdp1": {"strategy": "fsdp"},
    "adapter": {"strategy": "fsdp2", "lora_rank": 4},
}


def test_verls_engines_give_what_they_hold_and_an_adapter_beside_or_in_its_base(
    tmp_path: Path,
) -> None:
    ranks = values_of(run_ranks(gather_of_verl, tmp_path, seconds=150))
    for found in ranks:
        for kind in VERL_ENGINES:
            given, whole = found[kind][0], ranks[0][kind][1]  # rank 0 alone gathers the whole
            assert len(given) == len(whole), kind
            if kind != "adapter":
                assert dict(given) == whole, kind
                continue
            base, adapter = split(whole)
            contents = sorted(value for _, value in given)
            assert contents == sorted([*base.values(), *adapter.values()])
            assert sum("lora_" in name for name, _ in given) == len(adapter) > 0
        given, ours = found["merged"]
        assert dict(given) == ours
