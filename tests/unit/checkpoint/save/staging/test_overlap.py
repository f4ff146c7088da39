"""Overlapped staging: a step waits for the copy; what no step holds back is copied at once."""

import gc
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from trainsync.api.protocol import SaveKind
from trainsync.checkpoint.coordinator import CheckpointCoordinator
from trainsync.checkpoint.errors import (
    SaveFailedError,
    SaveTimeoutError,
    TornCopyError,
    UnguardedError,
)
from trainsync.checkpoint.save.staging import overlap, staging
from trainsync.checkpoint.save.staging.copy import copy_all
from trainsync.checkpoint.save.staging.overlap import Guards, OptimizerMemory
from trainsync.checkpoint.save.staging.staging import begin
from trainsync.monitor.client.disk import DiskMonitorClient
from trainsync.storage.layout import RunDirectory
from trainsync.storage.saves.receipts import read_receipt

from tests.unit.checkpoint.states import content, leaves, scribble, states

INCARNATION = "0123456789abcdef"


class Gate:
    """Holds up copies in other threads than the one that made it, until it is opened."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.open = threading.Event()
        self.reached = threading.Event()
        own = threading.current_thread()

        def copy(*args: Any) -> None:
            if threading.current_thread() is not own:
                self.reached.set()
                assert self.open.wait(30)
            copy_all(*args)

        monkeypatch.setattr(staging, "copy_all", copy)


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Gate:
    return Gate(monkeypatch)


def coordinator_in(directory: Path, **options: Any) -> CheckpointCoordinator:
    client = DiskMonitorClient(directory, attempt=0, incarnation=INCARNATION)
    return CheckpointCoordinator(client, directory, **options)


def saved(coordinator: CheckpointCoordinator, name: str, step: int) -> Any:
    run = RunDirectory(coordinator.directory)
    save = run.save(0, INCARNATION, SaveKind.CHECKPOINT, step)
    (path,) = save.files.glob(f"by-*/actor/{name}_world_size_1_rank_0.pt")
    return torch.load(path, weights_only=True)


class Training:
    """A model with running statistics, an optimizer and a scheduler."""

    def __init__(self, optimizer: type[torch.optim.Optimizer] = torch.optim.AdamW, **options: Any):
        torch.manual_seed(0)
        self.model = torch.nn.Sequential(
            torch.nn.Linear(6, 32), torch.nn.BatchNorm1d(32), torch.nn.Linear(32, 1)
        )
        self.optimizer = optimizer(self.model.parameters(), lr=0.1, **options)

    def backward(self) -> None:
        self.model(torch.randn(16, 6)).square().mean().backward()

    def step(self) -> None:
        self.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (torch.optim.AdamW, {"foreach": True}),
        (torch.optim.AdamW, {"fused": True}),
        (torch.optim.AdamW, {"foreach": False, "amsgrad": True}),
        (torch.optim.SGD, {"momentum": 0.9}),
        (torch.optim.Adagrad, {}),
    ],
)
@pytest.mark.parametrize("steps_before", [0, 2])
def test_an_overlapped_save_holds_what_was_before_the_next_step(
    tmp_path: Path, gate: Gate, kind: Any, options: dict[str, Any], steps_before: int
) -> None:
    training = Training(kind, **options)
    coordinator = coordinator_in(tmp_path, overlapped=True)
    coordinator.guard(training.optimizer)
    for _ in range(steps_before):  # without one, the optimizer's state does not exist yet
        training.step()
    states = {"model": training.model.state_dict(), "optim": training.optimizer.state_dict()}
    before = {name: content(state) for name, state in states.items()}
    for name, state in states.items():
        coordinator.save_async(name, state, 1)
    training.backward()  # changes the running statistics, at once
    assert not gate.open.is_set()
    threading.Timer(0.1, gate.open.set).start()
    training.optimizer.step()
    assert gate.open.is_set(), "the step did not wait for the copy"
    training.step()
    coordinator.wait_all(30)
    for name in states:
        assert content(saved(coordinator, name, 1)) == before[name]
    assert content(training.model.state_dict()) != before["model"]
    assert coordinator.stats.step_wait_seconds > 0


def test_the_call_returns_before_the_copy_and_says_what_it_blocked(
    tmp_path: Path, gate: Gate
) -> None:
    training = Training()
    coordinator = coordinator_in(tmp_path)
    # Before the guard's own: so the step has just begun to wait when the time starts to run.
    training.optimizer.register_step_pre_hook(
        lambda *_: threading.Timer(0.2, gate.open.set).start()
    )
    coordinator.guard(training.optimizer)
    coordinator.save_async("model", training.model.state_dict(), 1, overlapped=True)
    assert gate.reached.wait(30)
    training.step()
    coordinator.wait_all(30)
    save = RunDirectory(tmp_path).save(0, INCARNATION, SaveKind.CHECKPOINT, 1)
    receipt = read_receipt(save.receipt("model", 0))
    stats = coordinator.stats
    assert 0.1 < stats.step_wait_seconds < receipt.blocked_seconds
    assert receipt.staged_bytes == stats.staged_bytes > 0


@st.composite
def shared_out(draw: st.DrawFn) -> tuple[Any, list[bool]]:
    """A state, and for each of its leaves whether an optimizer owns it."""
    state = draw(states)
    return state, [draw(st.booleans()) for _ in leaves(state)]


@settings(max_examples=150, deadline=None)
@given(drawn=shared_out())
def test_what_a_step_changes_after_it_waited_and_others_at_once_never_shows(
    drawn: tuple[Any, list[bool]],
) -> None:
    state, flags = drawn
    tensors = [
        (leaf, flag and leaf.is_floating_point())
        for leaf, flag in zip(leaves(state), flags, strict=True)
        if isinstance(leaf, torch.Tensor)
    ]
    before = content(state)
    guarded = [leaf for leaf, own in tensors if own and leaf.numel()]
    optimizer = torch.optim.SGD(guarded or [torch.nn.Parameter(torch.zeros(1))])
    guards = Guards(timeout=30)
    guards.add(optimizer)

    def buffer(size: int, pinned: bool) -> torch.Tensor:
        return torch.full((size + 128,), 0xA5, dtype=torch.uint8)

    owned = guards.owned()
    held = {id(leaf) for leaf, _ in tensors if leaf in owned}
    pending = guards.begin(begin(state, buffer, owned.__contains__))
    for leaf, _ in tensors:
        if id(leaf) not in held:
            scribble(leaf)
    result: list[Any] = []
    thread = threading.Thread(target=lambda: result.append(pending.run(2)))
    thread.start()
    optimizer.step()  # waits
    for leaf, _ in tensors:
        scribble(leaf)
    thread.join(30)
    guards.end(pending)
    assert content(result[0].state) == before


def test_only_memory_that_lies_wholly_in_the_optimizers_is_held_back() -> None:
    flat = torch.zeros(100)
    parameter = torch.nn.Parameter(flat[:50].view(5, 10))
    optimizer = torch.optim.SGD([parameter], lr=torch.tensor(0.1), momentum=0.9)
    parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    owned = OptimizerMemory([optimizer])
    assert parameter.detach() in owned
    assert parameter.detach()[:3] in owned  # a part of it that begins with it
    assert parameter.detach().t() in owned
    assert optimizer.state[parameter]["momentum_buffer"] in owned
    assert flat not in owned  # its other half has another owner
    assert flat[50:] not in owned
    assert optimizer.param_groups[0]["lr"] not in owned  # schedulers change it
    assert torch.zeros(1) not in owned
    with torch.inference_mode():
        assert torch.zeros(1) not in owned
    gaps = torch.optim.SGD([torch.nn.Parameter(torch.zeros(10, 10)[:, :5])])
    assert gaps.param_groups[0]["params"][0].detach() not in OptimizerMemory([gaps])


def test_a_learning_rate_that_a_scheduler_changes_at_once_does_not_show(
    tmp_path: Path, gate: Gate
) -> None:
    training = Training(torch.optim.SGD, momentum=0.9)
    training.optimizer.param_groups[0]["lr"] = torch.tensor(0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(training.optimizer, step_size=1, gamma=0.5)
    coordinator = coordinator_in(tmp_path, overlapped=True)
    coordinator.guard(training.optimizer)
    coordinator.save_async("optim", training.optimizer.state_dict(), 1)
    threading.Timer(0.05, gate.open.set).start()
    training.step()
    scheduler.step()
    coordinator.wait_all(30)
    assert saved(coordinator, "optim", 1)["param_groups"][0]["lr"].item() == pytest.approx(0.1)


def test_every_guarded_optimizer_waits_and_gradient_accumulation_does_not(
    tmp_path: Path, gate: Gate
) -> None:
    first, second = Training(), Training(torch.optim.SGD)
    coordinator = coordinator_in(tmp_path, overlapped=True)
    coordinator.guard(first.optimizer)
    coordinator.guard(second.optimizer)
    coordinator.guard(second.optimizer)  # again, to no effect
    both = {"a": first.model.state_dict(), "b": second.model.state_dict()}
    before = content(both)
    coordinator.save_async("model", both, 1)
    for _ in range(3):  # accumulates gradients while the copy stands still
        first.backward()
        second.backward()
    assert gate.reached.wait(30)
    threading.Timer(0.1, gate.open.set).start()
    second.optimizer.step()
    assert gate.open.is_set()
    first.optimizer.step()
    coordinator.wait_all(30)
    assert content(saved(coordinator, "model", 1)) == before


def test_wait_staged_lets_the_trainer_change_what_no_step_changes(
    tmp_path: Path, gate: Gate
) -> None:
    training = Training()
    coordinator = coordinator_in(tmp_path, overlapped=True)
    coordinator.guard(training.optimizer)
    before = content(training.model.state_dict())
    other = {name: value + 1 for name, value in training.model.state_dict().items()}
    coordinator.save_async("model", training.model.state_dict(), 1)
    with pytest.raises(SaveTimeoutError, match="still being copied"):
        coordinator.wait_staged(timeout=0.05)
    gate.open.set()
    coordinator.wait_staged(timeout=30)
    training.model.load_state_dict(other)
    coordinator.wait_all(30)
    assert content(saved(coordinator, "model", 1)) == before


@pytest.mark.parametrize("change", ["in place", "load_state_dict", "moved"])
def test_an_unguarded_change_fails_the_save_instead_of_tearing_it(
    tmp_path: Path, gate: Gate, change: str
) -> None:
    training = Training()
    coordinator = coordinator_in(tmp_path, overlapped=True)
    coordinator.guard(training.optimizer)
    state = training.model.state_dict()
    coordinator.save_async("model", state, 1)
    assert gate.reached.wait(30)
    weight = training.model[0].weight
    if change == "in place":
        with torch.no_grad():
            weight[0].add_(1)
    elif change == "load_state_dict":
        training.model.load_state_dict({key: value + 1 for key, value in state.items()})
    else:
        state["0.weight"].untyped_storage().resize_(0)
    gate.open.set()
    with pytest.raises(SaveFailedError, match="was changed while it was copied") as raised:
        coordinator.wait_all(30)
    assert isinstance(raised.value.__cause__, TornCopyError)
    assert coordinator.stats.in_flight == 0


def test_memory_that_an_edit_through_data_lets_go_of_outlives_the_copy(
    tmp_path: Path, gate: Gate
) -> None:
    model = torch.nn.Linear(2048, 2048, bias=False)  # so large that freed memory is unmapped
    coordinator = coordinator_in(tmp_path, overlapped=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)  # guarded while it is there
    coordinator.guard(optimizer)
    coordinator.save_async("model", dict(model.named_parameters()), 1)
    assert gate.reached.wait(30)
    model.half()
    gate.open.set()
    with pytest.raises(SaveFailedError, match="was changed while it was copied"):
        coordinator.wait_all(30)


def test_a_copy_that_takes_too_long_fails_the_save_and_lets_the_step_go_on(
    tmp_path: Path, gate: Gate
) -> None:
    training = Training()
    coordinator = coordinator_in(tmp_path, overlapped=True, copy_timeout=0.05)
    coordinator.guard(training.optimizer)
    coordinator.save_async("model", training.model.state_dict(), 1)
    started = time.monotonic()
    training.step()
    assert time.monotonic() - started < 10
    gate.open.set()
    with pytest.raises(
        SaveFailedError, match=r"longer than an optimizer may wait|was changed while"
    ):
        coordinator.wait_all(30)


def test_a_copy_that_fails_never_reaches_the_step_but_the_next_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    training = Training()
    coordinator = coordinator_in(tmp_path, overlapped=True)
    coordinator.guard(training.optimizer)

    def broken(self: object, threads: int) -> None:
        raise MemoryError("no memory to copy with")

    monkeypatch.setattr(staging.Staging, "copy", broken)
    coordinator.save_async("model", training.model.state_dict(), 1)
    training.step()
    with pytest.raises(SaveFailedError, match="no memory to copy with"):
        coordinator.wait_all(30)
    failed = RunDirectory(tmp_path).save(0, INCARNATION, SaveKind.CHECKPOINT, 1)
    assert failed.failure("model", 0).exists()
    assert (coordinator.stats.failures, coordinator.stats.in_flight) == (1, 0)


def test_an_overlapped_save_without_a_guarded_optimizer_is_refused(tmp_path: Path) -> None:
    training = Training()
    coordinator = coordinator_in(tmp_path)
    with pytest.raises(UnguardedError, match=r"call guard\(optimizer\) first"):
        coordinator.save_async("model", training.model.state_dict(), 1, overlapped=True)
    with pytest.raises(TypeError, match=r"expected a torch.optim.Optimizer, got a Sequential"):
        coordinator.guard(training.model)  # type: ignore[arg-type]
    coordinator.guard(training.optimizer)
    with pytest.raises(ValueError, match="a function cannot be overlapped"):
        coordinator.save_async("model", lambda directory: None, 1, overlapped=True)
    # Nothing was begun: the same step can be saved.
    assert coordinator.save_async("model", training.model.state_dict(), 1, overlapped=True)
    coordinator.wait_all(30)


def test_an_optimizer_that_is_gone_guards_nothing_and_is_not_kept(tmp_path: Path) -> None:
    guards = Guards(timeout=1)
    guards.add(Training().optimizer)
    gc.collect()
    assert not guards


def test_a_function_is_saved_as_ever_where_overlapping_is_the_default(tmp_path: Path) -> None:
    coordinator = coordinator_in(tmp_path, overlapped=True)
    coordinator.save_async("own", lambda directory: (directory / "x").write_text("x"), 1)
    coordinator.wait_all(30)
    assert coordinator.stats.written_files == 1


def test_a_save_without_a_thread_does_not_block_other_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    training = Training()
    coordinator = coordinator_in(tmp_path, overlapped=True, staging_slots=1)
    coordinator.guard(training.optimizer)

    def refuse(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", refuse)
        with pytest.raises(SaveFailedError, match="can't start new thread"):
            coordinator.save_async("model", training.model.state_dict(), 1)
        training.step()  # waits for nothing
    coordinator.save_async("model", training.model.state_dict(), 2)
    coordinator.wait_all(30)
    assert coordinator.stats.in_flight == 0
    assert set(saved(coordinator, "model", 2)) == set(training.model.state_dict())


def test_the_wait_of_a_step_is_counted_once_and_ends_with_the_copy() -> None:
    class Never:
        def order(self) -> None: ...

    pending = overlap.PendingCopy(Never())  # type: ignore[arg-type]
    pending.end()
    pending.hold(0.0)
    pending.end()
    assert pending.held_seconds == 0.0
