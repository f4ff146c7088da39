"""`fsdp_sync_weight_nccl` with real FSDP models on gloo ranks, and real explorers."""

import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from trainsync.engines.adapt import adapt
from trainsync.engines.errors import GatherFailedError, TrainerRankFailedError
from trainsync.engines.publish.model_update_group import ModelUpdateGroup, fsdp_sync_weight_nccl
from trainsync.engines.trainer_ranks import trainer_ranks
from trainsync.weights.errors import StaleVersionError
from trainsync.weights.transports.broadcast.broadcaster import BroadcastReport, WeightBroadcaster
from trainsync.weights.transports.broadcast.deadlines import Deadlines
from trainsync.weights.transports.broadcast.receiver import WeightReceiver

from tests.distributed.engines.fsdp_models import KINDS, content, engine, served
from tests.distributed.ranks import run_ranks, values_of
from tests.distributed.weights.broadcast.broadcast_job import Process, explorer, find_in, publish

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(180)]

DEADLINES = Deadlines(whole=30.0, bucket=5.0, connect=10.0, silence=10.0)


def group(directory: Path, explorers: int, deadlines: Deadlines = DEADLINES) -> ModelUpdateGroup:
    line = trainer_ranks(60)
    broadcaster = None
    if line.rank == 0:
        broadcaster = WeightBroadcaster(0, "127.0.0.1", bucket_size=1 << 10, deadlines=deadlines)
        publish(directory, broadcaster.endpoint)
        assert broadcaster.wait_for(explorers, 60)
    line.agree("", None, "starting", 60)
    return ModelUpdateGroup(line, broadcaster, deadlines)


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
        versions = ranks.broadcaster.explorers()
        assert set(versions.values()) == {version}, versions
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
    wanted = {name: content(tensor) for name, tensor in served().items()}
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
            for number, item in enumerate(adapt(self._inner).get_per_tensor_param()):
                if number == 4:
                    self._fault()
                yield item

        return weights(), None


def fail() -> None:
    raise RuntimeError("no such luck")


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def stop() -> None:
    """Stop this process; it is killed when the other rank has reported, or had time to."""
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
    assert other.ask("tensors") == {name: content(value) for name, value in served().items()}


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
