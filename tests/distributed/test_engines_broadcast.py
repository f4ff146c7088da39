"""`fsdp_sync_weight_nccl` with real FSDP models on gloo ranks, and real explorers."""

import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from trainsync.engines.errors import GatherFailedError, TrainerRankFailedError
from trainsync.engines.fsdp_broadcast import ModelUpdateGroup, fsdp_sync_weight_nccl
from trainsync.engines.full_tensors import full_tensors
from trainsync.engines.hf_export import gather_full_state
from trainsync.engines.lora import split
from trainsync.engines.rank_line import RankLine
from trainsync.weights.broadcast import BroadcastReport, WeightBroadcaster
from trainsync.weights.deadlines import Deadlines
from trainsync.weights.errors import StaleVersionError
from trainsync.weights.receiver import WeightReceiver

from tests.distributed.broadcast_job import Process, explorer, find_in, publish
from tests.distributed.ranks import run_ranks, values_of

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(180)]

DEADLINES = Deadlines(whole=30.0, bucket=5.0, connect=10.0, silence=10.0)


class Model(torch.nn.Module):
    """Layers that are wrapped, weights outside of them, tied ones, odd shapes, buffers."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(11)
        self.embed = torch.nn.Embedding(33, 16)
        self.layers = torch.nn.ModuleList(
            torch.nn.Sequential(torch.nn.Linear(16, 7), torch.nn.Linear(7, 16)) for _ in range(3)
        )
        self.head = torch.nn.Linear(16, 33, bias=False)
        self.scale = torch.nn.Parameter(torch.empty(1))  # of which rank 1 has nothing
        self.same_scale = self.scale
        self.register_buffer("count", torch.arange(4))
        self.register_buffer("cache", torch.zeros(2), persistent=False)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator))
        self.head.weight = self.embed.weight


def sharded(kind: str) -> torch.nn.Module:
    model = Model()
    if kind == "plain":
        return model
    if kind == "fsdp2":
        for layer in model.layers:
            fully_shard(layer)
        return fully_shard(model)
    return FullyShardedDataParallel(
        model,
        auto_wrap_policy=ModuleWrapPolicy({torch.nn.Sequential}),
        use_orig_params=kind == "fsdp1, original parameters",
        device_id=torch.device("cpu"),
    )


def expected() -> dict[str, torch.Tensor]:
    state = Model().state_dict()
    del state["head.weight"], state["same_scale"]  # they have come under their first names
    return dict(state)


KINDS = ["fsdp2", "fsdp1", "fsdp1, original parameters", "plain"]


def group(directory: Path, explorers: int, deadlines: Deadlines = DEADLINES) -> ModelUpdateGroup:
    line = RankLine(60)
    broadcaster = None
    if line.rank == 0:
        broadcaster = WeightBroadcaster(0, "127.0.0.1", bucket_size=1 << 10, deadlines=deadlines)
        publish(directory, broadcaster.endpoint)
        assert broadcaster.wait_for(explorers, 60)
    line.agree(None, 60, "starting")
    return ModelUpdateGroup(line, broadcaster, deadlines)


def engine(kind: str) -> Any:
    return SimpleNamespace(module=sharded(kind))


Content = tuple[str, tuple[int, ...], bytes]


def content(tensor: torch.Tensor) -> Content:
    """As `broadcast_job.explorer` tells of its tensors."""
    raw = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return str(tensor.dtype), tuple(tensor.shape), raw


def gather_every_kind() -> dict[str, list[tuple[str, Content]]]:
    dist.init_process_group("gloo")
    with torch.no_grad():
        return {
            kind: [(name, content(tensor)) for name, tensor in full_tensors(engine(kind))]
            for kind in KINDS
        }


def test_every_rank_gathers_every_weight_once_of_fsdp1_fsdp2_and_plain_modules() -> None:
    wanted = {name: content(tensor) for name, tensor in expected().items()}
    for found in values_of(run_ranks(gather_every_kind)):
        for kind in KINDS:
            names = [name for name, _ in found[kind]]
            assert sorted(names) == sorted(wanted), kind
            assert dict(found[kind]) == wanted, kind


@pytest.fixture
def explorers(tmp_path: Path) -> Iterator[list[Process]]:
    processes = [Process(explorer, f"e{n}", str(tmp_path), None) for n in range(2)]
    yield processes
    for process in processes:
        process.end()


def broadcast_every_kind(directory: Path) -> list[BroadcastReport | None]:
    dist.init_process_group("gloo")
    ranks = group(directory, explorers=2)
    reports = []
    for version, kind in enumerate(KINDS):
        reports.append(fsdp_sync_weight_nccl(engine(kind), ranks, version))
        if ranks.broadcaster is None:
            continue
        served = ranks.broadcaster.explorers()
        assert set(served.values()) == {version}, served
    with pytest.raises(StaleVersionError if dist.get_rank() == 0 else TrainerRankFailedError):
        fsdp_sync_weight_nccl(engine("plain"), ranks, 1)
    reports.append(fsdp_sync_weight_nccl(engine("fsdp2"), ranks, 9))
    return reports


def test_explorers_get_every_bit_and_a_refused_version_keeps_nothing_from_going_on(
    tmp_path: Path, explorers: list[Process]
) -> None:
    reports, others = values_of(run_ranks(broadcast_every_kind, tmp_path))
    assert others == [None] * 5
    for report in reports:
        assert report.served == ("e0", "e1")
        assert report.passes == 1
        assert not report.lost
        assert not report.refused
    wanted = {name: content(tensor) for name, tensor in expected().items()}
    for process in explorers:
        assert process.ask("tensors") == wanted
        assert process.ask("version") == 9


SHORT = Deadlines(whole=4.0, bucket=2.0, connect=2.0, silence=4.0)
KNOWN_SECONDS = SHORT.whole + SHORT.connect + 10.0


class Faulty:
    """An engine that gives weights one by one, and on one rank calls ``fault`` before the fifth."""

    def __init__(self, on_rank: int, fault: Callable[[], None]) -> None:
        self._inner = engine("fsdp2")
        self._fault = fault if dist.get_rank() == on_rank else lambda: None

    def get_per_tensor_param(self) -> tuple[Iterator[tuple[str, torch.Tensor]], None]:
        def weights() -> Iterator[tuple[str, torch.Tensor]]:
            for number, item in enumerate(full_tensors(self._inner)):
                if number == 4:
                    self._fault()
                yield item

        return weights(), None


def fail() -> None:
    raise RuntimeError("no such luck")


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def stop() -> None:
    """Until the other rank has told of it, or could have."""
    wait = f"for i in $(seq {KNOWN_SECONDS + 5:.0f}); do [ -e told ] && break; sleep 1; done"
    subprocess.Popen(["sh", "-c", f"{wait}; kill -KILL {os.getpid()}"])
    os.kill(os.getpid(), signal.SIGSTOP)


def meet_a_fault(directory: Path, on_rank: int, fault: Callable[[], None]) -> tuple[str, float]:
    """How the second broadcast ends on this rank, and after how many seconds."""
    dist.init_process_group("gloo")
    ranks = group(directory, explorers=2, deadlines=SHORT)
    fsdp_sync_weight_nccl(engine("fsdp2"), ranks, 1)
    os.chdir(directory)
    began = time.monotonic()
    try:
        fsdp_sync_weight_nccl(Faulty(on_rank, fault), ranks, 2)
    except (GatherFailedError, TrainerRankFailedError) as error:
        told = " ".join([str(error), *getattr(error, "__notes__", [])])
        Path("told").touch()
        return told, time.monotonic() - began
    return "nothing happened", 0.0


@pytest.mark.parametrize("on_rank", [0, 1])
@pytest.mark.parametrize("fault", [fail, die, stop])
def test_a_rank_that_fails_dies_or_stops_is_known_to_the_others_in_time(
    tmp_path: Path, explorers: list[Process], on_rank: int, fault: Callable[[], None]
) -> None:
    ranks = run_ranks(meet_a_fault, tmp_path, on_rank, fault, seconds=120)
    others = [rank for number, rank in enumerate(ranks) if number != on_rank]
    for rank in [*others, ranks[on_rank]] if fault is fail else others:
        assert rank.error is None, rank.error
        told, seconds = rank.value
        assert seconds < KNOWN_SECONDS, told
        if fault is fail:
            assert "RuntimeError: no such luck" in told
        else:
            assert "gone" in told or "gather" in told
    for process in explorers:
        assert process.ask("version") == 1, "an explorer serves what was never whole"


def broadcast_twice(directory: Path) -> list[BroadcastReport | None]:
    dist.init_process_group("gloo")
    ranks = group(directory, explorers=2)
    return [fsdp_sync_weight_nccl(engine("fsdp2"), ranks, version) for version in (1, 2)]


def test_the_ranks_gather_again_when_an_explorer_is_killed_in_the_middle(
    tmp_path: Path, explorers: list[Process]
) -> None:
    lost, other = explorers
    lost.ask("arm", "bucket", signal.SIGKILL, 2)
    reports, _ = values_of(run_ranks(broadcast_twice, tmp_path))
    first, second = reports
    assert first.served == ("e1",)
    assert first.passes == 2
    assert set(first.lost) == {"e0"}
    assert (second.served, second.passes, second.lost) == (("e1",), 1, {})
    assert other.ask("version") == 2
    assert other.ask("tensors") == {name: content(value) for name, value in expected().items()}


def broadcast_to_one_who_is_late(directory: Path) -> tuple[BroadcastReport | None, int]:
    dist.init_process_group("gloo")
    ranks = group(directory, explorers=2)
    fsdp_sync_weight_nccl(engine("fsdp2"), ranks, 1)
    late = None
    if ranks.broadcaster is not None:
        late = WeightReceiver("late", find_in(str(directory)), deadlines=DEADLINES)
        assert ranks.broadcaster.wait_for(3, 60)
    report = fsdp_sync_weight_nccl(engine("fsdp2"), ranks, 1)
    return report, -1 if late is None else late.version


def test_the_last_version_again_is_for_who_came_later(
    tmp_path: Path, explorers: list[Process]
) -> None:
    (report, version), (nothing, _) = values_of(run_ranks(broadcast_to_one_who_is_late, tmp_path))
    assert nothing is None
    assert (report.served, report.version, version) == (("late",), 1, 1)
    assert [process.ask("version") for process in explorers] == [1, 1]


def gather_of_verl(directory: Path) -> dict[str, tuple[list[tuple[str, Content]], Any]]:
    """What each engine gives, and the whole of its module."""
    from tests.distributed import verl_cpu

    dist.init_process_group("gloo")
    model = directory / "model"
    if dist.get_rank() == 0:
        verl_cpu.make_model(model)
    dist.barrier()
    found = {}
    for name, options in VERL_ENGINES.items():
        made = verl_cpu.make_engine(model, **options)
        given = [(name, content(tensor)) for name, tensor in full_tensors(made)]
        whole = gather_full_state(made.module, rank=0)
        found[name] = (given, {name: content(tensor) for name, tensor in whole.items()})
    return found


VERL_ENGINES: dict[str, dict[str, Any]] = {
    "fsdp2": {"strategy": "fsdp2"},
    "fsdp1": {"strategy": "fsdp"},
    "adapter": {"strategy": "fsdp2", "lora_rank": 4},
}


def test_verls_engines_give_what_they_hold_and_an_adapter_beside_its_base(tmp_path: Path) -> None:
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
