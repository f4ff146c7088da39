"""The Synchronizer on a real Ray of this machine: uploads, explorers, and what goes wrong."""

import logging
import os
import threading
import time
import uuid
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import ray
import torch
from trainsync import ExplorerClient, RunContext, Synchronizer, Uploader, fsdp_upload_state_dict
from trainsync.api.status import WeightsStatus
from trainsync.engines.errors import GatherFailedError, TrainerRankFailedError
from trainsync.engines.publish import sent_tensors as sending
from trainsync.monitor.client.local import LocalMonitorClient
from trainsync.weights.errors import (
    DigestMismatchError,
    InconsistentUploadError,
    StaleVersionError,
    UnknownExplorerError,
    WeightsTimeoutError,
    WeightsUnavailableError,
)
from trainsync.weights.synchronizer.report import SynchronizerStatus
from trainsync.weights.transports.base import Weights
from trainsync.weights.transports.object_store.packing import Packing, digest_of_part
from trainsync.weights.versions import PartMeta

from tests.ports import port_of, reserved_port
from tests.waiting import eventually

TIMEOUT = 60

pytestmark = [
    pytest.mark.distributed,
    pytest.mark.timeout(240),
    pytest.mark.usefixtures("ray_cluster"),
]


@pytest.fixture(scope="module")
def shared(ray_cluster: None) -> Any:
    """One for most tests: starting an actor's process takes longer than they do."""
    return Synchronizer.create("shared")


@pytest.fixture
def synchronizer(shared: Any) -> Iterator[Any]:
    yield shared
    for name in status(shared).explorers:
        ray.get(shared.leave.remote(name), timeout=30)
    ray.get(shared.set_trainer_status.remote("running"), timeout=30)


@pytest.fixture
def fresh() -> Any:
    """A new Synchronizer, which the test may kill."""
    return Synchronizer.create(f"fresh-{uuid.uuid4()}")


@pytest.fixture
def explorer(synchronizer: Any) -> ExplorerClient:
    return ExplorerClient(synchronizer, "explorer-0", timeout=30)


@pytest.fixture
def base(synchronizer: Any) -> int:
    """A version newer than any that an earlier test published."""
    return status(synchronizer).version + 1


def upload(synchronizer: Any, version: int, value: float | None = None) -> None:
    state = {"w": torch.full((1000,), float(version if value is None else value))}
    uploaded = Uploader(0, 1).upload(state, synchronizer, version, timeout=30)
    assert uploaded.published


def status(synchronizer: Any) -> SynchronizerStatus:
    answer: SynchronizerStatus = ray.get(synchronizer.get_status.remote(), timeout=30)
    return answer


def test_an_explorer_gets_what_was_uploaded_and_acknowledges_it(
    synchronizer: Any, explorer: ExplorerClient, base: int
) -> None:
    upload(synchronizer, base)
    weights = explorer.wait_and_fetch(-1, timeout=30)
    assert weights is not None
    assert weights.version == base
    assert torch.equal(weights.state_dict["w"], torch.full((1000,), float(base)))
    assert status(synchronizer).explorers["explorer-0"].status == "require_sync"
    explorer.acknowledge(weights)
    seen = status(synchronizer)
    assert (seen.explorers["explorer-0"].version, seen.explorers["explorer-0"].lag) == (base, 0)
    assert seen.explorers["explorer-0"].status == "running"
    assert seen.last_duration_seconds is not None
    assert seen.last_bytes == weights.bytes == 4000


def test_a_waiting_explorer_is_told_at_once(
    synchronizer: Any, explorer: ExplorerClient, base: int
) -> None:
    upload(synchronizer, base)
    told: list[tuple[int | None, float]] = []

    def wait() -> None:
        told.append((explorer.wait(base, timeout=30), time.monotonic()))

    thread = threading.Thread(target=wait)
    thread.start()
    eventually(lambda: status(synchronizer).explorers["explorer-0"].status == "require_sync")
    upload(synchronizer, base + 1)
    published = time.monotonic()
    thread.join(30)
    assert told[0][0] == base + 1
    assert told[0][1] - published < 5


def test_an_explorer_that_waits_in_vain_is_told_so_in_time(
    explorer: ExplorerClient, base: int
) -> None:
    started = time.monotonic()
    with pytest.raises(WeightsTimeoutError, match=f"no version newer than {base} within 0.3 s"):
        explorer.wait(base, timeout=0.3)
    assert 0.3 <= time.monotonic() - started < 10


