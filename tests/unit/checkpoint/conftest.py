"""Fixtures of the checkpoint tests."""

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def torchs_own_safe_globals() -> Iterator[None]:
    """Restores torch's safe globals: an import of Megatron adds paths, arrays and its own
    classes."""
    added = torch.serialization.get_safe_globals()
    own = [known for known in added if "torch" in getattr(known, "__module__", "").split(".")]
    torch.serialization.clear_safe_globals()
    torch.serialization.add_safe_globals(own)
    yield
    torch.serialization.add_safe_globals(added)
