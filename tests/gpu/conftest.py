"""Checks on one real GPU (`make test-gpu`); a machine without one skips them."""

import pytest
import torch


@pytest.fixture(autouse=True)
def _needs_a_gpu() -> None:
    if not torch.cuda.is_available():
        pytest.skip("this machine has no GPU")
