"""What `load_sharded` reads of a bucket, on a real S3 server: what a rank needs, and checked."""

import gc
import os
import tempfile
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from trainsync import RunContext, load_sharded
from trainsync.api.protocol import SaveKind
from trainsync.checkpoint.errors import CorruptCheckpointError, LoadTimeoutError
from trainsync.checkpoint.load.loading import Loaded, load_shard
from trainsync.checkpoint.load.ranges import AT_ONCE, FileRange, Ranges
from trainsync.storage.block_digests import beside
from trainsync.storage.objects import commits

from tests.bench.checkpoint.bench_load import PeakMemory, memory_now
from tests.distributed.checkpoint.test_resume_resharded import SAVED, train
from tests.distributed.ranks import run_ranks, values_of
from tests.store.conftest import FAST, Place
from tests.store.servers.fault_proxy import Fault

MB = 1 << 20
CHECKPOINT = SaveKind.CHECKPOINT


@pytest.fixture
def no_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """No temporary file or directory can be made."""

    def refuse(*given: object, **named: object) -> str:
        raise AssertionError("a temporary file was made")

    for name in ("mkdtemp", "mkstemp"):
        monkeypatch.setattr(tempfile, name, refuse)


def trained(layers: int, fill: float) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """A model of 4 MiB a layer, and an AdamW with state."""
    model = torch.nn.Sequential(*(torch.nn.Linear(1024, 1024, bias=False) for _ in range(layers)))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(fill)
            parameter.grad = torch.full_like(parameter, fill)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


def save(place: Place, step: int, layers: int) -> None:
    model, optimizer = trained(layers, float(step))
    with RunContext.from_env(place.url()) as ctx:
        saving = ctx.coordinator()
        saving.save(step, model=model, optimizer=optimizer)
        saving.finish(step, timeout=60)