def test_an_explorer_that_was_slow_gets_the_newest_version(
    synchronizer: Any, explorer: ExplorerClient, base: int
) -> None:
    for version in (base, base + 1, base + 2):
        upload(synchronizer, version)
    weights = explorer.wait_and_fetch(base, timeout=30)
    assert weights is not None
    assert weights.version == base + 2
    assert weights.state_dict["w"][0] == base + 2


@pytest.mark.parametrize("older", [0, 2])
def test_an_older_or_equal_version_is_refused_and_the_newer_stays(
    synchronizer: Any, explorer: ExplorerClient, base: int, older: int
) -> None:
    upload(synchronizer, base + 2)
    with pytest.raises(StaleVersionError, match=f"version {base + 2} is already published"):
        upload(synchronizer, base + older, value=-1.0)
    assert explorer.fetch().state_dict["w"][0] == base + 2


def test_a_wrong_acknowledgement_is_refused(
    synchronizer: Any, explorer: ExplorerClient, base: int
) -> None:
    upload(synchronizer, base)
    fetched = explorer.fetch()
    wrong = Weights(fetched.version, "xxh3-128:0", fetched.state_dict, 0, 0.0)
    with pytest.raises(DigestMismatchError, match="explorer explorer-0 has xxh3-128:0"):
        explorer.acknowledge(wrong)
    explorer.leave()
    with pytest.raises(UnknownExplorerError, match="not registered"):
        explorer.acknowledge(fetched)


def test_bytes_that_are_not_those_uploaded_are_never_served(
    synchronizer: Any, explorer: ExplorerClient, base: int
) -> None:
    packing = Packing({"w": torch.ones(100)}, rank=0)
    (bucket,) = packing.buckets()
    digest = digest_of_part([bucket.digest])
    part = PartMeta(0, 1, bucket.bytes, digest, packing.schema.encode(), (bucket.digest,))
    other = bucket.arrays[0].copy()
    other[50] ^= 1
    reference = ray.put([other])
    ray.get(synchronizer.set_model_state_dict.remote([reference], base, part), timeout=30)
    with pytest.raises(
        DigestMismatchError, match=f"version {base}, rank 0, bucket 0: 400 bytes with"
    ):
        explorer.fetch()


def test_a_part_that_comes_twice_is_refused(synchronizer: Any, base: int) -> None:
    part = Uploader(0, 2)
    state = {"w": torch.ones(2)}
    assert not part.upload(state, synchronizer, base, timeout=30).published
    with pytest.raises(InconsistentUploadError, match="rank 0 uploaded it already"):
        part.upload(state, synchronizer, base, timeout=30)
    assert Uploader(1, 2).upload(state, synchronizer, base, timeout=30).published


def test_a_trainer_that_stops_ends_every_wait(
    synchronizer: Any, explorer: ExplorerClient, base: int
) -> None:
    answers: list[int | None] = []
    thread = threading.Thread(target=lambda: answers.append(explorer.wait(base, timeout=60)))
    thread.start()
    ray.get(synchronizer.set_trainer_status.remote("stopped"), timeout=30)
    thread.join(20)
    assert answers == [None]


def test_an_explorer_that_never_comes_cannot_hang_the_trainer(
    synchronizer: Any, explorer: ExplorerClient, base: int
) -> None:
    ExplorerClient(synchronizer, "lost", timeout=30)
    upload(synchronizer, base)
    explorer.acknowledge(explorer.fetch())
    waited = synchronizer.wait_acknowledged.remote(base, 0.3)
    assert ray.get(waited, timeout=30) is False
    ray.get(synchronizer.leave.remote("lost"), timeout=30)
    assert ray.get(synchronizer.wait_acknowledged.remote(base, 30.0), timeout=60) is True


def test_a_synchronizer_that_is_not_there_is_an_error_in_time() -> None:
    with pytest.raises(WeightsUnavailableError, match="no Synchronizer in Ray namespace 'nowhere'"):
        Synchronizer.get_actor("nowhere", timeout=0.3)


