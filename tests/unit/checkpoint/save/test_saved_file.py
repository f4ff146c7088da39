"""The file of a save has the state at the return of ``save_async``, bit for bit."""

import tempfile
from pathlib import Path
from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from trainsync.api.protocol import SaveKind
from trainsync.checkpoint.coordinator import CheckpointCoordinator
from trainsync.monitor.client.disk import DiskMonitorClient
from trainsync.storage.digest import file_digest
from trainsync.storage.layout import RunDirectory
from trainsync.storage.saves.receipts import read_receipt

from tests.unit.checkpoint.states import content, leaves, scribble, states


@settings(max_examples=60, deadline=None)
@given(first=states, second=states)
def test_what_happens_after_return_does_not_reach_the_file(first: Any, second: Any) -> None:
    with tempfile.TemporaryDirectory() as name:
        client = DiskMonitorClient(Path(name), attempt=0, incarnation="0123456789abcdef")
        coordinator = CheckpointCoordinator(client, Path(name))
        before = []
        for step, state in enumerate((first, second), start=1):
            before.append(content({"state": state}))
            coordinator.save_async("model", {"state": state}, step)
            for leaf in leaves(state):
                if isinstance(leaf, torch.Tensor):
                    scribble(leaf)
        coordinator.wait_all(timeout=60)
        for step, expected in enumerate(before, start=1):
            save = RunDirectory(Path(name)).save(0, "0123456789abcdef", SaveKind.CHECKPOINT, step)
            receipt = read_receipt(save.receipt("model", 0))
            (entry,) = receipt.files
            path = save.files_of(receipt.writer) / entry.path
            for mmap in (False, True):
                loaded = torch.load(path, weights_only=True, mmap=mmap)
                assert content(loaded) == expected
            assert (path.stat().st_size, file_digest(path)) == (entry.bytes, entry.digest)


@settings(max_examples=60, deadline=None)
@given(state=states, flags=st.lists(st.booleans(), min_size=64, max_size=64))
def test_what_happens_after_the_guarded_step_does_not_reach_an_overlapped_file(
    state: Any, flags: list[bool]
) -> None:
    tensors = [leaf for leaf in leaves(state) if isinstance(leaf, torch.Tensor)]
    owned = [t for t, flag in zip(tensors, flags, strict=False) if flag and t.is_floating_point()]
    optimizer = torch.optim.SGD([*owned, torch.nn.Parameter(torch.zeros(1))])
    with tempfile.TemporaryDirectory() as name:
        client = DiskMonitorClient(Path(name), attempt=0, incarnation="0123456789abcdef")
        coordinator = CheckpointCoordinator(client, Path(name), overlapped=True)
        coordinator.guard(optimizer)
        expected = content({"state": state})
        places = {tensor.untyped_storage().data_ptr() for tensor in owned}
        coordinator.save_async("model", {"state": state}, 1)
        for tensor in tensors:
            if tensor.untyped_storage().data_ptr() not in places:
                scribble(tensor)  # no guard delays this write, so the tensor was copied
        optimizer.step()
        for tensor in tensors:
            scribble(tensor)
        coordinator.wait_all(timeout=60)
        save = RunDirectory(Path(name)).save(0, "0123456789abcdef", SaveKind.CHECKPOINT, 1)
        (path,) = save.files.glob("by-*/actor/model_world_size_1_rank_0.pt")
        assert content(torch.load(path, weights_only=True)) == expected
