"""Names of a step's files; of shards those of verl, so that its loader and merger read them."""

import re
from typing import Final

DATA_CURSOR_FILE: Final = "data_cursor.json"
"""Beside rank 0's shard."""

_SHARD = re.compile(r"^(?P<name>.+)_world_size_(?P<world>\d+)_rank_(?P<rank>\d+)\.pt$")


def shard_file_name(name: str, rank: int, world_size: int) -> str:
    """``<name>_world_size_W_rank_R.pt``."""
    if not 0 <= rank < world_size:
        raise ValueError(f"rank must be in [0, {world_size}), got {rank}")
    return f"{name}_world_size_{world_size}_rank_{rank}.pt"


def parse_shard_file_name(file_name: str) -> tuple[str, int, int] | None:
    """(name, rank, world size) of a shard's file name; None when it is not one."""
    match = _SHARD.match(file_name)
    if match is None:
        return None
    return match["name"], int(match["rank"]), int(match["world"])
