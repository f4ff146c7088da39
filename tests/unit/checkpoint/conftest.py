"""What the tests of checkpoints share."""

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def torchs_own_safe_globals() -> Iterator[None]:
    """Megatron, once imported, lets `weights_only=True` load more: paths, arrays and its own."""
    added = torch.serialization.get_safe_globals()
    own = [known for known in added if "torch" in getattr(known, "__module__", "").split(".")]
    torch.serialization.clear_safe_globals()
    torch.serialization.add_safe_globals(own)
    yield
    torch.serialization.add_safe_globals(added)
