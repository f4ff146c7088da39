"""What a layer computes tells which weights it has, to one step of the dtype of a few of them."""

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from trainsync.weights.proof.products import (
    PROBES,
    further_off,
    make_probes,
    same_bytes,
    sampled_rows,
    tells_layout,
)


def _weights(rows: int, columns: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (0.02 * torch.randn(rows, columns, generator=generator)).to(dtype)


def _stepped(weights: torch.Tensor, share: float, seed: int) -> torch.Tensor:
    """The next larger number of the dtype in place of a share of them."""
    generator = torch.Generator().manual_seed(seed)
    chosen = torch.rand(weights.shape, generator=generator) < share
    larger = torch.nextafter(weights, torch.full_like(weights, torch.inf))
    return torch.where(chosen, larger, weights)


@settings(deadline=None, max_examples=60)
@given(
    rows=st.integers(1, 200),
    columns=st.integers(1, 700),
    dtype=st.sampled_from([torch.bfloat16, torch.float16, torch.float32]),
    seed=st.integers(0, 1 << 30),
)
def test_a_layer_with_its_weights_is_never_further_off_than_rounding_explains(
    rows: int, columns: int, dtype: torch.dtype, seed: int
) -> None:
    weights = _weights(rows, columns, dtype, seed)
    probes = make_probes(columns, dtype, random.Random(seed))
    said = (probes.float() @ weights.float().T).to(dtype)
    assert further_off(said, weights, probes) == 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("columns", [256, 1024, 4096])
def test_one_step_of_one_weight_in_a_thousand_shows(columns: int, dtype: torch.dtype) -> None:
    for seed in range(10):
        weights = _weights(128, columns, dtype, seed)
        probes = make_probes(columns, dtype, random.Random(seed))
        older = _stepped(weights, 0.001, seed + 1000)
        said = (probes.float() @ older.float().T).to(dtype)
        assert further_off(said, weights, probes) > 0


def test_each_column_is_in_one_probe_as_one_or_minus_one() -> None:
    probes = make_probes(100, torch.bfloat16, random.Random(0))
    assert probes.shape == (PROBES, 100)
    assert torch.equal(probes.abs().sum(0), torch.ones(100, dtype=torch.bfloat16))
    assert torch.equal(probes, make_probes(100, torch.bfloat16, random.Random(0)))
    assert not torch.equal(probes, make_probes(100, torch.bfloat16, random.Random(1)))


def test_rows_are_in_order_and_others_with_another_seed() -> None:
    assert sampled_rows(5, random.Random(0), 5).tolist() == [0, 1, 2, 3, 4]
    one, other = (sampled_rows(10_000, random.Random(seed), 64) for seed in (0, 1))
    assert len(one) == 64
    assert torch.equal(one, one.sort().values)
    assert not torch.equal(one, other)
    assert len(sampled_rows(10, random.Random(0), 3)) == 3


def test_a_layer_of_nan_is_never_right() -> None:
    weights = _weights(8, 8, torch.bfloat16, 0)
    probes = make_probes(8, torch.bfloat16, random.Random(0))
    said = torch.full((PROBES, 8), torch.nan, dtype=torch.bfloat16)
    assert further_off(said, weights, probes) == said.numel()


def test_rows_of_one_number_tell_no_layout() -> None:
    assert not tells_layout(torch.zeros(4, 4))
    assert not tells_layout(torch.ones(1))
    assert tells_layout(torch.tensor([1.0, 1.0, 1.0, 2.0]))
    assert tells_layout(torch.tensor([[0.0, 1.0], [0.0, 1.0]]))


def test_bytes_are_compared_not_numbers() -> None:
    nan = torch.tensor([torch.nan, 1.0])
    assert same_bytes(nan, nan.clone())
    assert not same_bytes(torch.tensor([0.0]), torch.tensor([-0.0]))
    assert not same_bytes(torch.zeros(2), torch.zeros(2, dtype=torch.bfloat16))
    assert not same_bytes(torch.zeros(2), torch.zeros(3))
