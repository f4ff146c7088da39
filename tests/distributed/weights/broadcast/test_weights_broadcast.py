"""A broadcast brings every explorer the trainer's bytes once, and names explorers without them."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from trainsync.weights.errors import (
    InconsistentUploadError,
    StaleVersionError,
    SupersededTrainerError,
    UnsupportedWeightsError,
    WeightsUnavailableError,
)
from trainsync.weights.transports.broadcast.broadcaster import BroadcastReport

from tests.distributed.weights.broadcast.broadcast_job import Job, metas, raw

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(120)]

DTYPES = [
    torch.float64,
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.float8_e4m3fn,
    torch.int64,
    torch.int8,
    torch.bool,
    torch.complex64,
]


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    job = Job(tmp_path, explorers=2)
    yield job
    job.end()


def all_kinds() -> list[tuple[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(5)

    def bits(*shape: int) -> torch.Tensor:
        return torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8)

    tensors = [("split, in place", bits(9_000_001)), ("split, transposed", bits(1200, 1100).t())]
    for dtype in DTYPES:
        values = bits(33, 8 * dtype.itemsize)
        values = values % 2 if dtype is torch.bool else values  # a bool's byte is 0 or 1
        tensors.append((str(dtype), values.view(dtype)))
    tensors += [
        ("nan", torch.tensor([float("nan"), float("inf"), -0.0])),
        ("scalar", torch.tensor(7)),
        ("empty", torch.empty(0, 3)),
    ]
    return tensors + [(f"small.{number}", bits(number % 50)) for number in range(5000)]


def test_all_dtypes_split_empty_and_5000_small_tensors_arrive_bit_for_bit(job: Job) -> None:
    report: BroadcastReport = job.trainer.ask("broadcast", 1, all_kinds)
    assert report.served == ("explorer-0", "explorer-1")
    assert report.passes == 1
    expected = {
        name: (str(tensor.dtype), tuple(tensor.shape), raw(tensor)) for name, tensor in all_kinds()
    }
    for explorer in job.explorers.values():
        found = explorer.ask("tensors")
        assert list(found) == list(expected)
        for name, value in expected.items():
            assert found[name] == value, name


def test_versions_follow_one_another_and_none_is_ever_mixed(job: Job) -> None:
    for version in range(1, 30):
        report = job.trainer.ask("broadcast", version)
        assert report.served == ("explorer-0", "explorer-1"), report
        for explorer in job.explorers.values():
            assert explorer.ask("version") == version
    assert job.check() > 20


def test_a_version_that_is_not_newer_is_refused(job: Job) -> None:
    job.trainer.ask("broadcast", 5)
    for version in (5, 4):
        with pytest.raises(StaleVersionError, match=f"version {version} is broadcast after"):
            job.trainer.ask("broadcast", version)
    assert [e.ask("version") for e in job.explorers.values()] == [5, 5]


def grown() -> list[tuple[str, torch.Tensor]]:
    return [("big", torch.full((5,), 7.0)), ("more", torch.full((2,), 7))]


def test_another_schema_is_sent_when_it_changes(job: Job) -> None:
    job.trainer.ask("broadcast", 1)
    assert len(job.trainer.ask("broadcast", 7, grown).served) == 2
    assert list(job.explorers["explorer-0"].ask("tensors")) == ["big", "more"]
    assert len(job.trainer.ask("broadcast", 8).served) == 2
    job.check()


def test_weights_that_do_not_fit_one_model_are_refused_by_it_alone(job: Job) -> None:
    job.join("strict", metas())
    assert job.trainer.ask("wait_for", 3, 30.0)
    assert "strict" in job.trainer.ask("broadcast", 1).served
    report = job.trainer.ask("broadcast", 7, grown)
    assert report.served == ("explorer-0", "explorer-1")
    cause = report.refused["strict"]
    assert cause.startswith("the weights do not fit the model: big is float32[5] instead of")
    assert "small.0 is missing" in cause
    assert cause.endswith("more differences")
    assert job.explorers["strict"].ask("version") == 1
    assert "strict" in job.trainer.ask("broadcast", 8).served, "it was not let back in"
    job.check()


def test_a_model_alone_that_refused_a_schema_takes_the_next_one_that_fits(tmp_path: Path) -> None:
    job = Job(tmp_path, explorers=0)
    try:
        job.join("strict", metas())
        assert job.trainer.ask("wait_for", 1, 30.0)
        assert list(job.trainer.ask("broadcast", 7, grown).refused) == ["strict"]
        assert job.trainer.ask("broadcast", 8).served == ("strict",)
    finally:
        job.end()


def other_dtype() -> list[tuple[str, torch.Tensor]]:
    from tests.distributed.weights.broadcast.broadcast_job import weights

    return [(name, tensor.half() if name == "big" else tensor) for name, tensor in weights(2)]


def test_a_dtype_that_changes_silently_is_refused(job: Job) -> None:
    job.join("strict", metas())
    assert job.trainer.ask("wait_for", 3, 30.0)
    job.trainer.ask("broadcast", 1)
    cause = job.trainer.ask("broadcast", 2, other_dtype).refused["strict"]
    assert "big is float16[300000] instead of float32[300000]" in cause
    assert job.explorers["strict"].ask("version") == 1


def broken() -> Iterator[tuple[str, torch.Tensor]]:
    from tests.distributed.weights.broadcast.broadcast_job import weights

    for name, tensor in weights(2):
        if name == "last":
            raise RuntimeError("the gather failed")
        yield name, tensor


def test_an_error_of_the_iterator_is_the_callers_and_the_version_can_be_sent_again(
    job: Job,
) -> None:
    job.trainer.ask("broadcast", 1)
    with pytest.raises(RuntimeError, match="the gather failed"):
        job.trainer.ask("broadcast", 2, broken)
    assert [e.ask("version") for e in job.explorers.values()] == [1, 1]
    assert len(job.trainer.ask("broadcast", 2).served) == 2
    job.check()


def no_tensor() -> list[tuple[str, object]]:
    return [("a", torch.ones(3)), ("b", "text")]


def test_a_value_that_is_no_tensor_is_refused_by_name(job: Job) -> None:
    with pytest.raises(UnsupportedWeightsError, match="b is a str"):
        job.trainer.ask("broadcast", 1, no_tensor)
    assert len(job.trainer.ask("broadcast", 1).served) == 2


def test_without_explorers_a_broadcast_ends_and_they_catch_up_later(tmp_path: Path) -> None:
    job = Job(tmp_path, explorers=0)
    try:
        with pytest.raises(WeightsUnavailableError, match="no version was broadcast"):
            job.trainer.ask("catch_up", 0)
        assert job.trainer.ask("broadcast", 3).served == ()
        job.join("late")
        assert job.trainer.ask("wait_for", 1, 30.0)
        assert job.trainer.ask("catch_up", 3).served == ("late",)
        assert job.explorers["late"].ask("wait_newer", -1, 30.0) == 3
    finally:
        job.end()


def test_weights_that_changed_since_their_version_was_sent_are_served_by_nobody(job: Job) -> None:
    job.trainer.ask("broadcast", 3)
    job.join("late")
    assert job.trainer.ask("wait_for", 3, 30.0)
    with pytest.raises(InconsistentUploadError, match=r"version 3 has .* but had"):
        job.trainer.ask("catch_up", 4)
    assert job.explorers["late"].ask("version") == -1
    assert job.trainer.ask("catch_up", 3).served == ("late",)
    job.check()


def test_a_killed_trainer_leaves_the_old_version_served_and_is_followed_by_the_next(
    job: Job,
) -> None:
    job.trainer.ask("broadcast", 9)
    job.trainer.end()
    with pytest.raises(WeightsUnavailableError, match=r"no version after 9 came .* trainer"):
        job.explorers["explorer-0"].ask("wait_newer", 9, 3.0)
    assert [e.ask("version") for e in job.explorers.values()] == [9, 9]
    job.replace_trainer(attempt=1)
    assert job.trainer.ask("wait_for", 2, 30.0)
    # The next attempt resumed from an earlier step: its versions count anew.
    report = job.trainer.ask("broadcast", 4)
    assert report.served == ("explorer-0", "explorer-1"), report
    assert [e.ask("version") for e in job.explorers.values()] == [4, 4]
    job.check()


def test_an_older_attempts_trainer_is_refused(job: Job) -> None:
    old = job.replace_trainer(attempt=2)
    old.end()  # so that the explorers look for the next one
    assert job.trainer.ask("wait_for", 2, 30.0)
    job.trainer.ask("broadcast", 5)
    newer = job.replace_trainer(attempt=1)  # explorers are led to an older one
    newer.end()
    with pytest.raises(SupersededTrainerError, match="follow attempt 2; this is attempt 1"):
        for version in range(6, 200):
            report = job.trainer.ask("broadcast", version)
            assert report.served == (), "an explorer took weights of an older attempt"
            assert not job.trainer.ask("wait_for", 1, 0.1)
    assert [e.ask("version") for e in job.explorers.values()] == [5, 5]
    job.check()
