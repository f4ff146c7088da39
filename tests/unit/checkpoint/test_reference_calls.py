"""Calls as Trinity-RFT's coordinator takes them: they work, or name the call that does."""

import asyncio
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from trainsync.api.protocol import SaveKind, SaveState
from trainsync.checkpoint.coordinator import CheckpointCoordinator
from trainsync.checkpoint.errors import SaveFailedError
from trainsync.checkpoint.reference_calls import SavedNames, name_first
from trainsync.runtime.checkpoint_monitor import CheckpointMonitor
from trainsync.storage.layout import RunDirectory
from trainsync.storage.saves.manifest import check_manifest, read_manifest

NAME = "model_world_size_1_rank_0.pt"


@pytest.fixture
def coordinator(tmp_path: Path) -> Iterator[CheckpointCoordinator]:
    monitor = CheckpointMonitor(tmp_path / "run")
    yield CheckpointCoordinator(monitor)
    monitor.close()


def place(coordinator: CheckpointCoordinator, step: int) -> Path:
    """Where the reference's caller writes, which it makes itself."""
    made = coordinator.directory / f"global_step_{step}" / "actor"
    made.mkdir(parents=True)
    return made


def saved(coordinator: CheckpointCoordinator, step: int, kind: SaveKind) -> Any:
    manifest = read_manifest(RunDirectory(coordinator.directory), kind, step).manifest
    check_manifest(RunDirectory(coordinator.directory), manifest, with_digest=True)
    assert [entry.path for entry in manifest.files] == [f"actor/{NAME}"]
    path = coordinator.directory / f"global_step_{step}" / "actor" / NAME
    return torch.load(path, weights_only=True)


def test_a_function_without_arguments_is_committed_with_what_it_wrote(
    coordinator: CheckpointCoordinator,
) -> None:
    path, state = place(coordinator, 1) / NAME, {"w": torch.arange(3)}
    coordinator.save_async("model", lambda: torch.save(state, path), 1, is_state_dict=True)
    done = asyncio.run(
        coordinator.register_and_monitor(1, is_state_dict=True, state_dict_thread_count=1)
    )
    assert done.state is SaveState.COMMITTED
    assert torch.equal(saved(coordinator, 1, SaveKind.STATE_DICT)["w"], state["w"])
    coordinator.wait_all(30)


def test_save_sync_without_a_name_saves_the_model_in_the_callers_thread(
    coordinator: CheckpointCoordinator,
) -> None:
    threads: list[threading.Thread] = []
    for step, given in ((1, "positions"), (2, "names")):
        path = place(coordinator, step) / NAME

        def save(path: Path = path) -> None:
            threads.append(threading.current_thread())
            torch.save({"step": 0}, path)

        # ``save`` may be called without an argument only as a partial: it has a default.
        function = partial(lambda act: act(), save)
        if given == "positions":
            coordinator.save_sync(function, step, True)
        else:
            coordinator.save_sync(save_fn=function, global_step=step, is_state_dict=True)
        asyncio.run(
            coordinator.register_and_monitor(step, is_state_dict=True, state_dict_thread_count=1)
        )
        assert saved(coordinator, step, SaveKind.STATE_DICT) == {"step": 0}
    assert set(threads) == {threading.main_thread()}
    coordinator.wait_all(30)


def test_a_function_that_writes_nothing_there_is_told_what_is_expected(
    coordinator: CheckpointCoordinator, tmp_path: Path
) -> None:
    coordinator.save_async("model", lambda: torch.save({}, tmp_path / "elsewhere.pt"), 1)
    with pytest.raises(SaveFailedError, match=r"wrote no .*; expected save_fn\(directory\)"):
        coordinator.wait_all(30)


def test_a_function_without_arguments_never_writes_into_a_committed_step(
    coordinator: CheckpointCoordinator,
) -> None:
    coordinator.save_async("model", {"w": torch.ones(1)}, 1)
    asyncio.run(coordinator.register_and_monitor(1, checkpoint_participants=[("model", 0)]))
    path = coordinator.directory / "global_step_1" / "actor" / NAME
    before = path.read_bytes()
    with pytest.raises(SaveFailedError, match="is of a committed step, and save_fn writes there"):
        coordinator.save_sync("optim", lambda: path.write_bytes(b""), 1)
    assert path.read_bytes() == before


def test_counts_are_the_components_that_this_process_saves_of_all_ranks() -> None:
    names = SavedNames(2)
    for step in (3, 4):
        names.note(SaveKind.CHECKPOINT, step, "optim")
        names.note(SaveKind.CHECKPOINT, step, "critic")
    state_dict, checkpoint = names.chosen(4, (), (), 2, 4)
    assert state_dict == (("model", 0), ("model", 1))
    assert checkpoint == (("optim", 0), ("optim", 1), ("critic", 0), ("critic", 1))


def test_a_driver_that_saves_nothing_learns_the_ranks_from_the_counts() -> None:
    state_dict, checkpoint = SavedNames(1).chosen(4, (), (), 2, 4)
    assert state_dict == (("model", 0), ("model", 1))
    assert checkpoint == (("optim", 0), ("optim", 1), ("extra_state", 0), ("extra_state", 1))


@pytest.mark.parametrize("counts", [(1, 0), (2, 3), (0, 5)])
def test_counts_without_the_saving_ranks_name_the_right_call(counts: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match=r"_thread_count=\d is not .*_participants=all_ranks\("):
        SavedNames(2).chosen(4, (), (), *counts)


def test_counts_and_participants_together_are_refused(coordinator: CheckpointCoordinator) -> None:
    with pytest.raises(ValueError, match="expected one of them"):
        asyncio.run(
            coordinator.register_and_monitor(
                1, checkpoint_thread_count=1, checkpoint_participants=[("model", 0)]
            )
        )


@pytest.mark.parametrize("given", [(None, None, None), ("model", {}, None), (7, {}, 1)])
def test_what_is_neither_order_is_refused(given: tuple[Any, Any, Any]) -> None:
    with pytest.raises(TypeError, match=r'expected save_sync\("model", save_fn, global_step'):
        name_first(*given, False)


def test_a_coordinator_without_a_directory_says_where_it_goes() -> None:
    with pytest.raises(TypeError, match=r"expected CheckpointCoordinator\(monitor, directory\)"):
        CheckpointCoordinator(object())  # type: ignore[arg-type]
