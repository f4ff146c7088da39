"""Shards that are mapped into memory."""

from functools import partial
from pathlib import Path

import torch
from trainsync.checkpoint.load.reshard import shard_files
from trainsync.checkpoint.save.files import writer
from trainsync.checkpoint.save.files.dumping import dump


def test_pages_that_were_given_back_are_read_again_from_the_file(tmp_path: Path) -> None:
    weights = torch.randn(300_000)  # 1.2 MB: many pages, and no whole number of them
    writer.write(tmp_path, "model.pt", partial(dump, {"small": torch.ones(3), "weights": weights}))
    shard = shard_files.open_shard(tmp_path / "model.pt")
    for _ in range(2):
        assert torch.equal(shard["weights"], weights)
        for tensor in shard.values():
            shard_files.forget_pages(tensor)
    assert torch.equal(shard["small"], torch.ones(3))