def test_nothing_is_fetched_before_a_version_is_complete_nor_after_the_actor_died(
    fresh: Any,
) -> None:
    explorer = ExplorerClient(fresh, "explorer-0", timeout=30)
    state = {"w": torch.ones(2)}
    Uploader(0, 2).upload(state, fresh, 1, timeout=30)
    with pytest.raises(WeightsUnavailableError, match="no version is published"):
        explorer.fetch()
    assert Uploader(1, 2).upload(state, fresh, 1, timeout=30).published
    assert torch.equal(explorer.fetch().state_dict["w"], torch.ones(2))
    ray.kill(fresh)
    with pytest.raises(WeightsUnavailableError, match="the Synchronizer is gone"):
        upload(fresh, 2)
    with pytest.raises(WeightsUnavailableError, match="the Synchronizer is gone"):
        explorer.fetch()


# -- through RunContext, with sharded trainers ---------------------------------------------------


class Trainer:
    """One FSDP2 rank."""

    def __init__(self, context: RunContext, rank: int, port: int) -> None:
        import torch.distributed as dist
        from torch.distributed.fsdp import fully_shard

        os.environ.update(
            RANK=str(rank), WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port)
        )
        dist.init_process_group("gloo")
        sending.PART_BYTES = 1 << 16  # so that the larger weight is gathered in parts
        torch.manual_seed(0)
        self.module = torch.nn.Sequential(torch.nn.Linear(500, 201), torch.nn.BatchNorm1d(201))
        fully_shard(self.module[0])
        fully_shard(self.module)
        self.synchronizer = context.synchronizer()

    def upload(self, version: int, *, gather: bool = False, timeout: float = 60) -> bool:
        """Upload, and at once change every parameter."""
        uploaded = fsdp_upload_state_dict(
            SimpleNamespace(module=self.module),
            self.synchronizer,
            version,
            logging.getLogger(__name__),
            timeout=timeout,
            gather=gather,
        )
        with torch.no_grad():
            for parameter in self.module.parameters():
                parameter.add_(1)
        return uploaded.published


def plain_model() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(500, 201), torch.nn.BatchNorm1d(201))


def test_sharded_trainers_reach_explorers_bit_for_bit_and_the_monitor_sees_it(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    with RunContext.from_env(tmp_path_factory.mktemp("run"), environ={}) as context:
        handle = context.synchronizer()
        reservation = reserved_port()
        actor = ray.remote(num_cpus=0)(Trainer)
        trainers = [actor.remote(context, rank, port_of(reservation)) for rank in range(2)]
        explorer = context.explorer("explorer-0")
        expected = plain_model()
        for version in (0, 1, 2):
            gather = version > 0
            uploads = [t.upload.remote(version, gather=gather) for t in trainers]
            published = ray.get(uploads, timeout=120)
            assert sorted(published) == [False, True]
            weights = explorer.wait_and_fetch(version - 1, timeout=60)
            assert weights is not None
            assert weights.version == version
            state = expected.state_dict()
            assert set(weights.state_dict) == set(state)
            for name, tensor in state.items():
                assert weights.state_dict[name].dtype == tensor.dtype
                assert torch.equal(weights.state_dict[name], tensor), name
            explorer.acknowledge(weights)
            with torch.no_grad():
                for parameter in expected.parameters():
                    parameter.add_(1)

        monitor = context.monitor
        assert isinstance(monitor, LocalMonitorClient)

        def told() -> bool:
            seen: WeightsStatus | None = monitor.view().weights
            return (
                seen is not None
                and seen.trainer_version == 2
                and [(e.id, e.version, e.lag, e.state) for e in seen.explorers]
                == [("explorer-0", 2, 0, "running")]
            )

        eventually(told)

        # Every rank raises rank 0's refusal, and the loss of a rank.
        leads, other = trainers
        again = [trainer.upload.remote(2, gather=True) for trainer in trainers]
        with pytest.raises(StaleVersionError):
            ray.get(again[0], timeout=TIMEOUT)
        with pytest.raises(TrainerRankFailedError, match="version 2 is already published"):
            ray.get(again[1], timeout=TIMEOUT)
        ray.kill(other)
        with pytest.raises(GatherFailedError):
            ray.get(leads.upload.remote(2, gather=True, timeout=10), timeout=TIMEOUT)

        # The bytes live with the trainers: once those are dead, that is said, and never hangs.
        ray.kill(leads)

        def gone() -> bool:
            try:
                assert explorer.fetch().digest == weights.digest  # until Ray has noticed
            except WeightsUnavailableError as error:
                return "version 2 could not be fetched" in str(error)
            return False

        eventually(gone, seconds=60)
        ray.kill(handle.actor)