def load(
    place: Place, layers: int, timeout: float = 1800.0, rate: float = 0.0
) -> tuple[Loaded, torch.nn.Module]:
    model = torch.nn.Sequential(*(torch.nn.Linear(1024, 1024, bias=False) for _ in range(layers)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    with RunContext.from_env(place.url()) as ctx:
        resume = ctx.resume()
        assert resume is not None
        place.proxy.sent.clear()
        place.proxy.rate = rate
        return load_sharded(resume, model=model, optimizer=optimizer, timeout=timeout), model


def sent(place: Place) -> int:
    return sum(size for path, size in place.proxy.sent if "/objects/" in path)


@pytest.mark.usefixtures("no_files")
def test_a_rank_reads_each_byte_of_its_files_once_into_memory(place: Place) -> None:
    save(place, 3, 8)
    found, model = load(place, 8)
    expected, _ = trained(8, 3.0)
    for (name, got), (_, want) in zip(
        model.state_dict().items(), expected.state_dict().items(), strict=True
    ):
        assert torch.equal(got, want), name
    entries = manifest(place, 3).files
    paths = {entry.path for entry in entries}
    assert all(beside(entry.path) in paths for entry in entries if entry.bytes > MB)
    files = sum(entry.bytes for entry in entries)
    assert files > 90 * MB
    assert files <= sent(place) <= files + 4 * MB, "the files, and their indexes once more"
    assert sent(place) == found.volume_bytes


def manifest(place: Place, step: int) -> Any:
    return commits.read_manifest(place.open(), CHECKPOINT, step).manifest


def test_a_load_takes_the_memory_of_what_it_loads_and_of_a_few_ranges(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", place.direct)  # the proxy would be in this memory, too
    layers = 32  # 128 MiB, and moments of 256 MiB
    save(place, 3, layers)
    gc.collect()
    before = memory_now()["RssAnon"]
    with PeakMemory() as peak:
        load(place, layers)
    loaded = layers * 4 * MB * 3
    staged = layers * 4 * MB  # the model's weights, before all ranks have read theirs
    in_flight = 2 * AT_ONCE * FAST.part_bytes  # obstore gathers a range from pieces
    assert peak.own - before < loaded + staged + in_flight + 32 * MB


def test_model_and_optimizer_are_asked_for_at_once(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(place, 3, 2)
    asked: list[set[str]] = []
    read = Ranges.read

    def noted(ranges: Ranges, parts: Iterable[FileRange]) -> None:
        parts = list(parts)
        asked.append({part.path for part in parts})
        read(ranges, parts)

    monkeypatch.setattr(Ranges, "read", noted)
    load(place, 2)
    both = {f"actor/{name}_world_size_1_rank_0.pt" for name in ("model", "optim")}
    assert both in asked


@pytest.mark.parametrize("fault", [Fault.TRUNCATED, Fault.REFUSED])
def test_an_answer_that_is_cut_off_is_asked_for_again(place: Place, fault: Fault) -> None:
    save(place, 3, 2)
    rule = place.proxy.break_next(fault, "GET", "/objects/", left=2)
    _, model = load(place, 2)
    assert rule.left == 0
    assert torch.equal(next(model.parameters()), next(trained(2, 3.0)[0].parameters()))


def test_a_load_from_a_bucket_that_is_slow_ends_at_its_deadline(place: Place) -> None:
    save(place, 3, 8)  # 96 MB, which come in some 12 s
    with pytest.raises(LoadTimeoutError, match="step 3 could not be read in time"):
        load(place, 8, timeout=2.0, rate=float(MB))


def test_a_byte_that_changed_on_its_way_is_read_again(place: Place) -> None:
    save(place, 3, 2)
    rule = place.proxy.break_next(Fault.CORRUPTED, "GET", r"/objects/.*model[^/]*\.pt$", after=2)
    found, model = load(place, 2)
    assert rule.left == 0
    assert found.step == 3
    assert torch.equal(next(model.parameters()), next(trained(2, 3.0)[0].parameters()))


def test_a_byte_that_changed_in_the_bucket_sends_the_next_attempt_to_an_older_step(
    place: Place,
) -> None:
    save(place, 2, 2)
    save(place, 3, 2)
    stored = commits.read_manifest(place.open(), CHECKPOINT, 3)
    (key,) = (key for path, key in stored.keys.items() if "/optim" in path and path.endswith(".pt"))
    file = place.files / "runs/a" / key
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(bytes(data))
    with pytest.raises(CorruptCheckpointError, match=r"has digest .*, expected .* was told"):
        load(place, 2)
    found, model = load(place, 2)
    assert found.step == 2
    assert torch.equal(next(model.parameters()), next(trained(2, 2.0)[0].parameters()))


@pytest.mark.usefixtures("no_files")
def test_a_shard_is_read_without_a_file(place: Place) -> None:
    save(place, 3, 2)
    with RunContext.from_env(place.url()) as ctx:
        resume = ctx.resume()
        assert resume is not None
        state = load_shard(resume, "actor/model_world_size_1_rank_0.pt")
    expected, _ = trained(2, 3.0)
    assert torch.equal(state["0.weight"], expected.state_dict()["0.weight"])


def in_bucket(url: str, environ: dict[str, str], last: int) -> dict[str, Any]:
    """`train` of the ranks' tests, in a process that the bucket's variables are given to."""
    os.environ.update(environ)
    return train(url, last)


@pytest.fixture
def environ(place: Place) -> dict[str, str]:
    """The variables by which a process reaches the bucket."""
    return {name: value for name, value in os.environ.items() if name.startswith("AWS_")}


@pytest.mark.timeout(240)
def test_three_ranks_go_on_from_what_two_saved_and_two_from_theirs(
    place: Place, environ: dict[str, str]
) -> None:
    saved = values_of(run_ranks(in_bucket, place.url(), environ, SAVED, seconds=90))[0]
    for ranks in (3, 2):
        resumed = values_of(
            run_ranks(in_bucket, place.url(), environ, SAVED + 2, world_size=ranks, seconds=90)
        )
        for result in resumed:
            assert result["before"] == saved["after"]
        saved = resumed[0]
