"""A checkpoint by one call, the wait for its commit by another, and loading across wrappers."""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from trainsync.api.protocol import SaveKind, SaveState
from trainsync.checkpoint.coordinator import CheckpointCoordinator
from trainsync.checkpoint.errors import (
    SaveAbortedError,
    SaveFailedError,
    StateMismatchError,
    StepNotIncreasingError,
    UnsupportedStateError,
)
from trainsync.checkpoint.load.loading import load_sharded
from trainsync.checkpoint.load.resume import Resume, open_resume
from trainsync.checkpoint.save.registration import all_ranks
from trainsync.checkpoint.save.watch import WatchTimes
from trainsync.monitor.client.local import LocalMonitorClient


@pytest.fixture
def monitor(tmp_path: Path) -> Iterator[LocalMonitorClient]:
    client = LocalMonitorClient(
        tmp_path / "run", attempt=0, incarnation="0123456789abcdef", tick_seconds=0.05
    )
    client.claim("local")
    yield client
    client.close()


@pytest.fixture
def coordinator(monitor: LocalMonitorClient, tmp_path: Path) -> CheckpointCoordinator:
    return CheckpointCoordinator(monitor, tmp_path / "run", times=WatchTimes(unknown=0.1))


@pytest.fixture
def group(tmp_path: Path) -> Iterator[None]:
    """A process group of one rank, which DistributedDataParallel wants."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def make(seed: int, kind: type[torch.optim.Optimizer] = torch.optim.AdamW) -> tuple[Any, Any]:
    torch.manual_seed(seed)
    layers = torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 1)
    model = torch.nn.Sequential(*layers)
    return model, kind(model.parameters(), lr=0.1)


def train(model: Any, optimizer: Any) -> None:
    optimizer.zero_grad()
    model(torch.randn(16, 4)).square().mean().backward()
    optimizer.step()


def resume_of(monitor: LocalMonitorClient, directory: Path) -> Resume:
    point = monitor.resume()
    assert point is not None
    return open_resume(directory, point)


def test_save_and_finish_commit_what_load_sharded_takes(
    coordinator: CheckpointCoordinator, monitor: LocalMonitorClient
) -> None:
    model, optimizer = make(0)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    for step in (1, 2):
        train(model, optimizer)
        schedule.step()
        assert coordinator.save(
            step, model=model, optimizer=optimizer, scheduler=schedule, extra={"seen": step}
        )
    status = coordinator.finish(2, timeout=60)
    assert status is not None
    assert status.state is SaveState.COMMITTED
    other, fresh = make(1)
    loaded = load_sharded(
        resume_of(monitor, coordinator.directory),
        model=other,
        optimizer=fresh,
        scheduler=torch.optim.lr_scheduler.StepLR(fresh, 1),
    )
    assert (loaded.step, loaded.extra["seen"]) == (2, 2)
    assert loaded.restored == ("model", "optimizer", "scheduler", "rng")
    for one, two in zip(model.state_dict().values(), other.state_dict().values(), strict=True):
        assert torch.equal(one, two)
    for one, two in zip(optimizer.state.values(), fresh.state.values(), strict=True):
        assert torch.equal(one["exp_avg"], two["exp_avg"])


def test_finish_without_a_step_waits_for_the_last_save(coordinator: CheckpointCoordinator) -> None:
    assert coordinator.finish() is None
    model, _ = make(0)
    coordinator.save(1, model=model)
    coordinator.save(2, model=model)
    status = coordinator.finish(timeout=60)
    assert status is not None
    assert (status.step, status.state) == (2, SaveState.COMMITTED)


def test_finish_works_in_a_running_event_loop_and_can_be_awaited(
    coordinator: CheckpointCoordinator,
) -> None:
    model, _ = make(0)

    async def main() -> list[Any]:
        coordinator.save(1, model=model)
        found = [coordinator.finish(1, timeout=60)]
        coordinator.save(2, model=model)
        found.append(await coordinator.finish_async(timeout=60))
        return found

    assert [status.step for status in asyncio.run(main())] == [1, 2]


def test_finish_raises_an_abort_which_is_not_raised_again(
    coordinator: CheckpointCoordinator, monitor: LocalMonitorClient
) -> None:
    model, _ = make(0)
    coordinator.save(5, model=model)
    coordinator.register(6, checkpoint_participants=all_ranks("model", "optim", world_size=1))
    coordinator.save_async("model", {"w": torch.zeros(1)}, 6)
    with pytest.raises(UnsupportedStateError):
        coordinator.save_async("optim", {"w": object()}, 6)
    with pytest.raises(SaveAbortedError, match=r"optim\.0: UnsupportedStateError"):
        coordinator.finish(6, timeout=60)
    coordinator.save(7, model=model)
    assert coordinator.finish(timeout=60) is not None


def test_a_save_that_raised_an_earlier_failure_is_made_again(
    coordinator: CheckpointCoordinator, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, optimizer = make(0)
    save_async, calls = coordinator.save_async, []

    def failing(name: str, *arguments: Any, **options: Any) -> bool:
        calls.append(name)
        if calls == ["model", "optim"]:  # as when the failure is heard between two parts
            raise SaveFailedError("step 1 failed")
        return save_async(name, *arguments, **options)

    monkeypatch.setattr(coordinator, "save_async", failing)
    with pytest.raises(SaveFailedError):
        coordinator.save(2, model=model, optimizer=optimizer)
    assert coordinator.save(2, model=model, optimizer=optimizer)
    assert calls == ["model", "optim", "optim", "extra_state"]
    assert coordinator.finish(2, timeout=60) is not None


def test_a_second_save_of_a_step_is_refused_and_does_not_pass_for_one(
    coordinator: CheckpointCoordinator,
) -> None:
    model, _ = make(0)
    assert coordinator.save(2, model=model)
    with pytest.raises(StepNotIncreasingError):
        coordinator.save(2, model=model)
    assert coordinator.finish(2, timeout=60) is not None


def test_a_model_without_weights_is_refused_before_its_save_is_expected(
    coordinator: CheckpointCoordinator,
) -> None:
    with pytest.raises(ValueError, match="model: the state is empty"):
        coordinator.save(3, model=torch.nn.Sequential())
    assert not coordinator.commits.is_pending(3)
    with pytest.raises(ValueError, match="no checkpoint of step 3"):
        coordinator.finish(3, timeout=60)


@pytest.mark.parametrize(("step", "error"), [(-1, ValueError), (1.5, TypeError), ("1", TypeError)])
def test_what_is_no_step_is_refused_and_the_next_save_is_not_harmed(
    coordinator: CheckpointCoordinator, step: Any, error: type[Exception]
) -> None:
    model, _ = make(0)
    with pytest.raises(error, match=f"global_step is {step!r}, expected"):
        coordinator.save(step, model=model)
    assert coordinator.save(1, model=model)
    assert coordinator.finish(timeout=60) is not None


def test_finish_of_an_unsaved_step_raises_soon(
    coordinator: CheckpointCoordinator,
) -> None:
    model, _ = make(0)
    coordinator.save(40, model=model)
    with pytest.raises(ValueError, match=r"no checkpoint of step 42 .*its newest is step 40"):
        coordinator.finish(42, timeout=60)
    with pytest.raises(ValueError, match="no checkpoint of step 42"):
        asyncio.run(coordinator.finish_async(42, timeout=60))
    coordinator.finish(40, timeout=60)


def test_finish_waits_for_what_another_process_registered(
    coordinator: CheckpointCoordinator, monitor: LocalMonitorClient
) -> None:
    driver = CheckpointCoordinator(monitor, coordinator.directory)
    model, _ = make(0)
    coordinator.save(3, model=model)
    status = driver.finish(3, timeout=60)
    assert status is not None
    assert status.state is SaveState.COMMITTED


def test_what_is_no_training_is_refused_before_anything_is_registered(
    coordinator: CheckpointCoordinator, monitor: LocalMonitorClient
) -> None:
    model, optimizer = make(0)
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"model": model.state_dict()}, "model is a OrderedDict; expected the module itself"),
        ({"model": model, "optimizer": optimizer.state_dict()}, "optimizer is a dict"),
        ({"model": model, "extra": [1]}, "extra is a list"),
    ]
    for arguments, message in wrong:
        with pytest.raises(TypeError, match=message):
            coordinator.save(1, **arguments)
    with pytest.raises(UnsupportedStateError, match="scheduler is a int"):
        coordinator.save(1, model=model, scheduler=3)
    assert monitor.save_status(SaveKind.CHECKPOINT, 1).state is SaveState.UNKNOWN


WRAPPERS = ("plain", "compiled", "ddp", "ddp of compiled", "compiled ddp", "compiled part")


def wrap(model: Any, how: str) -> Any:
    ddp = torch.nn.parallel.DistributedDataParallel
    if how == "compiled part":
        model[0] = torch.compile(model[0])
        return model
    return {
        "plain": lambda: model,
        "compiled": lambda: torch.compile(model),
        "ddp": lambda: ddp(model),
        "ddp of compiled": lambda: ddp(torch.compile(model)),
        "compiled ddp": lambda: torch.compile(ddp(model)),
    }[how]()


@pytest.mark.usefixtures("group")
def test_wrappers_of_a_model_resume_into_one_another(
    coordinator: CheckpointCoordinator, monitor: LocalMonitorClient
) -> None:
    for step, how in enumerate(WRAPPERS, 1):
        for fine in (False, True):
            model, optimizer = make(step)
            train(model, optimizer)
            wrapped = wrap(model, how)
            number = 2 * step + fine
            if fine:  # under the wrapper's names
                parts = all_ranks("model", "optim", world_size=1)
                coordinator.register(number, checkpoint_participants=parts)
                coordinator.save_async("model", wrapped.state_dict(), number)
                coordinator.save_async("optim", optimizer.state_dict(), number)
            else:
                coordinator.save(number, model=wrapped, optimizer=optimizer)
            coordinator.finish(number, timeout=60)
            resume = resume_of(monitor, coordinator.directory)
            expected = [value.clone() for value in model.state_dict().values()]
            for into in WRAPPERS:
                other, fresh = make(99)
                loaded = load_sharded(resume, model=wrap(other, into), optimizer=fresh, rng=False)
                assert loaded.step == number
                found = list(other.state_dict().values())
                assert all(map(torch.equal, found, expected)), (how, fine, into)


@pytest.mark.usefixtures("group")
def test_a_saved_model_has_the_bare_models_names_and_versions(
    coordinator: CheckpointCoordinator,
) -> None:
    model, _ = make(0)
    coordinator.save(1, model=wrap(model, "ddp of compiled"))
    coordinator.finish(1, timeout=60)
    path = coordinator.directory / "global_step_1/actor/model_world_size_1_rank_0.pt"
    saved = torch.load(path, weights_only=True)
    assert list(saved) == list(model.state_dict())
    assert saved._metadata == model.state_dict()._metadata
    other, _ = make(1)
    other.load_state_dict(saved)


@pytest.mark.parametrize("fine", [False, True])
@pytest.mark.parametrize(
    ("saver", "loader"),
    [
        (torch.optim.AdamW, torch.optim.SGD),
        (torch.optim.SGD, torch.optim.AdamW),
        (torch.optim.Adam, torch.optim.AdamW),
        (torch.optim.AdamW, torch.optim.Adam),
    ],
)
def test_the_state_of_another_optimizer_is_refused(
    coordinator: CheckpointCoordinator,
    monitor: LocalMonitorClient,
    saver: Any,
    loader: Any,
    fine: bool,
) -> None:
    model, optimizer = make(0, saver)
    train(model, optimizer)
    if fine:
        parts = all_ranks("model", "optim", world_size=1)
        coordinator.register(1, checkpoint_participants=parts)
        coordinator.save_async("model", model.state_dict(), 1)
        coordinator.save_async("optim", optimizer.state_dict(), 1)
    else:
        coordinator.save(1, model=model, optimizer=optimizer)
    coordinator.finish(1, timeout=60)
    other, fresh = make(1, loader)
    before = [value.clone() for value in other.state_dict().values()]
    with pytest.raises(StateMismatchError, match=rf"{loader.__name__}.*expected the same"):
        load_sharded(
            resume_of(monitor, coordinator.directory), model=other, optimizer=fresh, rng=False
        )
    assert all(map(torch.equal, other.state_dict().values(), before))


class Particular(torch.nn.Module):
    """Returns copies of its weights, has extra state, and checks the loaded state."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(3, 5).t())  # not contiguous
        self.register_buffer("seen", torch.zeros(()))
        self.note = "new"
        self.loaded: list[str] = []
        self.register_state_dict_post_hook(self._copies)
        self.register_load_state_dict_pre_hook(
            lambda module, state, prefix, *_: module.loaded.append(f"{prefix}{len(state)}")
        )

    @staticmethod
    def _copies(module: Any, state: dict[str, Any], prefix: str, metadata: Any) -> None:
        state[f"{prefix}weight"] = state[f"{prefix}weight"].clone()

    def get_extra_state(self) -> dict[str, str]:
        return {"note": self.note}

    def set_extra_state(self, state: dict[str, str]) -> None:
        self.note = state["note"]


