"""What a save of a GPU's tensors has in its files, while the trainer goes on at once."""

from pathlib import Path
from typing import Any

import pytest
import torch
from trainsync.api.protocol import SaveKind
from trainsync.checkpoint.coordinator import CheckpointCoordinator
from trainsync.monitor.client.disk import DiskMonitorClient
from trainsync.storage.layout import RunDirectory

INCARNATION = "0123456789abcdef"
GPU = torch.device("cuda")


@pytest.fixture
def coordinator(tmp_path: Path) -> CheckpointCoordinator:
    client = DiskMonitorClient(tmp_path, attempt=0, incarnation=INCARNATION)
    return CheckpointCoordinator(client, tmp_path)


def saved(directory: Path, name: str, step: int) -> Any:
    """The file's content, on the CPU."""
    save = RunDirectory(directory).save(0, INCARNATION, SaveKind.CHECKPOINT, step)
    (path,) = save.files.glob(f"by-*/actor/{name}_world_size_1_rank_0.pt")
    return torch.load(path, weights_only=True, map_location="cpu")


def same(loaded: Any, expected: Any) -> bool:
    """Whether nested states are equal, tensors bit for bit wherever they lie."""
    if isinstance(expected, dict):
        return loaded.keys() == expected.keys() and all(
            same(loaded[key], value) for key, value in expected.items()
        )
    if isinstance(expected, list | tuple):
        return len(loaded) == len(expected) and all(map(same, loaded, expected))
    if isinstance(expected, torch.Tensor):
        ours, theirs = (t.detach().cpu().contiguous().reshape(-1) for t in (loaded, expected))
        return ((loaded.dtype, loaded.shape) == (expected.dtype, expected.shape)) and torch.equal(
            ours.view(torch.uint8), theirs.view(torch.uint8)
        )
    return bool(loaded == expected)


def cloned(state: Any) -> Any:
    if isinstance(state, dict):
        return {key: cloned(value) for key, value in state.items()}
    if isinstance(state, list | tuple):
        return [cloned(value) for value in state]
    return state.detach().clone() if isinstance(state, torch.Tensor) else state


def odd_tensors() -> dict[str, torch.Tensor]:
    """Of many dtypes, shapes and strides."""
    base = torch.randn(257, 33, device=GPU)
    return {
        "plain": base,
        "tied": base,
        "transposed": torch.randn(64, 48, device=GPU).t(),
        "strided": torch.randn(1000, device=GPU)[::3],
        "expanded": torch.randn(1, 5, device=GPU).expand(7, 5),
        "scalar": torch.tensor(3.5, device=GPU),
        "empty": torch.empty(0, 4, device=GPU),
        "half": torch.randn(4099, device=GPU).bfloat16(),
        "eight": torch.randn(515, device=GPU).to(torch.float8_e4m3fn),
        "flags": torch.rand(77, device=GPU) > 0.5,
        "complex": torch.randn(9, device=GPU, dtype=torch.complex64),
        "on the host": torch.arange(100),
    }


def test_an_immediate_save_has_what_was_there_though_it_is_overwritten_at_once(
    coordinator: CheckpointCoordinator, tmp_path: Path
) -> None:
    state = odd_tensors()
    before = cloned(state)
    coordinator.save_async("model", state, 1)
    for tensor in state.values():
        if 0 not in tensor.stride():
            tensor.zero_()
    coordinator.wait_all(60)
    assert same(saved(tmp_path, "model", 1), before)


def test_a_save_has_what_kernels_write_that_were_queued_before_it(
    coordinator: CheckpointCoordinator, tmp_path: Path
) -> None:
    target = torch.zeros(10_000_000, device=GPU)
    source = torch.randn_like(target)
    torch.cuda.synchronize()
    torch.cuda._sleep(400_000_000)  # some 0.2 s, for which the device writes nothing
    target.copy_(source)
    coordinator.save_async("model", {"w": target}, 1)
    target.fill_(7)
    coordinator.wait_all(60)
    assert same(saved(tmp_path, "model", 1)["w"], source)


def test_overlapped_saves_of_a_training_loop_each_have_the_state_of_their_own_step(
    coordinator: CheckpointCoordinator, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(1024, 1024) for _ in range(8))).to(GPU)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    coordinator.guard(optimizer)
    batch = torch.randn(64, 1024, device=GPU)
    expected = {}
    for step in range(1, 13):
        model(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        states = {"model": model.state_dict(), "optim": optimizer.state_dict()}
        expected[step] = cloned(states)
        for name, state in states.items():
            coordinator.save_async(name, state, step, overlapped=True)
    coordinator.wait_all(120)
    for step, states in expected.items():
        for name, state in states.items():
            assert same(saved(tmp_path, name, step), state), f"{name} of step {step}"
    assert not same(expected[1], expected[12]), "training changed nothing: the test shows nothing"


def test_a_save_in_a_stream_of_the_trainers_own_has_what_that_stream_wrote(
    coordinator: CheckpointCoordinator, tmp_path: Path
) -> None:
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        target = torch.zeros(10_000_000, device=GPU)
        source = torch.randn_like(target)
        torch.cuda._sleep(400_000_000)
        target.copy_(source)
        coordinator.save_async("model", {"w": target}, 1)
        target.fill_(7)
    coordinator.wait_all(60)
    torch.cuda.synchronize()
    assert same(saved(tmp_path, "model", 1)["w"], source)
