"""The file of a save holds what was there when ``save_async`` returned, bit for bit."""

import tempfile
from pathlib import Path
from typing import Any

import torch
from hypothesis import given, settings
from trainsync.api.protocol import SaveKind
from trainsync.checkpoint.coordinator import CheckpointCoordinator
from trainsync.monitor.disk_client import DiskMonitorClient
from trainsync.storage.digest import file_digest
from trainsync.storage.layout import RunDirectory
from trainsync.storage.receipts import read_receipt

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
            (entry,) = read_receipt(save.receipt("model", 0)).files
            path = save.files / entry.path
            assert content(torch.load(path, weights_only=True)) == expected
            assert (path.stat().st_size, file_digest(path)) == (entry.bytes, entry.digest)