def test_a_module_that_gives_copies_and_has_hooks_is_loaded_as_torch_would(
    coordinator: CheckpointCoordinator, monitor: LocalMonitorClient
) -> None:
    model = Particular()
    model.note = "trained"
    model.seen += 7
    coordinator.save(1, model=model)
    coordinator.finish(1, timeout=60)
    other = Particular()
    place = other.weight.data_ptr()
    load_sharded(resume_of(monitor, coordinator.directory), model=other, rng=False)
    assert torch.equal(other.weight, model.weight)
    assert (float(other.seen), other.note, other.loaded) == (7.0, "trained", ["3"])
    assert other.weight.data_ptr() == place


def test_weights_are_loaded_into_the_memory_that_they_have(
    coordinator: CheckpointCoordinator, monitor: LocalMonitorClient
) -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(1500, 1500), torch.nn.Linear(1500, 700))
    model[1].weight.data = model[1].weight.data.to(torch.bfloat16)
    model[1].bias.data = model[1].bias.data[:0]  # nothing in it
    coordinator.save(1, model=model)
    coordinator.finish(1, timeout=60)
    expected = [value.clone() for value in model.state_dict().values()]
    places = [value.data_ptr() for value in model.state_dict().values()]
    for value in model.state_dict().values():
        value.zero_()
    load_sharded(resume_of(monitor, coordinator.directory), model=model, rng=False)
    assert all(map(torch.equal, model.state_dict().values(), expected))
    assert [value.data_ptr() for value in model.state_dict().values()] == places
