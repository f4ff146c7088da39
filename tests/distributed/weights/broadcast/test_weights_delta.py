"""With delta, explorers of a broadcast get only what changed, and end with the very same bytes."""

import signal
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
import torch
from trainsync.failpoints import POINTS
from trainsync.weights.transports.broadcast.broadcaster import BroadcastReport

from tests.distributed.weights.broadcast.broadcast_job import Job, Process, metas, raw

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(120)]

BOTH = ("explorer-0", "explorer-1")


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    job = Job(tmp_path, explorers=2, delta=True)
    yield job
    job.end()


def step(number: int, *, size: int = 200_000) -> list[tuple[str, torch.Tensor]]:
    """Weights of which a step changes about 1 %; dtypes of every element size, and a NaN."""
    generator = torch.Generator().manual_seed(7)
    tensors = [
        ("bf16", torch.randn(size, generator=generator).bfloat16()),
        ("float", torch.randn(999, generator=generator)),
        ("double", torch.randn(33, 3, generator=generator, dtype=torch.float64)),
        ("byte", torch.randint(0, 255, (777,), generator=generator, dtype=torch.uint8)),
        ("complex", torch.randn(50, generator=generator, dtype=torch.complex128)),
        ("empty", torch.empty(0, 3)),
    ]
    for turn in range(number):
        hit = torch.rand(size, generator=torch.Generator().manual_seed(turn)) < 0.01
        tensors[0][1][hit] += 1
        for _, tensor in tensors[1:-1]:
            tensor.view(-1)[turn % 30] = -tensor.view(-1)[turn % 30]
        tensors[1][1][5] = (float("nan"), -0.0)[turn % 2]
    return tensors


def take(job: Job, number: int) -> BroadcastReport:
    """Broadcast a step; every explorer that is served has its very bytes."""
    report: BroadcastReport = job.trainer.ask("broadcast", number, partial(step, number))
    expected = {name: raw(tensor) for name, tensor in step(number)}
    for name in report.served:
        found = job.explorers[name].ask("tensors")
        assert {key: value[2] for key, value in found.items()} == expected, name
    return report


def test_what_changed_alone_brings_both_to_every_version(job: Job) -> None:
    assert take(job, 1).delta == (), "there was no base"
    for number in range(2, 8):
        report = take(job, number)
        assert report.delta == report.served == BOTH
        assert report.passes == 1
        assert 0 < report.delta_bytes < 0.03 * report.bytes
    same: BroadcastReport = job.trainer.ask("broadcast", 9, partial(step, 7))
    assert same.delta == same.served == BOTH
    assert same.delta_bytes < 100, "nothing changed"


def test_who_comes_or_missed_a_version_gets_all_of_it_and_then_what_changed(job: Job) -> None:
    take(job, 1)
    job.join("late")
    assert job.trainer.ask("wait_for", 3, 30.0)
    report = take(job, 2)
    assert report.delta == BOTH
    assert report.served == (*BOTH, "late")
    assert report.passes == 2
    assert take(job, 3).delta == (*BOTH, "late")
    job.join("later")  # now that deltas are sent before all is known
    assert job.trainer.ask("wait_for", 4, 30.0)
    report = take(job, 4)
    assert report.delta == (*BOTH, "late")
    assert report.served == (*BOTH, "late", "later")


def test_who_missed_a_version_is_caught_up_from_the_trainers_copy(job: Job) -> None:
    take(job, 1)
    job.explorers["explorer-1"].end()
    take(job, 2)
    job.join("explorer-1")
    assert job.trainer.ask("wait_for", 2, 30.0)
    report: BroadcastReport = job.trainer.ask("catch_up", 2)  # whatever is given: it has a copy
    assert report.served == ("explorer-1",)
    found = job.explorers["explorer-1"].ask("tensors")
    assert {key: value[2] for key, value in found.items()} == {k: raw(t) for k, t in step(2)}
    assert take(job, 3).delta == BOTH


def everything(number: int) -> list[tuple[str, torch.Tensor]]:
    return [(name, torch.full_like(tensor, number)) for name, tensor in step(1)]


def test_all_of_it_comes_when_much_changed(job: Job) -> None:
    take(job, 1)
    report: BroadcastReport = job.trainer.ask("broadcast", 2, partial(everything, 2))
    assert report.served == BOTH
    assert report.delta == ()
    assert take(job, 3).delta == (), "everything changed again"
    assert take(job, 4).delta == BOTH
    report = job.trainer.ask("broadcast", 5, partial(everything, 5))
    assert report.served == BOTH, "it was begun as a delta"
    assert report.delta == ()
    assert take(job, 6).delta == ()


def test_all_of_it_comes_when_names_or_shapes_change(job: Job) -> None:
    take(job, 1)
    grown: Callable[[], object] = partial(step, 2, size=300_000)
    report: BroadcastReport = job.trainer.ask("broadcast", 2, grown)
    assert report.served == BOTH
    assert report.delta == ()
    again: BroadcastReport = job.trainer.ask("broadcast", 3, partial(step, 3, size=300_000))
    assert again.delta == BOTH
    assert take(job, 4).delta == (), "it was begun as a delta, and shrank"
    assert take(job, 5).delta == BOTH


def test_a_trainer_of_a_new_attempt_begins_with_all_of_it(job: Job) -> None:
    take(job, 1)
    take(job, 2)
    former = job.replace_trainer(1)
    former.end()
    assert job.trainer.ask("wait_for", 2, 30.0)
    assert take(job, 1).delta == ()
    assert take(job, 2).delta == BOTH


def test_an_explorer_whose_own_copy_was_damaged_is_mended_in_the_same_broadcast(job: Job) -> None:
    take(job, 1)
    take(job, 2)
    passes = []
    for number in (3, 4):  # by then both its sets were the base once
        job.explorers["explorer-1"].ask("damage")
        report = take(job, number)
        assert report.served == BOTH
        assert report.lost == {}
        assert report.delta == (BOTH if report.passes == 1 else ("explorer-0",))
        passes.append(report.passes)
    assert max(passes) == 2
    assert take(job, 5).delta == BOTH


def test_an_explorer_that_refuses_the_model_does_not_stop_the_others(job: Job) -> None:
    job.join("strict", metas())
    assert job.trainer.ask("wait_for", 3, 30.0)
    for number in (1, 2, 3, 4):
        report = take(job, number)
        assert report.served == BOTH
        assert list(report.refused) == ["strict"]
    assert report.delta == BOTH


@pytest.mark.parametrize(
    ("phase", "number"),
    [(phase, signal.SIGKILL) for phase in POINTS["receive"] if phase not in ("joining", "joined")]
    + [("bucket", signal.SIGSTOP), ("received", signal.SIGSTOP)],
)
def test_an_explorer_lost_in_a_delta_costs_the_other_nothing_but_time(
    job: Job, phase: str, number: signal.Signals
) -> None:
    take(job, 1)
    take(job, 2)
    victim: Process = job.explorers["explorer-1"]
    victim.ask("arm", phase, number, 1)
    report: BroadcastReport = job.trainer.ask("broadcast", 3, partial(step, 3))
    assert "explorer-0" in report.served
    assert "explorer-0" in report.delta
    if number == signal.SIGSTOP:
        victim.signal(signal.SIGCONT)
    else:
        victim.end()
        victim = job.join("explorer-1")
    assert job.trainer.ask("wait_for", 2, 30.0)
    job.trainer.ask("catch_up", 3)
    assert victim.ask("wait_newer", 2, 20.0) == 3
    assert take(job, 4).served == BOTH
